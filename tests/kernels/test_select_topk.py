"""Selection and candidate block kernels against the plain bodies: equal, ties and odd values included."""

import math

import pytest
import torch
from torch import Tensor

from csa2_compiled.indexer_math import candidate_blocks_body, positions_visible, select_topk_body
from csa2_compiled.passes.kernels.select_topk import (
    CandidateBlocksTiles,
    SelectTopkTiles,
    candidate_blocks,
    select_topk,
    supports,
)

INFINITY, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127
# Few values, so that ties abound, and the ends of the scale.
ODD = [0.0, -0.0, 1.0, -1.0, 0.0, 1.0, SMALLEST, -SMALLEST, LARGEST, -LARGEST, INFINITY, -INFINITY, NAN]
ROWS = {
    "distinct": lambda count: torch.randn(count),
    "ties": lambda count: torch.randint(-2, 3, (count,)).float(),
    "odd values": lambda count: torch.tensor(ODD)[torch.randint(len(ODD), (count,))],
    "relu": lambda count: torch.randn(count).relu(),
    "all equal": lambda count: torch.full((count,), -3.0),
    "all NaN": lambda count: torch.full((count,), NAN),
    "all -inf": lambda count: torch.full((count,), -INFINITY),
    "all +inf": lambda count: torch.full((count,), INFINITY),
}
TOURNAMENT = SelectTopkTiles(block=32, keys_per_thread=1)
both_tiles = pytest.mark.parametrize("tiles", [SelectTopkTiles(), TOURNAMENT], ids=["one block", "tournament"])


def rows_of_all_kinds(positions: int) -> Tensor:
    """float32 [2, 4, positions]."""
    return torch.stack([make(positions) for make in ROWS.values()]).view(2, 4, positions)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected), (actual.tolist(), expected.tolist())


def ranges(batch: int, queries: int, positions: int) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, positions // 2 + 1, (batch, queries), dtype=torch.int32)
    return start, start + torch.randint(0, positions // 2 + 1, (batch, queries), dtype=torch.int32)


def check_selection(positions: int, k: int, tiles: SelectTopkTiles, device: torch.device) -> None:
    scores = rows_of_all_kinds(positions).to(device)
    candidates = (torch.rand(scores.shape) < 0.5).to(device)
    for allowed in (None, candidates):
        assert_equal(select_topk(scores, allowed, k, tiles=tiles), select_topk_body(scores, allowed, k))


@pytest.mark.parametrize(("positions", "k"), [(1, 1), (7, 3), (70, 12), (33, 50), (128, 127), (0, 4)])
def test_selection_of_one_block(positions: int, k: int, device: torch.device):
    torch.manual_seed(0)
    check_selection(positions, k, SelectTopkTiles(), device)


@pytest.mark.parametrize(("positions", "k"), [(33, 16), (100, 16), (64, 1)])
def test_selection_as_a_tournament(positions: int, k: int, device: torch.device):
    torch.manual_seed(1)
    check_selection(positions, k, TOURNAMENT, device)


@both_tiles
def test_invisible_scores_are_not_read(tiles: SelectTopkTiles, device: torch.device):
    torch.manual_seed(2)
    scores = rows_of_all_kinds(90)
    start, stop = ranges(2, 4, 90)
    candidates = torch.rand(2, 4, 90) < 0.7
    visible = positions_visible(90, start, stop)
    expected = select_topk_body(scores.where(visible, -INFINITY), candidates, 9)
    given = [t.to(device) for t in (scores.where(visible, LARGEST), candidates)]
    actual = select_topk(*given, 9, start.to(device), stop.to(device), tiles=tiles)
    assert_equal(actual.cpu(), expected)


def test_selection_of_strided_inputs(device: torch.device):
    torch.manual_seed(3)
    scores = torch.randn(3, 2, 100, device=device).transpose(0, 1)[..., :70]
    candidates = (torch.rand(1, 3, 70, device=device) < 0.5).expand(2, -1, -1)
    stop = torch.full((1, 1), 60, dtype=torch.int32, device=device).expand(2, 3)
    expected = select_topk_body(scores.where(torch.arange(70, device=device) < 60, -INFINITY), candidates, 8)
    assert_equal(select_topk(scores, candidates, 8, torch.zeros_like(stop), stop), expected)


@pytest.mark.parametrize("stop", [0, 5, 32, 33, 64, 65, 128])
def test_a_smaller_body_serves_rows_of_which_little_is_visible(stop: int, device: torch.device):
    torch.manual_seed(7)
    scores = torch.randn(1, 2, 200, device=device)
    start = torch.tensor([[0, 70]], dtype=torch.int32, device=device)
    ends = start + stop
    visible = positions_visible(200, start, ends)
    expected = select_topk_body(scores.where(visible, -INFINITY), None, 8)
    tiles = SelectTopkTiles(block=256, keys_per_thread=2)
    assert_equal(select_topk(scores, None, 8, start, ends, tiles=tiles), expected)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_distribution_ends(scale: float, device: torch.device):
    torch.manual_seed(8)
    cauchy = torch.empty(1, 4, 600).cauchy_().mul_(scale).to(device)
    lumps = (torch.randint(0, 3, (1, 4, 600)) * 10.0 ** torch.randint(-38, 38, (1, 4, 600))).to(device)
    for scores in (cauchy, lumps, -lumps):
        assert_equal(select_topk(scores, None, 100), select_topk_body(scores, None, 100))


def test_long_rows(device: torch.device):
    torch.manual_seed(4)
    scores = torch.randn(1, 1, 40000, device=device).relu()
    assert_equal(select_topk(scores, None, 512), select_topk_body(scores, None, 512))


@pytest.mark.parametrize(("positions", "size"), [(70, 8), (64, 3), (5, 8), (20, 1), (0, 8)])
def test_candidate_blocks(positions: int, size: int, device: torch.device):
    torch.manual_seed(5)
    _, stop = ranges(2, 4, positions)
    visible = positions_visible(positions, torch.zeros_like(stop), stop)
    scores = rows_of_all_kinds(positions)
    hidden, unwritten = scores.where(visible, -INFINITY).to(device), scores.where(visible, LARGEST).to(device)
    tiles = CandidateBlocksTiles(blocks=16)
    for topk_blocks in (1, 4, 100):
        expected = candidate_blocks_body(hidden, stop.to(device), None, topk_blocks, size)
        assert_equal(candidate_blocks(unwritten, stop.to(device), None, topk_blocks, size, tiles=tiles), expected)


def test_candidate_blocks_may_start_late(device: torch.device):
    torch.manual_seed(7)
    start, stop = ranges(1, 4, 60)
    scores = torch.randn(1, 4, 60)
    hidden = scores.where(positions_visible(60, start, stop), -INFINITY).to(device)
    expected = candidate_blocks_body(hidden, stop.to(device), None, 3, 8)
    actual = candidate_blocks(scores.to(device), stop.to(device), None, 3, 8, start.to(device))
    assert_equal(actual, expected)


def test_candidate_blocks_as_a_tournament(device: torch.device):
    torch.manual_seed(6)
    scores, stop = torch.randn(1, 3, 500, device=device), torch.full((1, 3), 500, dtype=torch.int32, device=device)
    tiles = CandidateBlocksTiles(select=TOURNAMENT)
    expected = candidate_blocks_body(scores, stop, None, 12, 4)
    assert_equal(candidate_blocks(scores, stop, None, 12, 4, tiles=tiles), expected)


def test_what_is_not_supported_is_said():
    assert supports(512, 1 << 20)
    assert supports(16384, 1 << 20)
    assert supports(32768, 32768)
    with pytest.raises(NotImplementedError, match="k is 16385"):
        supports(16385, 1 << 20)
    with pytest.raises(NotImplementedError, match="group_starts"):
        supports(5, 100, group_starts=torch.zeros(1, 100, dtype=torch.int32))
