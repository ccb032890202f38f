"""One CSA2 attention layer, for all four roles."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from csa2_compiled import ops
from csa2_compiled.cache import CSA2Cache, LayerCache, check_cache
from csa2_compiled.compressor import Compressor
from csa2_compiled.config import CSA2Config, LayerRole
from csa2_compiled.indexer import Indexer
from csa2_compiled.masks.layout import AttentionLayout, LayoutChoice
from csa2_compiled.norm import RMSNorm
from csa2_compiled.quantization import PackedTensor
from csa2_compiled.rope import RotaryEmbedding
from csa2_compiled.rows import Rows, buffers, first_rows, read_rows, write_rows
from csa2_compiled.selection import Selection, SelectionRecord
from csa2_compiled.sparse_attention import cached_sparse_attention, layout_for, sparse_attention
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.tokens import (
    CSA2InputError,
    Tokens,
    check_token_arguments,
    group_alignment,
    lay_out_tokens,
)

_BESIDE_THE_CORE = ("indexer.", "wo_a.", "wo_b.")  # parameters whose gradients do not go through the attention core


class CSA2Attention(nn.Module):
    """Attention of layer `layer_idx`: sliding window, selected compressed positions and sink, one softmax.

    ``state_dict()`` has the released names without prefix. dtype: of the activations and dense matrices
    (norms, sink and the pooling of groups stay float32); None is torch's default dtype.
    """

    def __init__(
        self,
        cfg: CSA2Config,
        layer_idx: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.layer_idx = cfg, layer_idx
        self.role = cfg.role(layer_idx)
        self.ratio = cfg.compress_ratios[layer_idx]
        self.publishes_candidates = cfg.publishes_candidates(layer_idx)
        self.selects_within_candidates = cfg.selects_within_candidates(layer_idx)
        self._layout = AttentionLayout.AUTO
        heads, dim = cfg.num_attention_heads, cfg.head_dim
        weights: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.wq_a = nn.Linear(cfg.hidden_size, cfg.q_lora_rank, **weights)
        self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps, device)
        self.wq_b = nn.Linear(cfg.q_lora_rank, heads * dim, **weights)
        self.wkv = nn.Linear(cfg.hidden_size, dim, **weights)
        self.kv_norm = RMSNorm(dim, cfg.rms_norm_eps, device)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device))
        self.wo_a = nn.Linear(heads * dim // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank, **weights)
        self.wo_b = nn.Linear(cfg.o_groups * cfg.o_lora_rank, cfg.hidden_size, **weights)
        self.rotary = RotaryEmbedding(
            cfg.qk_rope_head_dim, cfg.rotary_parameters(layer_idx), cfg.max_position_embeddings, device
        )
        if self.role is LayerRole.FULL:
            self.compressor = Compressor(cfg, self.ratio, dtype, device)
        if self.role in (LayerRole.FULL, LayerRole.REINDEX):
            self.indexer = Indexer(cfg, self.role is LayerRole.FULL, dtype, device)
            self.indexer.requires_grad_(False)  # a hard selection gives it no gradient

    def forward(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: CSA2Cache | LayerCache | None = None,
        tokens: Tokens | None = None,
        record: SelectionRecord | None = None,
    ) -> CSA2Output:
        """Attend over a whole sequence, or over the next tokens of one that a cache holds.

        x: [B, S, hidden_size]. state: from the layer before; a fresh ``CSA2State()`` (or None) for the first.
        attention_mask: int or bool [B, S], 1 token, 0 right padding; padded queries give 0. document_ids:
        int [B, S], 0 pad, for packed rows; not with a cache. cache: what came before x; this layer writes its own
        part, and ``cache.advance`` ends the step after all layers. Nothing has a gradient then. tokens: what a model
        made of mask, ids and the cache's lengths, once for all its layers; given instead of mask and ids, and then
        cache is this layer's part. record: takes this layer's selection, or replays the one it holds (see
        `csa2_compiled.checkpointing`); not with a cache. Raises CSA2InputError (a ValueError) before anything is
        computed.
        """
        if torch.compiler.is_compiling():
            self._check(x, state, cache)  # a graph cannot read values
            return self._attend(x, *self.lay_out(x, state, attention_mask, document_ids, cache, tokens), record)
        if record is not None and cache is not None:
            raise CSA2InputError("record came besides a cache, whose steps have no gradient; leave it out")
        with self.begin(x, state, attention_mask, document_ids, cache, tokens):
            return self._attend(x, *self.lay_out(x, state, attention_mask, document_ids, cache, tokens), record)

    @contextmanager
    def begin(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: CSA2Cache | LayerCache | None = None,
        tokens: Tokens | None = None,
    ) -> Iterator[None]:
        """What a call needs around it on the host: checked inputs, a cache that is ready, no gradients with one."""
        self.check_inputs(x, state, attention_mask, document_ids, cache, tokens)
        if isinstance(cache, CSA2Cache):
            cache.begin_step(x.shape[1], attention_mask, self.layer_idx)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            yield

    def lay_out(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: CSA2Cache | LayerCache | None = None,
        tokens: Tokens | None = None,
    ) -> tuple[CSA2State, Tokens, LayerCache | None]:
        """The arguments of `forward` in the form that every layer of a model step shares."""
        past = cache.lengths if isinstance(cache, CSA2Cache) else None
        if tokens is None:
            tokens = lay_out_tokens(x.shape[1], x.device, attention_mask, document_ids, past)
        layer_cache = cache.layers[self.layer_idx] if isinstance(cache, CSA2Cache) else cache
        return CSA2State() if state is None else state, tokens, layer_cache

    def _attend(
        self,
        x: Tensor,
        state: CSA2State,
        tokens: Tokens,
        cache: LayerCache | None,
        record: SelectionRecord | None = None,
    ) -> CSA2Output:
        if self._layout is AttentionLayout.DENSE:
            _make_sizes_static(x, state)
        rotations = self.rotary(tokens.positions)
        q_latent = self.q_norm(self.wq_a(x))
        q = self.queries(q_latent, rotations)
        window_kv = self.window_kv(x, rotations)
        state = self._publish(x, q_latent, rotations, state, tokens, cache, record)
        read = state.of_ratio(self.ratio)
        compressed_kv = None if read is None else read.compressed_kv
        topk_indices = None if read is None else read.topk_indices
        attended = self._attention_core(q, window_kv, compressed_kv, topk_indices, tokens, cache)
        return CSA2Output(self._project_output(attended, rotations, tokens), state)

    def _attention_core(
        self,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Rows | None,
        topk_indices: Tensor | None,
        tokens: Tokens,
        cache: LayerCache | None,
    ) -> Tensor:
        cfg = self.cfg
        if cache is not None:
            layout = self.choose_layout(q, 0, cached=True).layout
            return cached_sparse_attention(
                q,
                window_kv,
                cache.window,
                compressed_kv,
                topk_indices,
                self.attn_sink,
                cfg.sliding_window,
                cfg.index_topk,
                tokens,
                layout,
            )
        assert not isinstance(compressed_kv, PackedTensor)
        inputs = (q, window_kv, self.attn_sink, *(() if compressed_kv is None else (compressed_kv,)))
        num_compressed = 0 if compressed_kv is None else compressed_kv.shape[1]
        layout = self.choose_layout(q, num_compressed, any(t.requires_grad for t in inputs)).layout
        return sparse_attention(
            q,
            window_kv,
            compressed_kv,
            topk_indices,
            self.attn_sink,
            cfg.sliding_window,
            cfg.index_topk,
            tokens.starts,
            layout,
        )

    @property
    def layout(self) -> AttentionLayout:
        """How the attention core lays out its keys: "auto", "dense", "slots" or "plain"; may be assigned."""
        return self._layout

    @layout.setter
    def layout(self, layout: AttentionLayout | str) -> None:
        allowed = [choice.value for choice in AttentionLayout]
        if layout not in allowed:
            raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(allowed)}")
        self._layout = AttentionLayout(layout)

    @property
    def kind(self) -> tuple[str, int, bool, bool, str]:
        """Layers of the same kind do the same with other weights, so one compiled region serves them."""
        role, within = self.role.value, self.selects_within_candidates
        return role, self.ratio, self.publishes_candidates, within, self._layout.value

    def check_inputs(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: CSA2Cache | LayerCache | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Raise CSA2InputError for inputs that `forward` cannot take; reads the values of mask and ids."""
        self._check(x, state, cache)
        if tokens is None:
            alignment = group_alignment(self.cfg.compress_ratios)
            check_token_arguments(x.shape[0], x.shape[1], alignment, attention_mask, document_ids)
        elif attention_mask is not None or document_ids is not None:
            name = "document_ids" if attention_mask is None else "attention_mask"
            raise CSA2InputError(f"{name} came besides tokens; tokens stands for both and goes without them")
        if isinstance(cache, LayerCache) and (tokens is None or tokens.past is None):
            raise CSA2InputError("cache is one layer's part and goes with tokens after its past; pass the CSA2Cache")
        if cache is None and tokens is not None and tokens.past is not None:
            raise CSA2InputError("tokens follow a cache's past, and there is no cache; pass the layer's part of it")
        if isinstance(cache, CSA2Cache):
            if tokens is not None:
                raise CSA2InputError(
                    "tokens came besides a CSA2Cache, which gives its own; with tokens, cache is a layer's"
                )
            check_cache(cache, self.cfg, x, x.dtype, document_ids)
            cache.check_step(x.shape[1], attention_mask, self.layer_idx)

    def check_layout(self, *inputs: Tensor) -> None:
        """Raise CSA2InputError if a gradient would go through the attention core and `layout` is one that has none.

        inputs: what brings a gradient there besides the layer's own parameters: x and published rows, or the
        parameters that these come from.
        """
        # FlexAttention has no backward on CPU, and its backward on CUDA is neither tested nor served by a pass.
        if self._layout not in (AttentionLayout.DENSE, AttentionLayout.SLOTS) or not torch.is_grad_enabled():
            return
        own = (p for name, p in self.named_parameters() if not name.startswith(_BESIDE_THE_CORE))
        if any(tensor.requires_grad for tensor in (*inputs, *own)):
            raise CSA2InputError(
                f"layout is {self._layout.value}, which has no gradient; set the layer's layout to auto or plain, or "
                "call under torch.no_grad()"
            )

    def queries(self, q_latent: Tensor, rotations: Tensor) -> Tensor:
        """The queries of all heads, after RoPE: latents [B, S, q_lora_rank] -> [B, S, H, D]."""
        q = self.wq_b(q_latent).unflatten(-1, (self.cfg.num_attention_heads, self.cfg.head_dim))
        return ops.apply_rope(q, rotations, False)

    def window_kv(self, x: Tensor, rotations: Tensor) -> Tensor:
        """The window key (and value) of each token, after RoPE and fp8: x [B, S, hidden] -> [B, S, D]."""
        kv = ops.apply_rope(self.kv_norm(self.wkv(x)), rotations, False)
        return ops.quantize_dequantize(kv, "fp8")

    def choose_layout(self, q: Tensor, num_compressed: int, trains: bool = False, cached: bool = False) -> LayoutChoice:
        """The layout this layer takes for q [B, S, H, D] and T compressed positions, with the reason.

        trains: whether any input of the attention core requires a gradient. cached: whether there is a cache.
        """
        topk = self.cfg.index_topk if self.ratio else 0
        return layout_for(q, num_compressed, topk, self.cfg.sliding_window, self.layout, trains, cached=cached)

    def compiled_layout(self, num_tokens: int) -> LayoutChoice:
        """The layout a compiled call over `num_tokens` tokens takes without gradients; runs nothing."""
        cfg, topk = self.cfg, self.cfg.index_topk if self.ratio else 0
        shape = (1, num_tokens, cfg.num_attention_heads, cfg.head_dim)
        q = torch.empty(shape, dtype=self.wq_a.weight.dtype, device="meta")
        compressed = num_tokens // self.ratio if self.ratio else 0
        device_type = self.wq_a.weight.device.type
        return layout_for(q, compressed, topk, cfg.sliding_window, self.layout, compiling=True, device_type=device_type)

    def _publish(
        self,
        x: Tensor,
        q_latent: Tensor,
        rotations: Tensor,
        state: CSA2State,
        tokens: Tokens,
        cache: LayerCache | None,
        record: SelectionRecord | None,
    ) -> CSA2State:
        before = state.of_ratio(self.ratio)
        if self.role is LayerRole.FULL:
            compressed_kv, index_keys = (
                self._compress(x, tokens, record) if cache is None else self._extend(x, tokens, cache)
            )
        elif self.role is LayerRole.REINDEX and before is not None:
            compressed_kv, index_keys = before.compressed_kv, before.index_keys
        else:
            return state
        candidates = None if before is None else before.candidates
        if record is not None and record.selection is not None:
            replayed = record.selection
            topk_indices, candidates = replayed.topk_indices, replayed.candidates
        else:
            with nullcontext() if record is None else record.skipped_by_replay():
                keys = read_rows(index_keys)
                topk_indices, candidates = self._select(x, q_latent, rotations, keys, candidates, tokens)
            if record is not None:
                record.keep(Selection(keys, topk_indices, candidates))
        return state.publish(Publication(self.ratio, compressed_kv, index_keys, topk_indices, candidates))

    @torch.no_grad()
    def _select(
        self,
        x: Tensor,
        q_latent: Tensor,
        rotations: Tensor,
        index_keys: Tensor,
        candidates: Tensor | None,
        tokens: Tokens,
    ) -> tuple[Tensor, Tensor | None]:
        """The selection, and the candidates that later layers have: this layer's own, or those it was given."""
        start, stop = tokens.visible_range(self.ratio)
        start, stop = (bound.expand(x.shape[0], -1).contiguous() for bound in (start, stop))
        scores = self.indexer.scores(x, q_latent, rotations, index_keys, start, stop)
        within = candidates if self.selects_within_candidates else None
        topk_indices = ops.select_topk(scores, within, self.cfg.index_topk)
        if self.publishes_candidates:
            blocks, size = self.cfg.candidate_topk_blocks, self.cfg.candidate_block_size
            candidates = ops.candidate_blocks(scores, stop, tokens.group_starts(self.ratio), blocks, size)
        return topk_indices, candidates

    def _compress(self, x: Tensor, tokens: Tokens, record: SelectionRecord | None) -> tuple[Tensor, Tensor]:
        """Compressed KV [B, T, D] and index keys [B, T, Di] of a whole sequence."""
        return self._keys_of(self.compressor(x), tokens.compressed_positions(self.ratio), record)

    def _extend(self, x: Tensor, tokens: Tokens, cache: LayerCache) -> tuple[Rows, Rows]:
        """The same of the past and these tokens: writes the new rows and returns all that queries may see."""
        assert cache.compressed_kv is not None
        assert cache.index_keys is not None
        latent = self.compressor.extend(x, tokens, cache.gates)
        groups, complete = tokens.new_groups(self.ratio)
        fresh = self._keys_of(latent, torch.where(complete, groups * self.ratio, 0))
        rows = torch.where(complete, groups, cache.capacity)
        for stored, written in zip((cache.compressed_kv, cache.index_keys), fresh, strict=True):
            write_rows(stored, rows, written)
        count = cache.num_compressed(self.ratio)
        return first_rows(cache.compressed_kv, count), first_rows(cache.index_keys, count)

    def _keys_of(
        self, latent: Tensor, positions: Tensor, record: SelectionRecord | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compressed KV and index keys of latents [B, n, D] at positions [B or 1, n]; a record may hold the latter."""
        rotations = self.rotary(positions)
        compressed_kv = ops.quantize_dequantize(ops.apply_rope(latent, rotations, False), "nvfp4")
        replayed = None if record is None else record.selection
        if replayed is not None and replayed.index_keys is not None:
            return compressed_kv, replayed.index_keys
        with torch.no_grad(), nullcontext() if record is None or replayed is not None else record.skipped_by_replay():
            return compressed_kv, self.indexer.keys(latent, rotations)

    def _project_output(self, attended: Tensor, rotations: Tensor, tokens: Tokens) -> Tensor:
        cfg = self.cfg
        grouped = ops.apply_rope(attended, rotations, True).flatten(2).unflatten(-1, (cfg.o_groups, -1))
        wo_a = self.wo_a.weight.view(cfg.o_groups, cfg.o_lora_rank, -1)
        output = self.wo_b(torch.einsum("bsgd,grd->bsgr", grouped, wo_a).flatten(2))
        if tokens.is_real is None:
            return output
        return torch.where(tokens.is_real.unsqueeze(-1), output, 0)

    def _check(self, x: Tensor, state: CSA2State | None, cache: CSA2Cache | LayerCache | None) -> None:
        cfg = self.cfg
        if not isinstance(x, Tensor):
            raise CSA2InputError(f"x is a {type(x).__name__}; it must be a tensor [batch, tokens, hidden_size]")
        if x.dim() != 3 or x.shape[-1] != cfg.hidden_size:
            raise CSA2InputError(
                f"x has shape {tuple(x.shape)}; it must be [batch, tokens, hidden_size {cfg.hidden_size}]"
            )
        if x.dtype != self.wq_a.weight.dtype:
            raise CSA2InputError(f"x has dtype {x.dtype}; the layer's is {self.wq_a.weight.dtype}")
        if not 1 <= x.shape[1] <= cfg.max_position_embeddings:
            raise CSA2InputError(
                f"x has {x.shape[1]} tokens; 1 to max_position_embeddings {cfg.max_position_embeddings} are allowed"
            )
        if state is not None and not isinstance(state, CSA2State):
            raise CSA2InputError(f"state is a {type(state).__name__}; it must be a CSA2State")
        if cache is not None and not isinstance(cache, CSA2Cache | LayerCache):
            raise CSA2InputError(f"cache is a {type(cache).__name__}; it must be a CSA2Cache")
        if cache is not None and self._layout is AttentionLayout.DENSE:
            raise CSA2InputError(
                "cache was given and layout is dense, which has no cached form; use auto, slots or plain"
            )
        state = CSA2State() if state is None else state
        if cache is None:
            read = state.of_ratio(self.ratio)
            self.check_layout(x, *(() if read is None else buffers(read.compressed_kv)))
        if self.role in (LayerRole.REINDEX, LayerRole.REUSE):
            self._check_source(x, state, cached=cache is not None)
        if self.selects_within_candidates:
            self._check_candidates(x, state, cached=cache is not None)

    def _check_source(self, x: Tensor, state: CSA2State, cached: bool) -> None:
        read = state.of_ratio(self.ratio)
        if read is None:
            had = [p.compress_ratio for p in state.publications]
            found = f"it has ratio {had} only" if had else "it is empty"
            raise CSA2InputError(
                f"state holds no source of compress ratio {self.ratio} for {self._name()}; {found}. Run layer "
                f"{self.cfg.kv_source(self.layer_idx)} first and pass its state on"
            )
        rows = buffers(read.compressed_kv)[0]
        if rows.device != x.device or (isinstance(read.compressed_kv, Tensor) and rows.dtype != x.dtype):
            raise CSA2InputError(
                f"state's compressed_kv is {rows.dtype} on {rows.device}; x is {x.dtype} on {x.device}, and both must "
                "be alike"
            )
        # A cache's rows may be more than those of its tokens.
        positions = rows.shape[1] if cached else x.shape[1] // self.ratio
        expected = (x.shape[0], positions, self.cfg.head_dim)
        if isinstance(read.compressed_kv, Tensor) and tuple(rows.shape) != expected:
            raise CSA2InputError(
                f"state's compressed_kv has shape {tuple(rows.shape)}; {self._name()} needs {list(expected)} for this "
                "x: the state is of another batch or length"
            )
        if read.topk_indices.shape[:2] != x.shape[:2]:  # lengths that differ in a partial group only
            raise CSA2InputError(
                f"state's topk_indices are of {read.topk_indices.shape[1]} tokens; {self._name()} needs "
                f"{x.shape[1]} for this x: the state is of another length"
            )

    def _check_candidates(self, x: Tensor, state: CSA2State, cached: bool) -> None:
        read = state.of_ratio(self.ratio)
        if read is None or read.candidates is None:
            raise CSA2InputError(
                f"state holds no candidates for {self._name()}; run layer {self.cfg.candidate_source_layer_id} first"
            )
        positions = buffers(read.compressed_kv)[0].shape[1] if cached else x.shape[1] // self.ratio
        expected = (x.shape[0], x.shape[1], positions)
        if tuple(read.candidates.shape) != expected:
            raise CSA2InputError(
                f"state's candidates have shape {tuple(read.candidates.shape)}; {self._name()} needs "
                f"{list(expected)} for this x: the state is of another batch or length"
            )

    def _name(self) -> str:
        # Called for errors only: reading layer_idx in a compiled region would compile it once a layer.
        return f"layer {self.layer_idx} ({self.role.value}, compress ratio {self.ratio})"


def _make_sizes_static(x: Tensor, state: CSA2State) -> None:
    """Turn symbolic sizes into numbers before anything is traced: dense masks capture them, so a graph a length."""
    published = (
        t for p in state.publications for t in (*buffers(p.compressed_kv), *buffers(p.index_keys), p.topk_indices)
    )
    for tensor in (x, *published):
        for size in tensor.shape:
            index(size)
