"""Backward kernels of the attention core against gradients of a softmax in float64."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from csa2_compiled.attention_math import attend_backward_body, attend_body
from csa2_compiled.passes.kernels.sparse_attention import SparseAttentionTiles, sparse_attention
from csa2_compiled.passes.kernels.sparse_attention_backward import (
    BackwardTiles,
    choose_backward_tiles,
    slots_by_row,
    sparse_attention_backward,
)

SMALL = BackwardTiles(
    heads=16,
    slots=16,
    num_warps=4,
    row_slots=32,
    row_channels=32,
    sum_channels=32,
    sum_entries=16,
    queries=4,
)
FORWARD = SparseAttentionTiles(heads=16, slots=16, num_warps=4, merged_heads=16)
VARIANTS = {
    "chosen": None,
    "small": SMALL,
    "chained dots": dataclasses.replace(SMALL, logits_once=False, queries=3),
}
# Of each gradient, relative: weights, logit gradients and the result are rounded, and the output that came in.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
all_variants = pytest.mark.parametrize("tiles", VARIANTS.values(), ids=VARIANTS)
all_dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
NAMES = ("q", "sink", "window_kv", "compressed_kv")


def inputs(
    batch: int, tokens: int, heads: int, dim: int, window: int, topk: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """q, sink and both sources; rows named twice by one query, empty slots anywhere, the first token sees nothing."""
    given = [torch.randn(batch, tokens, heads, dim).to(dtype), torch.randn(heads)]
    for slots, rows in ((window, 9), (topk, 13)):
        indices = torch.randint(0, rows, (batch, tokens, slots))
        indices = indices.where(torch.rand(indices.shape) < 0.7, -1)
        indices[:, 0] = -1
        given += [torch.randn(batch, rows, dim).to(dtype), indices.to(torch.int32)]
    return [t.to(device) for t in given]


def exact(grad_out: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The gradients by autograd through a softmax row by row, in float64 on the CPU."""
    q, sink, *sources = (x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in given)
    leaves = [q, sink, *sources[::2]]
    for leaf in leaves:
        leaf.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for b, s in itertools.product(range(q.shape[0]), range(q.shape[1])):
        keys = [kv[b][i[b, s][i[b, s] >= 0].long()] for kv, i in zip(sources[::2], sources[1::2], strict=True)]
        filled = torch.cat(keys)
        logits = torch.cat([sink[:, None], q[b, s] @ filled.T * q.shape[-1] ** -0.5], dim=1)
        total = total + (logits.softmax(dim=1)[:, 1:] @ filled * grad_out[b, s].cpu().double()).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True))


def run(grad_out: Tensor, given: list[Tensor], tiles: BackwardTiles | None) -> tuple[Tensor, ...]:
    """The kernels' gradients, after the forward kernel."""
    q = given[0]
    logsumexp = torch.empty(q.shape[:3], device=q.device)
    out = sparse_attention(*given, logsumexp=logsumexp, tiles=FORWARD)
    return sparse_attention_backward(grad_out, out, logsumexp, *given, tiles=tiles)


def assert_near(got: tuple[Tensor, ...], given: list[Tensor], expected: list[Tensor]) -> None:
    leaves = [given[0], given[1], *given[2::2]]
    for name, leaf, actual, wanted in zip(NAMES, leaves, got, expected, strict=False):
        assert (actual.shape, actual.dtype) == (leaf.shape, leaf.dtype), name
        assert actual.is_contiguous(), name
        error = (actual.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error <= ROUNDING[given[0].dtype], (name, float(error))


@all_variants
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        # (batch, tokens, heads, dim, window slots, selected slots)
        *(((2, 5, 16, 64, 3, 4), dtype) for dtype in ROUNDING),
        *(((1, 5, 5, 96, 20, 40), dtype) for dtype in (torch.float32, torch.bfloat16)),
        ((1, 3, 40, 80, 5, 12), torch.float32),
        ((1, 2, 128, 64, 1, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_match_the_softmax(
    shape: tuple[int, ...], dtype: torch.dtype, tiles: BackwardTiles | None, device: torch.device
):
    torch.manual_seed(0)
    given = inputs(*shape, dtype, device)
    grad_out = torch.randn_like(given[0])
    assert_near(run(grad_out, given, tiles), given, exact(grad_out, given))


def test_released_width(device: torch.device):
    torch.manual_seed(1)
    given = inputs(1, 2, 64, 512, 5, 17, torch.bfloat16, device)
    grad_out = torch.randn_like(given[0])
    assert_near(run(grad_out, given, None), given, exact(grad_out, given))


@all_dtypes
def test_the_window_alone(dtype: torch.dtype, device: torch.device):
    torch.manual_seed(2)
    given = inputs(2, 3, 4, 32, 6, 1, dtype, device)[:4]
    grad_out = torch.randn_like(given[0])
    got = run(grad_out, given, SMALL)
    assert got[3].numel() == 0
    assert_near(got[:3], given, exact(grad_out, given))


def test_queries_that_see_nothing(device: torch.device):
    torch.manual_seed(3)
    given = inputs(1, 3, 4, 32, 6, 5, torch.float32, device)
    for indices in given[3::2]:
        indices.fill_(-1)
    for gradient in run(torch.randn_like(given[0]), given, SMALL):
        assert not gradient.any()


def test_a_row_that_every_slot_names(device: torch.device):
    torch.manual_seed(4)
    given = inputs(1, 9, 4, 32, 6, 5, torch.float32, device)
    given[5].fill_(2)
    grad_out = torch.randn_like(given[0])
    got = run(grad_out, given, SMALL)
    assert_near(got, given, exact(grad_out, given))
    assert not got[3][0, [0, 1, 3]].any()


def test_rows_without_slots_may_hold_anything(device: torch.device):
    torch.manual_seed(5)
    given = inputs(1, 3, 4, 32, 6, 5, torch.float32, device)
    given[3][given[3] == 0] = -1
    grad_out = torch.randn_like(given[0])
    expected = run(grad_out, given, SMALL)
    given[2][0, 0] = float("nan")
    for a, b in zip(run(grad_out, given, SMALL), expected, strict=True):
        assert torch.equal(a, b)


def test_runs_and_chunks_of_queries_are_alike(device: torch.device):
    torch.manual_seed(6)
    given = inputs(2, 3, 16, 32, 8, 9, torch.bfloat16, device)
    grad_out = torch.randn_like(given[0])
    expected = run(grad_out, given, SMALL)
    for a, b in zip(run(grad_out, given, SMALL), expected, strict=True):
        assert torch.equal(a, b)
    for queries in (5, 6):  # sums run in another order at most
        got = run(grad_out, given, dataclasses.replace(SMALL, queries=queries))
        assert torch.equal(got[0], expected[0])
        for a, b in zip(got[2:], expected[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5)


def test_inputs_may_be_strided(device: torch.device):
    torch.manual_seed(7)
    given = inputs(2, 3, 4, 32, 6, 5, torch.float32, device)
    grad_out = torch.randn_like(given[0])
    logsumexp = torch.empty(given[0].shape[:3], device=device)
    out = sparse_attention(*given, logsumexp=logsumexp, tiles=FORWARD)

    def strided(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    expected = sparse_attention_backward(grad_out, out, logsumexp, *given, tiles=SMALL)
    q, sink, *sources = given
    changed = [*map(strided, (grad_out, out, logsumexp, q)), sink, *map(strided, sources)]
    got = sparse_attention_backward(*changed, tiles=SMALL)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert torch.equal(a, b) or name == "sink", name  # whose sum follows the memory's order
    torch.testing.assert_close(got[1], expected[1])
    wide = torch.cat([sources[0], sources[0]], dim=-1)[:1, :, :32]  # rows of one batch row, apart from each other
    alone = [x[:1] for x in (grad_out, out, logsumexp, q)]
    got = sparse_attention_backward(*alone, sink, wide, sources[1][:1], tiles=SMALL)
    expected = sparse_attention_backward(*alone, sink, wide.contiguous(), sources[1][:1], tiles=SMALL)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("splits", [1, 3])
@all_dtypes
def test_kernels_compute_what_the_bodies_do(dtype: torch.dtype, splits: int, device: torch.device):
    torch.manual_seed(8)
    given = inputs(2, 3, 6, 32, 10, 20, dtype, device)
    logsumexp = torch.empty(given[0].shape[:3], device=device)
    out = sparse_attention(*given, logsumexp=logsumexp, tiles=dataclasses.replace(FORWARD, splits=splits))
    expected_out, expected = attend_body(*given)
    torch.testing.assert_close(out, expected_out, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])
    torch.testing.assert_close(logsumexp, expected, rtol=1e-6, atol=2e-6)
    grad_out = torch.randn_like(out)
    got = sparse_attention_backward(grad_out, out, logsumexp, *given, tiles=SMALL)
    for a, b in zip(got, attend_backward_body(grad_out, out, logsumexp, *given), strict=True):
        assert (a.double() - b.double()).norm() <= 2 * ROUNDING[dtype] * b.double().norm()


def test_slots_by_row(device: torch.device):
    rows = torch.tensor([[4, -1, 2], [2, 0, 4], [2, 2, -1]], dtype=torch.int32, device=device)
    entries, bounds = slots_by_row(rows, 5, queries=2)
    found = [[entries[a:b].tolist() for a, b in itertools.pairwise(chunk)] for chunk in bounds.tolist()]
    assert found == [[[4], [], [2, 3], [], [0, 5]], [[], [], [6, 7], [], []]]


def test_slots_of_many_rows_by_row(device: torch.device):
    torch.manual_seed(0)
    rows = torch.randint(-1, 40_000, (6, 50), dtype=torch.int32, device=device)
    entries, bounds = slots_by_row(rows, 40_000, queries=4)
    flat = rows.flatten().tolist()
    for chunk, (first, last) in enumerate([(0, 200), (200, 300)]):
        for row in {0, 39_999, *flat} - {-1}:
            found = entries[bounds[chunk, row] : bounds[chunk, row + 1]].tolist()
            assert found == [n for n in range(first, last) if flat[n] == row]


@pytest.mark.parametrize("shared_kilobytes", [227, 163, 99])
@pytest.mark.parametrize(("heads", "element_bytes"), [(8, 2), (64, 2), (128, 2)])
def test_tiles_fit(heads: int, element_bytes: int, shared_kilobytes: int):
    for dim in (64, 192, 512):
        tiles = choose_backward_tiles(heads, dim, element_bytes, shared_kilobytes << 10)
        assert tiles.shared_bytes(dim, element_bytes) <= shared_kilobytes << 10
        assert tiles.row_shared_bytes(heads, element_bytes) <= shared_kilobytes << 10
    with pytest.raises(ValueError, match="no tiles of the backward pass with 512 channels"):
        choose_backward_tiles(heads, 512, element_bytes, 16 << 10)


def test_the_sinks_gradient_has_its_dtype(device: torch.device):
    torch.manual_seed(12)
    q, sink, *sources = inputs(1, 2, 4, 32, 6, 5, torch.float32, device)
    got = run(torch.randn_like(q), [q, sink.bfloat16().float(), *sources], SMALL)[1]
    alone = (torch.randn_like(q), torch.randn_like(q), torch.zeros(q.shape[:3], device=device), q)
    assert got.dtype == torch.float32
    assert sparse_attention_backward(*alone, sink.bfloat16(), *sources, tiles=SMALL)[1].dtype == torch.bfloat16
