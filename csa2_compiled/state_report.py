"""What `csa2 masks --state` shows: what a state between two layers alone says of what their queries look at."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from csa2_compiled import masks
from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.mask_report import as_text, block_occupancy
from csa2_compiled.masks.view_data import LayerView, Lineage, MaskReport, byte_labels
from csa2_compiled.rows import read_rows
from csa2_compiled.run_report import BadArgumentError, Text
from csa2_compiled.state import Publication
from csa2_compiled.state_files import SavedState, load_state
from csa2_compiled.tokens import lay_out_tokens

_ABSENT = (
    "Not shown: attention mass and index scores, because a saved state has neither queries nor weights; overlap with "
    "an earlier selection, because the later one replaced it."
)


def read_state(path: Path) -> SavedState:
    """Read a state with at least one publication. Raises BadArgumentError."""
    try:
        saved = load_state(path)
    except CheckpointError as error:
        raise BadArgumentError("--state", error) from error
    if not saved.state.publications:
        problem = f"{path} is the state after layer {saved.layer_idx}, by which no layer has published anything"
        raise BadArgumentError("--state", f"{problem}; a state after the first KV source or later is allowed")
    return saved


def check_whole(saved: SavedState, row: int) -> None:
    """Refuse a row of which the state does not say where its tokens stand: they would be shown in the wrong place.

    Raises BadArgumentError.
    """
    for published in saved.state.publications:
        if not _is_whole(saved, published, row):
            problem = f"row {row} has not the selection of one whole sequence in ratio {published.compress_ratio}"
            raise BadArgumentError("--state", f"{problem}; padded and packed rows and steps of a cache cannot be shown")


def shown_layers(saved: SavedState) -> tuple[int, ...]:
    """The layers that a saved state can show: those with a window alone, and those whose selection it still holds."""
    cfg = saved.cfg
    ratios = dict(enumerate(cfg.compress_ratios[: saved.layer_idx + 1]))
    return tuple(i for i, ratio in ratios.items() if not ratio or cfg.index_source(i) == selected_by(saved, ratio))


def selected_by(saved: SavedState, ratio: int) -> int:
    """The layer that made the selection which a saved state holds of that compress ratio."""
    cfg = saved.cfg
    return max(i for i in cfg.index_source_layer_ids if i <= saved.layer_idx and cfg.compress_ratios[i] == ratio)


@torch.no_grad()
def report_state(
    saved: SavedState, name: str, text: Text | None, layers: Sequence[int], queries: range, row: int = 0
) -> MaskReport:
    """What a state alone shows of one row: windows, candidates, selections, blocks; no attention and no scores.

    saved, row: as `read_state` and `check_whole` let them through. text: what its tokens are, or None. layers: among
    `shown_layers`.
    """
    num_tokens = saved.state.publications[0].topk_indices.shape[1]
    views = tuple(_state_view(saved, layer, queries, row) for layer in layers)
    about = {"state": as_text(name), "after layer": str(saved.layer_idx), "row": str(row)}
    labels = tuple(map(str, range(num_tokens))) if text is None else byte_labels(text.data)
    title = f"{name} after layer {saved.layer_idx}, {num_tokens} tokens" + ("" if text is None else f" of {text.name}")
    return MaskReport(as_text(title), about, labels, queries.start, len(queries), views, text is not None, _ABSENT)


def _state_view(saved: SavedState, layer: int, queries: range, row: int) -> LayerView:
    cfg, ratio = saved.cfg, saved.cfg.compress_ratios[layer]
    num_tokens = saved.state.publications[0].topk_indices.shape[1]
    recent = masks.window_indices(num_tokens, cfg.sliding_window, torch.device("cpu"))
    rows, lineage = slice(queries.start, queries.stop), Lineage()
    read = saved.state.of_ratio(ratio) if ratio else None
    selected = allowed = visible = None
    if read is not None:
        by = cfg.index_source(layer)
        within = cfg.candidate_source_layer_id if cfg.selects_within_candidates(by) else None
        lineage = Lineage(cfg.kv_source(layer), by, within)
        selected = read.topk_indices[row]
        visible, allowed = _allowed_in(saved, read, row)
    picks = None if read is None else read.topk_indices[row : row + 1]
    return LayerView(
        layer=layer,
        role=cfg.role(layer).value,
        ratio=ratio,
        window=recent[0, rows],
        selected=None if selected is None else selected[rows],
        allowed=None if allowed is None else allowed[rows],
        visible=None if visible is None else visible[rows],
        mass=None,
        scores=None,
        lineage=lineage,
        blocks=block_occupancy(recent, picks, cfg, ratio),
    )


def _allowed_in(saved: SavedState, read: Publication, row: int) -> tuple[Tensor, Tensor]:
    """How many positions each query of a whole document sees, int32 [S]; those its selection is among, bool [S, T]."""
    cfg, ratio = saved.cfg, read.compress_ratio
    num_tokens = read.topk_indices.shape[1]
    _, visible = lay_out_tokens(num_tokens, torch.device("cpu")).visible_range(ratio)
    allowed = torch.arange(read_rows(read.compressed_kv).shape[1]) < visible[0].unsqueeze(-1)
    if cfg.selects_within_candidates(selected_by(saved, ratio)):
        assert read.candidates is not None
        allowed = allowed & read.candidates[row]
    return visible[0], allowed


def _is_whole(saved: SavedState, read: Publication, row: int) -> bool:
    """Whether each query of a row selects as many as one that stands where it does in a document can, and no others."""
    num_tokens = read.topk_indices.shape[1]
    if read_rows(read.compressed_kv).shape[1] != num_tokens // read.compress_ratio:
        return False
    _, allowed = _allowed_in(saved, read, row)
    picks = read.topk_indices[row]
    counts_fit = torch.equal((picks >= 0).sum(-1), allowed.sum(-1).clamp(max=picks.shape[1]))
    return counts_fit and bool((allowed.gather(1, picks.clamp(min=0).long()) | (picks < 0)).all())
