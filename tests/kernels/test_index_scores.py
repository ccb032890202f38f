"""Index score kernels against the plain body."""

import pytest
import torch
from torch import Tensor

from csa2_compiled.indexer_math import index_scores_body
from csa2_compiled.passes.kernels.index_scores import IndexScoresTiles, choose_tiles, index_scores

INFINITY = float("inf")
# (queries, positions, heads, dim): ragged, padded heads and channels, a single position, none.
SHAPES = [(5, 70, 5, 48), (33, 70, 3, 32), (1, 1, 1, 16), (9, 33, 32, 128), (3, 0, 4, 16), (1, 90, 64, 64)]
TILES = {
    "chosen": None,
    "tiles": IndexScoresTiles(queries=16, positions=32, num_warps=2, num_stages=2),
    "rows": IndexScoresTiles(queries=2, positions=16, num_warps=2, num_stages=1, heads_are_columns=True),
}
all_tiles = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
# The interpreter computes with numpy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def inputs(
    batch: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    queries, positions, heads, dim = shape
    q, k = torch.randn(batch, queries, heads, dim), torch.randn(batch, positions, dim)
    weights = torch.randn(batch, queries, heads)
    start = torch.randint(0, positions + 1, (batch, queries), dtype=torch.int32)
    stop = torch.randint(0, positions + 1, (batch, queries), dtype=torch.int32)  # half of the ranges are empty
    return q.to(dtype).to(device), k.to(dtype).to(device), weights.to(device), start.to(device), stop.to(device)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert torch.equal(actual == -INFINITY, expected == -INFINITY)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@all_tiles
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), (SHAPES[0], torch.bfloat16), (SHAPES[3], torch.float16)],
    ids=str,
)
def test_scores_match_the_plain_body(
    shape: tuple[int, int, int, int], dtype: torch.dtype, tiles: IndexScoresTiles | None, device: torch.device
):
    torch.manual_seed(0)
    given = inputs(2, shape, dtype, device)
    assert_close(index_scores(*given, tiles=tiles), index_scores_body(*given))


@all_tiles
def test_causal_ranges_of_documents(tiles: IndexScoresTiles | None, device: torch.device):
    torch.manual_seed(1)
    q, k, weights, _, _ = inputs(1, (40, 40, 4, 32), torch.float32, device)
    index = torch.arange(40, dtype=torch.int32, device=device)[None]
    for lengths in ([40], [7, 20, 13], [1] * 40):
        start = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)]).int()[None].to(device)
        expected = index_scores_body(q, k, weights, start, index + 1)
        assert_close(index_scores(q, k, weights, start, index + 1, tiles=tiles), expected)


@all_tiles
def test_invisible_positions_may_stay_unwritten(tiles: IndexScoresTiles | None, device: torch.device):
    torch.manual_seed(2)
    given = inputs(2, (6, 90, 4, 32), torch.float32, device)
    expected = index_scores_body(*given)
    actual = index_scores(*given, write_invisible=False, tiles=tiles)
    visible = expected > -INFINITY
    assert_close(actual[visible], expected[visible])


@all_tiles
def test_nan_and_infinity_pass(tiles: IndexScoresTiles | None, device: torch.device):
    q, k, weights = torch.ones(1, 2, 2, 16), torch.ones(1, 3, 16), torch.ones(1, 2, 2)
    q[0, 0, 1, 3] = float("nan")
    k[0, 2, 5] = INFINITY
    start, stop = torch.zeros(1, 2, dtype=torch.int32), torch.full((1, 2), 3, dtype=torch.int32)
    given = [t.to(device) for t in (q, k, weights, start, stop)]
    assert_close(index_scores(*given, tiles=tiles), index_scores_body(*given))


def test_inputs_may_be_strided_or_expanded(device: torch.device):
    torch.manual_seed(3)
    for queries in (3, 40):
        q, k, weights, start, stop = inputs(2, (queries, 50, 4, 32), torch.bfloat16, device)
        stop = stop[:1].expand(2, -1)
        strided_q = torch.cat([q, q], dim=-1)[..., :32]
        strided_k = torch.cat([k, k], dim=1)[:, :50]
        strided_weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
        given = strided_q, strided_k, strided_weights, start[:1].expand(2, -1), stop
        assert_close(index_scores(*given), index_scores_body(*given))


def test_few_queries_take_heads_as_columns():
    assert choose_tiles(1, 2).heads_are_columns
    assert not choose_tiles(4096, 2).heads_are_columns
