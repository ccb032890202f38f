"""What a trained selection is worth: bits per byte with it, with all positions, with none; and what it finds.

The same model reads the same text three times. "sparse" is the model as it is; in "dense" every layer with compressed
KV attends to all visible compressed positions, in "window" to none. Recall is the share of a selection that is also
among the K positions to which the layer's own attention, over all visible positions, gives most (heads summed).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.config import LayerRole
from csa2_compiled.distillation import chunk_size_for, dense_attention
from csa2_compiled.indexer_math import positions_visible
from csa2_compiled.model import CSA2Block, CSA2ForCausalLM, RunBlock
from csa2_compiled.selection import Selection, SelectionRecord
from csa2_compiled.state import CSA2Output, CSA2State
from csa2_compiled.tokens import CSA2InputError, Tokens, group_alignment
from csa2_compiled.train import summed_loss
from csa2_compiled.train_data import IGNORED, Batch, TrainData

Attends = Literal["sparse", "dense", "window"]


@dataclass(frozen=True)
class LayerRecall:
    """Of one index source. queries: those that see more positions than they select; only they count.

    recall: mean share of the selection that is among the attention's own best as many; random: what choosing at random
    would have. Both None when no query counts.
    """

    layer: int
    role: str
    ratio: int
    queries: int
    recall: float | None
    random: float | None


@dataclass(frozen=True)
class QualityReport:
    """bits_per_byte: by what the layers attend to ("sparse", "dense", "window"), mean over predicted_bytes.

    recall, random: means over the layers that have them, None when none has.
    """

    seq_len: int
    predicted_bytes: int
    bits_per_byte: dict[str, float]
    recall: float | None
    random: float | None
    layers: tuple[LayerRecall, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


@torch.no_grad()
def evaluate(
    model: CSA2ForCausalLM,
    documents: Sequence[bytes],
    seq_len: int = 1024,
    batch_size: int = 1,
    attends: Sequence[Attends] = get_args(Attends),
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> QualityReport:
    """Read documents in windows of at most seq_len bytes, and measure; runs eagerly, where the model is.

    batch_size: packed rows at a time; "dense" gathers batch_size x seq_len x (window + compressed positions) keys.
    attends: which to measure; recall needs "sparse". on_batch: called after each batch with the bytes read so far and
    in all. Raises CSA2InputError for a bad argument and TrainDataError for documents that are not bytes or in which
    there is nothing to predict.
    """
    _check_integer("seq_len", seq_len, 2, model.cfg.max_position_embeddings)
    _check_integer("batch_size", batch_size, 1, 2**31)
    _check_attends(attends)
    data = TrainData(documents, seq_len, group_alignment(model.cfg.compress_ratios))
    counting = _Counting(chunk_size_for(model.cfg, batch_size, seq_len))
    blocks = {name: counting.run_block if name == "sparse" else reader(name) for name in attends}
    nats, count, num_bytes = dict.fromkeys(attends, 0.0), 0, 0
    total = sum(map(len, data.train_windows))
    for batch in data.batches_of(data.train_windows, batch_size):
        on_device = batch.to(model.embed.weight.device)
        count += int((batch.targets != IGNORED).sum())
        for name, run_block in blocks.items():
            nats[name] += _nats(model, on_device, run_block)
        num_bytes += batch.num_bytes
        on_batch(num_bytes, total)
    layers = tuple(_layer_recall(layer, *counts) for layer, counts in counting.counts.items())
    return QualityReport(
        seq_len,
        count,
        {name: value / count / math.log(2) for name, value in nats.items()},
        _mean([layer.recall for layer in layers]),
        _mean([layer.random for layer in layers]),
        layers,
    )


def reader(attends: Attends) -> RunBlock:
    """A model's run_block by which layers with compressed KV attend as `attends` says; gradients go through it."""
    return _Attending(attends).run_block


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CSA2InputError(f"{name} is {value!r}; it must be an integer within {least} and {most}")


def _check_attends(attends: Sequence[Attends]) -> None:
    allowed = ", ".join(get_args(Attends))
    if isinstance(attends, str):
        raise CSA2InputError(f"attends is the string {attends!r}; it must be a sequence of some of {allowed}")
    if not attends or any(name not in get_args(Attends) for name in attends):
        raise CSA2InputError(f"attends is {list(attends)}; it must name some of {allowed}")


def _nats(model: CSA2ForCausalLM, batch: Batch, run_block: RunBlock) -> float:
    logits = model(batch.input_ids, document_ids=batch.document_ids, run_block=run_block)
    return summed_loss(logits, batch.targets).item()


@dataclass(frozen=True)
class _Attending:
    attends: Attends

    def run_block(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        if self.attends == "sparse" or not _selects(block.attn):
            return block(x, state, tokens)
        return block(x, state, tokens, record=_selection_of(self.attends, block.attn, x, state, tokens))


class _Counting:
    """Runs blocks as they are and counts, by index source: queries, and their shares found and found at random."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.counts: dict[CSA2Attention, Tensor] = {}

    def run_block(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        output, layer = block(x, state, tokens), block.attn
        if _selects(layer):
            counted = _count_found(layer, block.attn_norm(x), output.state, tokens, self.chunk_size)
            self.counts[layer] = self.counts[layer] + counted if layer in self.counts else counted
        return output


def _selects(layer: CSA2Attention) -> bool:
    return layer.role in (LayerRole.FULL, LayerRole.REINDEX)


def _selection_of(attends: str, layer: CSA2Attention, x: Tensor, state: CSA2State, tokens: Tokens) -> SelectionRecord:
    """A record that makes a layer, and those that read from it, attend to all visible positions or to none."""
    batch, num_tokens = x.shape[:2]
    positions = num_tokens // layer.ratio
    if attends == "window":
        selected = torch.full((batch, num_tokens, 1), -1, dtype=torch.int32, device=x.device)
    else:
        start, stop = (bound.expand(batch, -1).unsqueeze(-1) for bound in tokens.visible_range(layer.ratio))
        every = start + torch.arange(positions, dtype=torch.int32, device=x.device)
        selected = torch.where(every < stop, every, -1)
    before = state.of_ratio(layer.ratio)
    candidates = None if before is None else before.candidates
    if layer.publishes_candidates:
        candidates = torch.ones(batch, num_tokens, positions, dtype=torch.bool, device=x.device)
    record = SelectionRecord()
    record.keep(Selection(None, selected, candidates))  # index keys are the layer's own: a distillation reads them
    return record


def _count_found(layer: CSA2Attention, x: Tensor, state: CSA2State, tokens: Tokens, chunk_size: int) -> Tensor:
    """float64 [3]: queries that see more than they select, the sum of their recalls, and that of a random choice."""
    publication = state.of_ratio(layer.ratio)
    assert publication is not None
    picks = publication.topk_indices
    start, stop = (bound.expand(x.shape[0], -1) for bound in tokens.visible_range(layer.ratio))
    totals = torch.zeros(3, dtype=torch.float64, device=x.device)
    for queries, log_p in dense_attention(layer, x, state, tokens, chunk_size):
        number, seen = picks.shape[-1], (stop - start)[:, queries]
        chosen = picks[:, queries]
        visible = positions_visible(log_p.shape[-1], start[:, queries], stop[:, queries])
        best = torch.where(visible, log_p, float("-inf")).topk(number, dim=-1).indices
        is_best = torch.zeros_like(visible).scatter(-1, best, True)
        found = (is_best.gather(-1, chosen.clamp(min=0).long()) & (chosen >= 0)).sum(-1) / number
        counts = seen > number
        sums = (counts, torch.where(counts, found, 0), torch.where(counts, number / seen.clamp(min=1), 0))
        totals += torch.stack([value.sum(dtype=torch.float64) for value in sums])
    return totals


def _layer_recall(layer: CSA2Attention, queries: Tensor, found: Tensor, random: Tensor) -> LayerRecall:
    count = int(queries)
    shares = (None, None) if count == 0 else (found.item() / count, random.item() / count)
    return LayerRecall(layer.layer_idx, layer.role.value, layer.ratio, count, *shares)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
