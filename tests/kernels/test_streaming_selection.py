"""The benchmark's kernel that scores and selects at once, against the plain bodies."""

import sys
from pathlib import Path

import pytest
import torch

from csa2_compiled.indexer_math import index_scores_body, select_topk_body

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.parametrize(
    ("tokens", "positions", "topk", "programs"), [(11, 70, 8, 2), (8, 16, 16, 264), (5, 130, 40, 1)]
)
def test_the_same_selection(tokens: int, positions: int, topk: int, programs: int, device: torch.device):
    from streaming_selection import scores_and_selection

    torch.manual_seed(tokens)
    q = torch.randn(1, tokens, 4, 16, device=device)
    k, weights = torch.randn(1, positions, 16, device=device), torch.randn(1, tokens, 4, device=device)
    stop = torch.randint(0, positions + 1, (1, tokens), dtype=torch.int32, device=device)
    start = (stop * torch.rand(stop.shape, device=device) / 2).int()
    expected = select_topk_body(index_scores_body(q, k, weights, start, stop), None, topk)
    tiles = {"queries": 4, "positions": 32, "programs": programs}
    assert torch.equal(scores_and_selection(q, k, weights, start, stop, topk, **tiles), expected)
