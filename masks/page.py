"""A self-contained page that shows a `MaskReport`: text in which a query's window and selection light up.

The data stands in the page as JSON whose arrays are base64 bytes; `page.html` beside this file is the template.
"""

import base64
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from csa2_compiled.masks.view_data import SINK, WINDOW, LayerView, MaskReport, ScoreHistogram, block_dict, runs

MAX_HEADS = 8  # that the page holds one by one, besides the mean over all
_MASS_SCALE = 65535  # a share of the attention as 16 bits
_PLACEHOLDER = "__CSA2_DATA__"


def make_page(report: MaskReport, head: int | None = None) -> str:
    """The HTML of a report, without anything from outside. head: the one to show first; None is their mean."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # In a script element only "<" could end the data early.
    data = json.dumps(page_data(report, head), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    before, after = template.split(_PLACEHOLDER)
    return before + data + after


def page_data(report: MaskReport, head: int | None = None) -> dict[str, Any]:
    """What the page reads. Layers that share a selection name the layer that holds it, in `selection`."""
    selections: dict[str, Any] = {}
    layers = []
    for view in report.layers:
        name = None
        if view.selected is not None and view.allowed is not None:
            name = str(view.lineage.selected_by)
            if name not in selections:
                selections[name] = {
                    "selected": pack_sets([[(t, t + 1) for t in row if t >= 0] for row in view.selected.tolist()]),
                    "allowed": pack_sets([runs(row) for row in view.allowed]),
                }
        layers.append(_layer_data(view, name, head))
    return {
        "title": report.title,
        "origin": report.origin,
        "absent": report.absent or None,
        "tokens": list(report.tokens),
        "bytesText": report.bytes_text,
        "firstQuery": report.first_query,
        "numQueries": report.num_queries,
        "head": head,
        "selections": selections,
        "layers": layers,
    }


def pack_sets(sets: list[list[tuple[int, int]]]) -> str:
    """Sets of integers, one a query, as base64 of LEB128 numbers: how many runs, then each run's distance from the
    end of the one before, and its length. sets: ascending, disjoint [first, stop) runs, adjacent ones allowed."""
    packed = bytearray()
    for members in sets:
        joined: list[list[int]] = []
        for first, stop in members:
            if joined and joined[-1][1] == first:
                joined[-1][1] = stop
            else:
                joined.append([first, stop])
        end = 0
        _append_number(packed, len(joined))
        for first, stop in joined:
            _append_number(packed, first - end)
            _append_number(packed, stop - first)
            end = stop
    return base64.b64encode(bytes(packed)).decode()


def _append_number(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def _heads_kept(heads: int, head: int | None) -> list[int]:
    kept = list(range(min(heads, MAX_HEADS)))
    return kept if head is None or head in kept else [*kept[:-1], head]


def _layer_data(view: LayerView, selection: str | None, head: int | None) -> dict[str, Any]:
    heads = [] if view.mass is None else _heads_kept(view.mass.shape[0], head)
    window = view.window.amax(-1) - torch.where(view.window >= 0, view.window, view.window.amax(-1, True)).amin(-1) + 1
    return {
        "layer": view.layer,
        "name": view.name,
        "role": view.role,
        "ratio": view.ratio,
        "lineage": dict(vars(view.lineage)),
        "selection": selection,
        "window": _base64(window.to(torch.int32)),
        "visible": None if view.visible is None else _base64(view.visible.to(torch.int32)),
        "positions": 0 if view.allowed is None else view.allowed.shape[1],
        "heads": heads,
        "mass": None if view.mass is None else _mass_data(view.mass, heads),
        "scores": None if view.scores is None else _score_data(view.scores),
        "blocks": [block_dict(blocks) for blocks in view.blocks],
    }


def _mass_data(mass: Tensor, heads: list[int]) -> str:
    """uint16 [1 + heads, Q, 2]: sink and window of the mean, then of each head; the selection has the rest."""
    kept = torch.cat([mass.mean(0, keepdim=True), mass[heads]])
    return _base64((kept[..., [SINK, WINDOW]] * _MASS_SCALE).round().to(torch.uint16))


def _score_data(scores: ScoreHistogram) -> dict[str, Any]:
    """Counts as bytes, the fullest bin of each query being 255; limits and thresholds as float32."""
    fullest = scores.counts.amax(-1, keepdim=True).clamp(min=1)
    return {
        "bins": scores.counts.shape[1],
        "counts": _base64((scores.counts / fullest * 255).ceil().to(torch.uint8)),
        "limits": _base64(torch.stack([scores.low, scores.high, scores.threshold], dim=-1).float()),
    }


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
