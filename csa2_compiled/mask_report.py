"""What `csa2 masks` shows, collected from the layers themselves: selections, windows, attention mass, blocks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from csa2_compiled import masks, ops
from csa2_compiled.attention import CSA2Attention
from csa2_compiled.checkpoint import CheckpointError, load_attention
from csa2_compiled.config import ConfigError, CSA2Config, LayerRole
from csa2_compiled.masks.block_mask import block_pair_counts, slot_block_counts
from csa2_compiled.masks.layout import KEY_BLOCK
from csa2_compiled.masks.view_data import (
    EMPTY,
    FULL,
    PARTIAL,
    SELECTED,
    BlockOccupancy,
    LayerView,
    Lineage,
    MaskReport,
    ScoreHistogram,
    byte_labels,
)
from csa2_compiled.model import CSA2Block, CSA2ForCausalLM
from csa2_compiled.rows import read_rows
from csa2_compiled.run_report import BadArgumentError, Origin, Text
from csa2_compiled.sparse_attention import (
    SLOT_KEY_BLOCK,
    dense_block_mask,
    slot_block_mask,
    visible_keys,
    with_sink_slot,
)
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.tokens import Tokens, lay_out_tokens

SCORE_BINS = 32
_QUERIES_AT_ONCE = 256  # bounds the memory of gathered keys and of index scores


@dataclass(frozen=True)
class LayerInputs:
    """What golden-like files hold: a config, an input [B, S, hidden] for every layer, and the weights' path."""

    path: Path
    cfg: CSA2Config
    inputs: tuple[Tensor, ...]


def read_inputs(path: Path) -> LayerInputs:
    """Read a safetensors file with `prefill.{l}.input` for every layer, weights, and a config as metadata `args`.

    Raises BadArgumentError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            args = (file.metadata() or {}).get("args")
            if args is None:
                raise BadArgumentError("--inputs", f"{path} has no metadata `args`, the config in JSON")
            cfg = CSA2Config.from_json(json.loads(args))
            inputs = tuple(file.get_tensor(f"prefill.{i}.input") for i in range(cfg.num_hidden_layers))
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, BadArgumentError):
            raise
        problem = error if isinstance(error, ConfigError) else f"{path} cannot be read: {error}"
        raise BadArgumentError("--inputs", problem) from error
    for i, x in enumerate(inputs):
        if x.dim() != 3 or x.shape[:2] != inputs[0].shape[:2] or x.shape[2] != cfg.hidden_size or x.shape[1] < 1:
            allowed = f"[batch, tokens, {cfg.hidden_size}], alike in all layers"
            raise BadArgumentError("--inputs", f"prefill.{i}.input has shape {list(x.shape)}; it must be {allowed}")
    return LayerInputs(path, cfg, inputs)


@torch.no_grad()
def report_text(
    model: CSA2ForCausalLM, text: Text, origin: Origin | str, layers: Sequence[int], queries: range
) -> MaskReport:
    """Run a text through a model, eagerly, and record the chosen layers and queries.

    origin: what made the model; as str, where all of it comes from.
    """
    device = model.head.weight.device
    recorder = _Recorder(layers, queries)
    model(torch.tensor([list(text.data)], device=device), run_block=recorder.run_block)
    about = {"model": as_text(origin)} if isinstance(origin, str) else _random_origin(origin)
    title = as_text(f"{text.name}, {'the first' if text.truncated else 'all'} {len(text.data)} bytes")
    return MaskReport(title, about, byte_labels(text.data), queries.start, len(queries), tuple(recorder.views))


def _random_origin(origin: Origin) -> dict[str, str]:
    weights = f"random (seed {origin.seed})"
    if origin.weights is not None:
        weights = f"attention from {origin.weights}, the rest random (seed {origin.seed})"
    return {"config": as_text(origin.config or "tiny"), "weights": as_text(weights)}


def as_text(name: str) -> str:
    """A file's name may hold bytes that are no text."""
    return name.encode(errors="backslashreplace").decode()


@torch.no_grad()
def report_inputs(source: LayerInputs, layers: Sequence[int], queries: range, row: int = 0) -> MaskReport:
    """Run each layer on its own input, the state going from layer to layer, and record one row. Raises
    BadArgumentError."""
    recorder, state = _Recorder(layers, queries), CSA2State()
    num_tokens = source.inputs[0].shape[1]
    for i, x in enumerate(source.inputs[: max(layers) + 1]):
        attn = CSA2Attention(source.cfg, i, dtype=x.dtype).eval()
        try:
            load_attention(attn, source.path)
        except CheckpointError as error:
            raise BadArgumentError("--inputs", error) from error
        state = recorder.run(attn, x[row : row + 1], state, lay_out_tokens(num_tokens, x.device)).state
    about = {"inputs and weights": as_text(source.path.name), "row": str(row)}
    title = as_text(f"{source.path.stem}, {num_tokens} tokens")
    labels = tuple(map(str, range(num_tokens)))
    return MaskReport(title, about, labels, queries.start, len(queries), tuple(recorder.views), bytes_text=False)


class _Recorder:
    """Runs layers and records what they looked at. layers: those to record."""

    def __init__(self, layers: Sequence[int], queries: range) -> None:
        self.layers, self.queries = frozenset(layers), queries
        self.views: list[LayerView] = []
        self.selections: dict[int, tuple[Lineage, Tensor]] = {}  # by ratio: who selected, and among which positions

    def run_block(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        output = block(x, state, tokens)
        self.record(block.attn, block.attn_norm(x), state, output.state, tokens)
        return output

    def run(self, attn: CSA2Attention, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        output = attn(x, state, tokens=tokens)
        self.record(attn, x, state, output.state, tokens)
        return output

    def record(self, attn: CSA2Attention, x: Tensor, before: CSA2State, after: CSA2State, tokens: Tokens) -> None:
        read = after.of_ratio(attn.ratio) if attn.ratio else None
        if read is not None and attn.role in (LayerRole.FULL, LayerRole.REINDEX):
            self.selections[attn.ratio] = self._selection(attn, before, read, tokens)
        if attn.layer_idx in self.layers:
            self.views.append(self._view(attn, x, read, tokens))

    def _selection(
        self, attn: CSA2Attention, before: CSA2State, read: Publication, tokens: Tokens
    ) -> tuple[Lineage, Tensor]:
        """Who selected, within what, and how far from the selection before; the allowed positions, bool [Q, T]."""
        _, stop = tokens.visible_range(attn.ratio)
        positions = torch.arange(read_rows(read.compressed_kv).shape[1], device=stop.device)
        allowed = positions < stop[0, self._slice].unsqueeze(-1)
        lineage = Lineage(attn.cfg.kv_source(attn.layer_idx), attn.layer_idx)
        if attn.selects_within_candidates:
            published = before.of_ratio(attn.ratio)
            assert published is not None
            assert published.candidates is not None
            allowed = allowed & published.candidates[0, self._slice]
            lineage = replace(lineage, within=attn.cfg.candidate_source_layer_id)
        earlier = before.of_ratio(attn.ratio)
        if earlier is not None:
            shared, chance = selection_overlap(
                read.topk_indices[0, self._slice], earlier.topk_indices[0, self._slice], allowed
            )
            with_layer = self.selections[attn.ratio][0].selected_by
            lineage = replace(lineage, compared_with=with_layer, overlap=shared, chance=chance)
        return lineage, allowed.cpu()

    def _view(self, attn: CSA2Attention, x: Tensor, read: Publication | None, tokens: Tokens) -> LayerView:
        recent = masks.window_indices(x.shape[1], attn.cfg.sliding_window, x.device)
        lineage, allowed = Lineage(), None
        selected = visible = scores = None
        if read is not None:
            lineage, allowed = self.selections[attn.ratio]
            if lineage.selected_by != attn.layer_idx:  # it moved nothing
                lineage = Lineage(lineage.kv_from, lineage.selected_by, lineage.within)
            selected = read.topk_indices[0, self._slice]
            visible = tokens.visible_range(attn.ratio)[1][0, self._slice].cpu()
            if lineage.selected_by == attn.layer_idx:
                scores = self._scores(attn, x, read, allowed, selected, tokens)
        return LayerView(
            layer=attn.layer_idx,
            role=attn.role.value,
            ratio=attn.ratio,
            window=recent[0, self._slice].cpu(),
            selected=None if selected is None else selected.cpu(),
            allowed=allowed,
            visible=visible,
            mass=self._mass(attn, x, recent, read, tokens),
            scores=scores,
            lineage=lineage,
            blocks=block_occupancy(recent, None if read is None else read.topk_indices[:1], attn.cfg, attn.ratio),
        )

    def _mass(self, attn: CSA2Attention, x: Tensor, recent: Tensor, read: Publication | None, tokens: Tokens) -> Tensor:
        """Attention on sink, window and selection, float32 [H, Q, 3]."""
        rotations = attn.rotary(tokens.positions)
        keys = attn.window_kv(x, rotations)
        parts = []
        for chunk in self._chunks():
            q = attn.queries(attn.q_norm(attn.wq_a(x[:, chunk])), rotations[:, chunk])
            sources = [(keys, recent[:, chunk])]
            if read is not None:
                sources.append((read_rows(read.compressed_kv), read.topk_indices[:, chunk]))
            parts.append(attention_mass(q, attn.attn_sink, sources))
        mass = torch.cat(parts, dim=2)[0].cpu()
        return F.pad(mass, (0, SELECTED + 1 - mass.shape[-1]))  # a window layer selects nothing

    def _scores(
        self,
        attn: CSA2Attention,
        x: Tensor,
        read: Publication,
        allowed: Tensor,
        selected: Tensor,
        tokens: Tokens,
    ) -> ScoreHistogram:
        start, stop = (bound.expand(1, -1) for bound in tokens.visible_range(attn.ratio))
        rotations, keys = attn.rotary(tokens.positions), read_rows(read.index_keys)
        parts = []
        for chunk in self._chunks():
            part = x[:, chunk]
            bounds = (start[:, chunk].contiguous(), stop[:, chunk].contiguous())
            latent = attn.q_norm(attn.wq_a(part))
            scores = attn.indexer.scores(part, latent, rotations[:, chunk], keys, *bounds)[0]
            rows = slice(chunk.start - self.queries.start, chunk.stop - self.queries.start)
            parts.append(score_histogram(scores.float().cpu(), allowed[rows], selected[rows].cpu()))
        fields = ("counts", "low", "high", "threshold")
        return ScoreHistogram(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))

    @property
    def _slice(self) -> slice:
        return slice(self.queries.start, self.queries.stop)

    def _chunks(self) -> list[slice]:
        stop = self.queries.stop
        return [slice(i, min(i + _QUERIES_AT_ONCE, stop)) for i in range(self.queries.start, stop, _QUERIES_AT_ONCE)]


def attention_mass(q: Tensor, sink: Tensor, sources: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """How the softmax of each query and head is split, float32 [B, H, S, 1 + sources]: the sink, then each source.

    q: [B, S, H, D]; sink: float32 [H]; sources: keys [B, N, D] and the rows of them that each query sees, int32
    [B, S, slots], -1 where a slot is empty. Logits are q . k / sqrt(D), computed in float32.
    """
    batch, queries, heads, dim = q.shape
    logits = [sink.float().view(1, 1, heads, 1).expand(batch, queries, heads, 1)]
    for keys, indices in sources:
        gathered = ops.gather_kv(keys, indices.contiguous()).float()
        scaled = torch.einsum("bshd,bsnd->bshn", q.float(), gathered) * dim**-0.5
        logits.append(torch.where((indices >= 0).unsqueeze(2), scaled, float("-inf")))
    probabilities = torch.cat(logits, dim=-1).softmax(-1)
    split = probabilities.split([part.shape[-1] for part in logits], dim=-1)
    return torch.stack([part.sum(-1) for part in split], dim=-1).transpose(1, 2)


def selection_overlap(selected: Tensor, earlier: Tensor, allowed: Tensor) -> tuple[float | None, float | None]:
    """Share of `selected` that is in `earlier` too, and what random picks would share; see `Lineage`.

    selected, earlier: int [Q, K], -1 where absent; allowed: bool [Q, T].
    """
    choices = allowed.sum(-1)
    chooses = choices > selected.shape[1]
    if not chooses.any():
        return None, None
    before = torch.zeros_like(allowed)
    before = torch.cat([before, before[:, :1]], dim=1)  # a column for what is absent
    before = before.scatter(1, torch.where(earlier >= 0, earlier, allowed.shape[1]).long(), True)[:, :-1]
    shared = (before.gather(1, selected.clamp(min=0).long()) & (selected >= 0)).sum(-1)
    share = shared / (selected >= 0).sum(-1).clamp(min=1)
    by_chance = (before & allowed).sum(-1) / choices.clamp(min=1)
    return share[chooses].mean().item(), by_chance[chooses].float().mean().item()


def score_histogram(scores: Tensor, allowed: Tensor, selected: Tensor, bins: int = SCORE_BINS) -> ScoreHistogram:
    """Histogram of each query's allowed scores. scores: float32 [Q, T]; allowed: bool [Q, T]; selected: int [Q, K]."""
    queries = scores.shape[0]
    if scores.shape[1] == 0 or selected.shape[1] == 0:
        nothing = torch.full((queries,), float("nan"))
        return ScoreHistogram(torch.zeros(queries, bins, dtype=torch.int32), nothing, nothing, nothing)
    infinity, some = float("inf"), allowed.any(-1)
    low = torch.where(allowed, scores, infinity).amin(-1)
    high = torch.where(allowed, scores, -infinity).amax(-1)
    width = torch.where(high > low, high - low, 1.0).unsqueeze(-1)
    column = ((scores - low.unsqueeze(-1)) / width * bins).nan_to_num(0).clamp(0, bins - 1).long()
    counts = torch.zeros(queries, bins, dtype=torch.int32)
    counts = counts.scatter_add(1, torch.where(allowed, column, 0), allowed.to(torch.int32))
    picked = scores.gather(1, selected.clamp(min=0).long())
    threshold = torch.where(selected >= 0, picked, infinity).amin(-1)
    low, high, threshold = (torch.where(some, value, float("nan")) for value in (low, high, threshold))
    return ScoreHistogram(counts, low, high, threshold)


def block_occupancy(
    recent: Tensor, topk_indices: Tensor | None, cfg: CSA2Config, ratio: int
) -> tuple[BlockOccupancy, BlockOccupancy]:
    """The blocks that FlexAttention visits in the dense and in the slots layout, whole sequence, one row.

    recent: int32 [1, S, W] from `masks.window_indices`; topk_indices: int32 [1, S, K], or None where ratio is 0.
    """
    num_tokens = recent.shape[1]
    num_compressed = num_tokens // ratio if ratio else 0
    visible = visible_keys(recent, topk_indices)
    mask = dense_block_mask(visible, topk_indices, num_compressed, cfg.sliding_window, starts=None)
    sink_key = num_tokens + num_compressed
    seen = torch.cat([visible, torch.full_like(visible[..., :1], sink_key)], dim=-1)
    pairs = block_pair_counts(seen, sink_key + 1, KEY_BLOCK, KEY_BLOCK)[0]
    area = torch.outer(_block_sizes(num_tokens, KEY_BLOCK), _block_sizes(sink_key + 1, KEY_BLOCK)).to(pairs.device)
    first_compressed = (("compressed", num_tokens),) if num_compressed else ()
    dense = BlockOccupancy(
        layout="dense",
        query_block=KEY_BLOCK,
        key_block=KEY_BLOCK,
        kinds=_kinds(mask, pairs == area),
        causal=_causal_blocks(num_tokens, num_compressed, ratio),
        sections=(("tokens", 0), *first_compressed, ("sink", sink_key)),
    )
    slots = with_sink_slot(visible if topk_indices is None else torch.cat([recent, topk_indices], dim=-1))
    filled = (slots >= 0)[0].index_fill(-1, torch.zeros(1, dtype=torch.int64, device=slots.device), True)
    in_block = slot_block_counts(filled, SLOT_KEY_BLOCK)[:, 0]
    heads = cfg.num_attention_heads
    kinds = _kinds(slot_block_mask(slots, heads), in_block == _block_sizes(slots.shape[2], SLOT_KEY_BLOCK, in_block))
    first_selected = () if topk_indices is None else (("selected", 1 + recent.shape[2]),)
    sections = (("sink", 0), ("window", 1), *first_selected)
    return dense, BlockOccupancy("slots", heads, SLOT_KEY_BLOCK, kinds, kinds.numel(), sections)


def _kinds(mask: BlockMask, full: Tensor) -> Tensor:
    """int8 [query blocks, key blocks] of a BlockMask with one row, or one row a query and one block of heads."""
    visited = mask.to_dense()[:, 0].flatten(0, 1).bool()
    assert visited.shape == full.shape
    return torch.where(visited, torch.where(full, FULL, PARTIAL), EMPTY).to(torch.int8).cpu()


def _block_sizes(length: int, block: int, like: Tensor | None = None) -> Tensor:
    starts = torch.arange(0, length, block, device=None if like is None else like.device)
    return (length - starts).clamp(max=block)


def _causal_blocks(num_tokens: int, num_compressed: int, ratio: int) -> int:
    """Blocks of the dense layout in which some key is not in the future of some query (or is the sink)."""
    last_query = torch.arange(0, num_tokens, KEY_BLOCK).add(KEY_BLOCK).clamp(max=num_tokens) - 1
    key = torch.arange(num_tokens + num_compressed + 1)
    seen_from = torch.where(key < num_tokens, key, (key - num_tokens + 1) * ratio - 1)  # the first query that may
    seen_from[-1] = 0
    earliest = torch.stack([part.min() for part in seen_from.split(KEY_BLOCK)])
    return int((earliest <= last_query.unsqueeze(-1)).sum())
