"""What a pass of CSA2 looked at, as plain data: what `csa2_compiled.masks.visualize` draws and the page shows.

One row without padding or packing. Q stands for the queries that were recorded, T for the layer's compressed
positions, H for its heads; all tensors are on the CPU.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SINK, WINDOW, SELECTED = range(3)  # the last axis of `LayerView.mass`
EMPTY, PARTIAL, FULL = range(3)  # the values of `BlockOccupancy.kinds`
JSON_VERSION = 1


@dataclass(frozen=True)
class BlockOccupancy:
    """Which blocks of a BlockMask FlexAttention visits, and whether every pair in them is visible.

    layout: "dense" or "slots". kinds: int8 [query blocks, key blocks], EMPTY, PARTIAL or FULL; in the slots layout a
    row is a query token, in the dense one `query_block` tokens. causal: blocks that causality alone leaves.
    sections: (name, first key) of each kind of key, in order. All of it is about the whole sequence.
    """

    layout: str
    query_block: int
    key_block: int
    kinds: Tensor
    causal: int
    sections: tuple[tuple[str, int], ...]

    def count(self, kind: int) -> int:
        """Blocks of one kind."""
        return int((self.kinds == kind).sum())

    @property
    def visited(self) -> int:
        return self.kinds.numel() - self.count(EMPTY)

    @property
    def saved(self) -> float:
        """Share of all blocks that are skipped."""
        return 1 - self.visited / self.kinds.numel()

    @property
    def saved_beyond_causal(self) -> float:
        """Share of the causal blocks that are skipped."""
        return 1 - self.visited / self.causal


@dataclass(frozen=True)
class Lineage:
    """Where a layer's compressed positions come from; all are layer numbers, None where there is none.

    kv_from: published the compressed KV. selected_by: made the selection. within: published the candidates that the
    selection was made among. compared_with: made the selection of this ratio before this layer made its own.
    overlap: the share of this layer's selection that the one before had too, over the recorded queries that had more
    positions to choose from than they may select; chance: what picks at random would share. Both None where no query
    had to choose or nothing came before.
    """

    kv_from: int | None = None
    selected_by: int | None = None
    within: int | None = None
    compared_with: int | None = None
    overlap: float | None = None
    chance: float | None = None


@dataclass(frozen=True)
class ScoreHistogram:
    """Index scores of the positions each query could select, where the layer made the selection itself.

    counts: int32 [Q, bins] between low and high, float32 [Q]; threshold: float32 [Q], the lowest selected score. NaN
    where a query had nothing to select.
    """

    counts: Tensor
    low: Tensor
    high: Tensor
    threshold: Tensor


@dataclass(frozen=True)
class LayerView:
    """What the recorded queries of one layer looked at.

    ratio: tokens a compressed position stands for, 0 in a window layer, where selected, allowed and visible are None.
    window: int32 [Q, W], token indices, newest first, -1 where empty. selected: int32 [Q, K], compressed positions,
    ascending, -1 behind them. allowed: bool [Q, T], the positions the selection was made among. visible: int32 [Q],
    how many positions each query could see. mass: float32 [H, Q, 3], the attention on sink, window and selection, None
    where it is not known.
    """

    layer: int
    role: str
    ratio: int
    window: Tensor
    selected: Tensor | None
    allowed: Tensor | None
    visible: Tensor | None
    mass: Tensor | None
    scores: ScoreHistogram | None
    lineage: Lineage
    blocks: tuple[BlockOccupancy, ...]

    @property
    def name(self) -> str:
        """As "layer 5: full, ratio 1"."""
        return f"layer {self.layer}: {self.role}" + (f", ratio {self.ratio}" if self.ratio else "")

    def head_mass(self, head: int | None) -> Tensor | None:
        """float32 [Q, 3] of one head, or the mean over all of them; None where it is not known."""
        if self.mass is None:
            return None
        return self.mass.mean(0) if head is None else self.mass[head]


@dataclass(frozen=True)
class MaskReport:
    """The views of one text. tokens: what each token shows as. The recorded queries begin at first_query.

    origin: what made it, as label and value, for titles and files. bytes_text: tokens are the bytes of a text.
    absent: a sentence on what is not shown and why, empty where all is.
    """

    title: str
    origin: dict[str, str]
    tokens: tuple[str, ...]
    first_query: int
    num_queries: int
    layers: tuple[LayerView, ...]
    bytes_text: bool = True
    absent: str = ""

    @property
    def queries(self) -> range:
        return range(self.first_query, self.first_query + self.num_queries)

    def text_of(self, view: LayerView, position: int) -> str:
        """The tokens that a compressed position of a layer stands for."""
        covered = self.tokens[position * view.ratio : (position + 1) * view.ratio]
        return ("" if self.bytes_text else " ").join(covered)


def byte_labels(data: bytes) -> tuple[str, ...]:
    """A label a byte: the character, on its first byte (the others show a dot), or an escape."""
    labels: list[str] = []
    position = 0
    while position < len(data):
        size = _character_size(data, position)
        character = data[position : position + size].decode("utf-8", errors="replace")
        shown = character.isprintable() or character in "\n\t"
        labels += [character if shown and character != "\ufffd" else f"\\x{data[position]:02x}"]
        labels += ["·"] * (size - 1)
        position += size
    return tuple(labels)


def _character_size(data: bytes, position: int) -> int:
    for size in range(1, 5):
        try:
            data[position : position + size].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return min(size, len(data) - position)
    return 1


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """The runs of True of a bool [T], as (first, one past last)."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1).char())
    firsts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(firsts, stops, strict=True))


def filled(indices: Tensor) -> list[int]:
    """The entries of an int [slots] that are not -1, ascending."""
    return sorted(indices[indices >= 0].tolist())


def to_dict(report: MaskReport) -> dict[str, Any]:
    """The report as JSON values: indices as lists, candidates and windows as [first, stop) ranges."""
    return {
        "format": "csa2-masks",
        "version": JSON_VERSION,
        "title": report.title,
        "origin": report.origin,
        "absent": report.absent or None,
        "tokens": list(report.tokens),
        "first_query": report.first_query,
        "num_queries": report.num_queries,
        "layers": [_layer_dict(report, view) for view in report.layers],
    }


def _layer_dict(report: MaskReport, view: LayerView) -> dict[str, Any]:
    positions = 0 if view.allowed is None else view.allowed.shape[1]
    return {
        "layer": view.layer,
        "role": view.role,
        "ratio": view.ratio,
        "lineage": dict(vars(view.lineage)),
        "blocks": [block_dict(blocks) for blocks in view.blocks],
        "position_text": [report.text_of(view, position) for position in range(positions)],
        "queries": [_query_dict(report, view, row) for row in range(report.num_queries)],
    }


def block_dict(blocks: BlockOccupancy) -> dict[str, Any]:
    """The counts of one layout; without the blocks themselves."""
    rows, columns = blocks.kinds.shape
    return {
        "layout": blocks.layout,
        "block": [blocks.query_block, blocks.key_block],
        "rows": rows,
        "columns": columns,
        "empty": blocks.count(EMPTY),
        "partial": blocks.count(PARTIAL),
        "full": blocks.count(FULL),
        "causal": blocks.causal,
        "saved": round(blocks.saved, 6),
        "saved_beyond_causal": round(blocks.saved_beyond_causal, 6),
    }


def _query_dict(report: MaskReport, view: LayerView, row: int) -> dict[str, Any]:
    window = filled(view.window[row])
    return {
        "query": report.first_query + row,
        "window": [window[0], window[-1] + 1],
        "selected": [] if view.selected is None else filled(view.selected[row]),
        "candidates": [] if view.allowed is None else [list(run) for run in runs(view.allowed[row])],
        "mass": None if view.mass is None else _mass_dict(view.mass[:, row]),
        "scores": None if view.scores is None else _score_dict(view.scores, row),
    }


def _mass_dict(mass: Tensor) -> dict[str, Any]:
    return {"mean": _rounded(mass.mean(0)), "heads": [_rounded(head) for head in mass]}


def _score_dict(scores: ScoreHistogram, row: int) -> dict[str, Any] | None:
    if math.isnan(float(scores.threshold[row])):
        return None
    low, high, threshold = _rounded((scores.low[row], scores.high[row], scores.threshold[row]))
    return {"low": low, "high": high, "threshold": threshold, "counts": scores.counts[row].tolist()}


def _rounded(values: Iterable[Tensor] | Tensor) -> list[float]:
    return [float(f"{float(value):.6g}") for value in values]
