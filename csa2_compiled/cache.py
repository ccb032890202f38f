"""The cache of decoding and chunked prefill: what the past leaves behind, in buffers that never move.

Every layer keeps a ring of its newest window keys. A full layer also keeps its compressed KV and index keys and,
where a group has several tokens, the values and gates of the newest ones, because a group may be unfinished. A
step writes behind the rows' lengths and ``advance`` moves these. Lengths are a device tensor, so one compiled
graph serves all positions and rows of different lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from csa2_compiled.config import CSA2Config, LayerRole
from csa2_compiled.quantization import DTYPES
from csa2_compiled.rows import Rows, buffers, empty_rows
from csa2_compiled.tokens import CSA2InputError, is_capturing


@dataclass
class HostRecord:
    """What the host knows of a cache without asking the device.

    most: no row is longer than this; most_before: nor was one as the step in work began. step: that step's number
    of tokens, None before one. ran: the layers that have run in it.
    """

    most: int = 0
    most_before: int = 0
    step: int | None = None
    ran: set[int] = field(default_factory=set)

    def begin(self, num_tokens: int) -> None:
        """A step of that many tokens begins."""
        self.most_before, self.step = self.most, num_tokens
        self.ran.clear()

    def end(self, most_kept: int) -> None:
        """The step is over, and no row keeps more than `most_kept` of its tokens."""
        self.most = self.most_before + most_kept
        self.ran.clear()

    def copy(self) -> "HostRecord":
        return replace(self, ran=set(self.ran))

    def assign(self, other: "HostRecord") -> None:
        self.most, self.most_before, self.step, self.ran = other.most, other.most_before, other.step, set(other.ran)


@dataclass(frozen=True)
class LayerCache:
    """One layer's rows. The last row of each is a spare one, which takes what is not kept.

    window: [B, ring + 1, D], the key of position p in row p % ring. gates: [B, ring + 1, 2 D], at least float32,
    the values and gates of the newest tokens, likewise; None where a group is one token. compressed_kv:
    [B, T + 1, D] and index_keys: [B, T + 1, Di]; None but on full layers.
    """

    record: HostRecord
    window: Rows
    gates: Tensor | None = None
    compressed_kv: Rows | None = None
    index_keys: Rows | None = None

    @property
    def capacity(self) -> int:
        """Compressed positions there is room for; the number of the spare row. Of full layers only."""
        assert self.compressed_kv is not None
        return buffers(self.compressed_kv)[0].shape[1] - 1

    def all_rows(self) -> Iterator[Rows]:
        yield from (r for r in (self.window, self.gates, self.compressed_kv, self.index_keys) if r is not None)

    def num_compressed(self, ratio: int) -> int:
        """Compressed positions to look at: all that can exist by the end of this step.

        A compiled or captured graph looks at as many as there is room for, because it serves every step.
        """
        if torch.compiler.is_compiling() or is_capturing(buffers(self.window)[0].device):
            return self.capacity
        return min((self.record.most_before + (self.record.step or 0)) // ratio, self.capacity)


class CSA2Cache:
    """The past of `batch_size` rows of at most `max_seq_len` tokens, for every layer of a model.

    dtype: of the activations; None is torch's default. packed: keep window, compressed KV and index keys as the
    bytes of their formats (fp8, nvfp4, mxfp4); reads are bit-equal to an unpacked cache. max_truncate: how many
    of its newest tokens a row can lose again. Raises CSA2InputError for a bad argument.

    One model step: all layers in order with a fresh ``CSA2State()`` and this cache, then ``advance``; the forward
    of CSA2ForCausalLM does both. Calls with a cache give no gradients.
    """

    def __init__(
        self,
        cfg: CSA2Config,
        batch_size: int,
        max_seq_len: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        packed: bool = False,
        max_truncate: int = 8,
    ) -> None:
        _check_int("batch_size", batch_size, 1)
        _check_int("max_seq_len", max_seq_len, 1, cfg.max_position_embeddings)
        _check_int("max_truncate", max_truncate, 0)
        self.cfg, self.batch_size, self.max_seq_len = cfg, batch_size, max_seq_len
        self.packed, self.max_truncate = packed, max_truncate
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in DTYPES:
            raise CSA2InputError(f"dtype is {dtype!r}; it must be one of {', '.join(map(str, DTYPES))}")
        self.record = HostRecord()
        with torch.inference_mode(False), torch.no_grad():  # any later call may write these buffers
            self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            self._before, self._real, self._farthest = (torch.zeros_like(self.lengths) for _ in range(3))
            self.device = self.lengths.device
            self.layers = tuple(self._make_layer(layer) for layer in range(cfg.num_hidden_layers))

    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self._all_buffers())

    def advance(self, num_tokens: int | Tensor) -> None:
        """Make the first `num_tokens` tokens of the step just run part of the past; padding never counts.

        num_tokens: an int, or an integer tensor [B], one number a row (clamped to the row's tokens). It may be
        called again, with another number, until the next step begins: a model's forward has taken all of its
        tokens, and after the verification of a draft a smaller number keeps the accepted ones. A step of more than
        max_truncate tokens cannot leave out more than those. Raises CSA2InputError.
        """
        step, before = self.record.step, self.record.most_before
        if step is None:
            raise CSA2InputError("advance: no step has been run since the cache was made, reset or truncated")
        if isinstance(num_tokens, Tensor):
            self._check_per_row("num_tokens", num_tokens)
            kept = num_tokens.to(self.device).clamp(min=0).minimum(self._real)
            shorter = (self._real - kept) * (self._before + kept > 0)  # an empty row needs nothing
            left_out = 0 if step <= self.max_truncate else int(shorter.max())
            most_kept = step
        else:
            _check_int("num_tokens", num_tokens, 0, step)
            kept, left_out, most_kept = self._real.clamp(max=num_tokens), step - num_tokens, num_tokens
        if left_out > self.max_truncate and before + most_kept > 0:
            raise CSA2InputError(
                f"num_tokens leaves out {left_out} of a step's {step} tokens, which have overwritten what came before; "
                f"at most max_truncate = {self.max_truncate} can be left out"
            )
        self.record.end(most_kept)
        torch.add(self._before, kept, out=self.lengths)

    def truncate(self, num_tokens: int | Tensor) -> None:
        """Drop the newest `num_tokens` tokens of every row, exactly as if they had never come.

        num_tokens: an int, or an integer tensor [B], one number a row. No row may fall more than max_truncate
        tokens behind the farthest it has reached. Reads lengths from the device. Raises CSA2InputError, and then
        nothing has changed.
        """
        if isinstance(num_tokens, Tensor):
            self._check_per_row("num_tokens", num_tokens)
            dropped = num_tokens.to(self.device, torch.int64)
        else:
            _check_int("num_tokens", num_tokens, 0)
            dropped = torch.full_like(self.lengths, num_tokens)
        lengths = self.lengths - dropped
        if int(dropped.min()) < 0 or int(lengths.min()) < 0:
            raise CSA2InputError(
                f"num_tokens is {num_tokens}; rows hold {self.lengths.tolist()} tokens: 0 to those are allowed"
            )
        behind = int(((self._farthest - lengths) * (self.lengths > 0)).max())
        if behind > self.max_truncate:
            raise CSA2InputError(
                f"num_tokens is {num_tokens}, which would leave a row {behind} tokens behind the farthest it has "
                f"reached; at most max_truncate = {self.max_truncate} are allowed"
            )
        self.lengths.copy_(lengths)
        self._end_step(int(lengths.max()))

    def reset(self) -> None:
        """Forget everything: every row is empty again."""
        self.lengths.zero_()
        self._farthest.zero_()
        self._end_step(0)

    def reorder(self, rows: Tensor) -> None:
        """Make row b a copy of what row ``rows[b]`` was, as beam search does.

        rows: integer [B], numbers of rows, repeats allowed. Takes memory for a copy of the largest buffer. Raises
        CSA2InputError.
        """
        self._check_per_row("rows", rows)
        if int(rows.min()) < 0 or int(rows.max()) >= self.batch_size:
            raise CSA2InputError(f"rows is {rows.tolist()}; row numbers from 0 to {self.batch_size - 1} are allowed")
        rows = rows.to(self.device, torch.int64)
        for tensor in self._all_buffers():
            tensor.copy_(tensor[rows])

    @contextmanager
    def step(self, num_tokens: int, attention_mask: Tensor | None = None) -> Iterator[None]:
        """A step of a whole model: begins on entry and takes all of its tokens on exit, unless that raises."""
        self.begin_step(num_tokens, attention_mask)
        yield
        self.advance(num_tokens)

    def begin_step(self, num_tokens: int, attention_mask: Tensor | None = None, layer: int | None = None) -> None:
        """Make ready for `num_tokens` tokens a row; layers and models that are called with the cache do this.

        attention_mask: bool or int [B, num_tokens], 0 at right padding. layer: the one that runs now; None for all.
        Raises CSA2InputError before anything changes.
        """
        self.check_step(num_tokens, attention_mask, layer)
        record = self.record
        if layer is None or not record.ran:
            record.begin(num_tokens)
            self._before.copy_(self.lengths)
            if attention_mask is None:
                self._real.fill_(num_tokens)
            else:
                self._real.copy_((attention_mask != 0).sum(1))
            farthest = self._farthest * (self.lengths > 0)  # an empty row begins anew
            torch.maximum(farthest, self.lengths + self._real, out=self._farthest)
        record.ran.update(range(len(self.layers)) if layer is None else (layer,))

    def check_step(self, num_tokens: int, attention_mask: Tensor | None = None, layer: int | None = None) -> None:
        """Raise CSA2InputError where `begin_step` would; reads the device only where the cache seems full."""
        record, room = self.record, self.max_seq_len
        if record.most + num_tokens > room:
            real = num_tokens if attention_mask is None else (attention_mask.to(self.device) != 0).sum(1)
            record.most = int(self.lengths.max())
            if int((self.lengths + real).max()) > room:
                raise CSA2InputError(
                    f"cache has room for max_seq_len = {room} tokens a row; it holds up to {record.most} and this "
                    f"step brings {num_tokens} more"
                )
        if layer is not None and record.ran and num_tokens != record.step:
            raise CSA2InputError(
                f"cache is in a step of {record.step} tokens and layer {layer} got {num_tokens}; call cache.advance "
                "before the next step"
            )
        again = record.ran if layer is None else record.ran & {layer}
        if again and record.step is not None and record.step > self.max_truncate and record.most > 0:
            raise CSA2InputError(
                f"cache: layer {min(again)} has run in this step, whose {record.step} tokens have overwritten the "
                "window before them; call cache.advance once a step, or cache.reset after a failed one"
            )

    def _end_step(self, most: int) -> None:
        self.record.assign(HostRecord(most=most, most_before=most))

    def _check_per_row(self, name: str, value: Tensor) -> None:
        if tuple(value.shape) != (self.batch_size,) or value.is_floating_point() or value.dtype is torch.bool:
            raise CSA2InputError(
                f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}; it must be an integer tensor "
                f"[{self.batch_size}], one a row"
            )

    def _all_buffers(self) -> Iterator[Tensor]:
        yield from (self.lengths, self._before, self._real, self._farthest)
        for layer in self.layers:
            for rows in layer.all_rows():
                yield from buffers(rows)

    def _make_layer(self, layer: int) -> LayerCache:
        cfg, ratio = self.cfg, self.cfg.compress_ratios[layer]
        names = ("fp8", "nvfp4", "mxfp4") if self.packed else (None, None, None)

        def rows(count: int, dim: int, dtype: torch.dtype, format_name: str | None = None) -> Rows:
            return empty_rows((self.batch_size, count + 1, dim), dtype, self.device, format_name)

        # After a step and after dropping max_truncate tokens the window of the next query must still be there,
        # and so must the tokens of the group that may have become unfinished.
        window = rows(cfg.sliding_window - 1 + self.max_truncate or 1, cfg.head_dim, self.dtype, names[0])
        if cfg.role(layer) is not LayerRole.FULL:
            return LayerCache(self.record, window)
        gates = None
        if ratio > 1:
            wide = torch.promote_types(self.dtype, torch.float32)
            unpacked = rows(ratio - 1 + self.max_truncate, 2 * cfg.head_dim, wide)
            assert isinstance(unpacked, Tensor)
            gates = unpacked
        positions = -(-self.max_seq_len // ratio)
        compressed_kv = rows(positions, cfg.head_dim, self.dtype, names[1])
        index_keys = rows(positions, cfg.index_head_dim, self.dtype, names[2])
        return LayerCache(self.record, window, gates, compressed_kv, index_keys)


def check_cache(cache: CSA2Cache, cfg: CSA2Config, x: Tensor, dtype: torch.dtype, document_ids: Tensor | None) -> None:
    """Raise CSA2InputError for a cache that is not of this model, batch, dtype or device, or packed documents with one.

    x: [B, S] or [B, S, hidden_size], what the call got; dtype: of the model's activations.
    """
    if cache.cfg != cfg:
        raise CSA2InputError("cache was made for another config; make it with this model's cfg")
    if cache.batch_size != x.shape[0]:
        raise CSA2InputError(f"cache has batch_size {cache.batch_size}; this call has {x.shape[0]} rows")
    if cache.device != x.device:
        raise CSA2InputError(f"cache is on {cache.device}; this call is on {x.device}")
    if cache.dtype != dtype:
        raise CSA2InputError(f"cache has dtype {cache.dtype}; the model's is {dtype}")
    if document_ids is not None:
        raise CSA2InputError("document_ids came with a cache, whose rows are one document each; pass attention_mask")


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise CSA2InputError(f"{name} is {value!r}; it must be {allowed}")
