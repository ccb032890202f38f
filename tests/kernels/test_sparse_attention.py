"""Attention kernel against the plain layout of the core, with and without fused RoPE."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from csa2_compiled import masks
from csa2_compiled.masks.layout import AttentionLayout
from csa2_compiled.passes.kernels.sparse_attention import SparseAttentionTiles, choose_tiles, sparse_attention
from csa2_compiled.rope import apply_rope_body
from csa2_compiled.sparse_attention import sparse_attention as attention_core

SMALL = SparseAttentionTiles(heads=16, slots=16, num_warps=4, num_stages=2, merged_heads=16)
VARIANTS = {
    "chosen": None,
    "one program": SMALL,
    "chained dots": dataclasses.replace(SMALL, logits_once=False),
    "splits": dataclasses.replace(SMALL, splits=3),
}
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
all_variants = pytest.mark.parametrize("tiles", VARIANTS.values(), ids=VARIANTS)
# (heads, dim, window slots, selected slots)
SHAPES = [(16, 64, 16, 32), (5, 96, 7, 12), (40, 64, 3, 20), (16, 512, 5, 17), (128, 64, 1, 1)]


def plain(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """The softmax over the filled slots and the sink, in float64, row by row."""
    out = torch.empty_like(q)
    for b, s in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        keys = [window_kv[b][window_indices[b, s][window_indices[b, s] >= 0].long()]]
        if compressed_kv is not None and topk_indices is not None:
            keys.append(compressed_kv[b][topk_indices[b, s][topk_indices[b, s] >= 0].long()])
        filled = torch.cat(keys).double()
        logits = torch.cat([sink[:, None].double(), q[b, s].double() @ filled.T * q.shape[-1] ** -0.5], dim=1)
        out[b, s] = (logits.softmax(dim=1)[:, 1:] @ filled).to(q.dtype)
    return out


def some_indices(batch: int, tokens: int, slots: int, rows: int) -> Tensor:
    """Distinct rows, some slots empty, some of them before filled ones; the first token sees nothing."""
    picks = torch.stack([torch.randperm(max(rows, slots))[:slots] for _ in range(batch * tokens)])
    picks = picks.view(batch, tokens, slots).where(torch.rand(batch, tokens, slots) < 0.7, -1)
    picks[:, 0] = -1
    return picks.where(picks < rows, -1).to(torch.int32)


def inputs(
    batch: int, tokens: int, heads: int, dim: int, window: int, topk: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    rows = 40
    q = torch.randn(batch, tokens, heads, dim) * 2
    given = [q.to(dtype), torch.randn(heads)]
    for slots in (window, topk):
        given += [torch.randn(batch, rows, dim).to(dtype), some_indices(batch, tokens, slots, rows)]
    return [t.to(device) for t in given]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    tolerance = 2 * ROUNDING[expected.dtype]  # rounded weights and the rounded result
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@all_variants
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        *((shape, dtype) for shape in (SHAPES[1], SHAPES[3]) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_attention_matches_the_plain_softmax(
    shape: tuple[int, int, int, int], dtype: torch.dtype, tiles: SparseAttentionTiles | None, device: torch.device
):
    torch.manual_seed(0)
    given = inputs(1, 2, *shape, dtype, device)
    assert_close(sparse_attention(*given, tiles=tiles), plain(*given))


@all_variants
def test_attention_matches_the_core(tiles: SparseAttentionTiles | None, device: torch.device):
    torch.manual_seed(1)
    tokens, window, topk = 9, 4, 3
    q, sink, window_kv, _, compressed_kv, topk_indices = inputs(2, tokens, 4, 64, 1, topk, torch.float32, device)
    window_kv, starts = window_kv[:, :tokens], torch.tensor([[0] * 5 + [5] * 4, [0] * 7 + [tokens] * 2], device=device)
    recent = masks.window_indices(tokens, window, device, starts.to(torch.int32))
    core = (q, window_kv, compressed_kv, topk_indices, sink, window, topk, starts.to(torch.int32))
    expected = attention_core(*core, AttentionLayout.PLAIN)
    assert_close(sparse_attention(q, sink, window_kv, recent, compressed_kv, topk_indices, tiles=tiles), expected)


@all_variants
@pytest.mark.parametrize("source", ["window", "compressed", "neither", "no rows"])
def test_a_source_may_be_absent(source: str, tiles: SparseAttentionTiles | None, device: torch.device):
    torch.manual_seed(2)
    q, sink, kv, indices, *_ = inputs(1, 2, 4, 64, 20, 1, torch.float32, device)
    nothing = torch.empty(1, 0, 64, device=device), torch.full((1, 2, 3), -1, dtype=torch.int32, device=device)
    actual = {
        "window": lambda: sparse_attention(q, sink, kv, indices, tiles=tiles),
        "compressed": lambda: sparse_attention(q, sink, None, None, kv, indices, tiles=tiles),
        "neither": lambda: sparse_attention(q, sink, None, None, tiles=tiles),
        "no rows": lambda: sparse_attention(q, sink, kv, indices, *nothing, tiles=tiles),
    }[source]()
    expected = torch.zeros_like(q) if source == "neither" else plain(q, sink, kv, indices)
    assert_close(actual, expected)


@all_variants
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "rotary_dim", "shared"),
    [(torch.float32, 16, 64, 32, True), (torch.bfloat16, 6, 96, 48, False), (torch.float16, 3, 64, 64, False)],
    ids=str,
)
def test_fused_rope_has_the_bits_of_separate_rope(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    rotary_dim: int,
    shared: bool,
    tiles: SparseAttentionTiles | None,
    device: torch.device,
):
    torch.manual_seed(3)
    q, *others = inputs(2, 2, heads, dim, 5, 9, dtype, device)
    angles = torch.randn(1 if shared else 2, 2, rotary_dim // 2) * 100
    rotations = torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)
    turned = apply_rope_body(q, rotations, False)
    attended = sparse_attention(turned, *others, tiles=tiles)
    actual = sparse_attention(q, *others, rotations, rotate_q=True, tiles=tiles)
    assert torch.equal(actual, attended)
    actual = sparse_attention(q, *others, rotations, rotate_q=True, rotate_output=True, tiles=tiles)
    assert torch.equal(actual, apply_rope_body(attended, rotations, True))
    actual = sparse_attention(turned, *others, rotations, rotate_output=True, tiles=tiles)
    assert torch.equal(actual, apply_rope_body(attended, rotations, True))


@all_variants
def test_sinks_and_spoiled_rows(tiles: SparseAttentionTiles | None, device: torch.device):
    torch.manual_seed(4)
    q, sink, kv, indices, *_ = inputs(1, 3, 4, 64, 20, 1, torch.float32, device)
    sink = torch.tensor([80.0, -80.0, -float("inf"), 0.0], device=device)
    expected = plain(q, sink, kv, indices).nan_to_num(0)  # nothing visible and no sink: 0
    assert_close(sparse_attention(q, sink, kv, indices, tiles=tiles), expected)
    spoiled = kv.clone()
    spoiled[0, 0] = float("nan")
    indices = indices.where(indices != 0, -1)  # what no slot names may hold anything
    expected = plain(q, sink, kv, indices).nan_to_num(0)
    assert_close(sparse_attention(q, sink, spoiled, indices, tiles=tiles), expected)


def test_inputs_may_be_strided_or_expanded(device: torch.device):
    torch.manual_seed(5)
    q, sink, kv, indices, compressed, topk = inputs(2, 3, 4, 64, 6, 9, torch.float32, device)
    expected = plain(q, sink, kv, indices[:1].expand(2, -1, -1), compressed, topk)
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    strided_kv, strided_compressed = torch.cat([kv, kv], dim=-1)[..., :64], torch.cat([compressed] * 2, dim=1)[:, :40]
    strided_topk = torch.cat([topk, topk], dim=-1)[..., :9]
    for window_indices in (indices[:1], indices[:1].expand(2, -1, -1)):
        given = strided_q, sink, strided_kv, window_indices, strided_compressed, strided_topk
        assert_close(sparse_attention(*given, tiles=SMALL), expected)


def test_tiles_for_decode_split_and_for_prefill_do_not():
    decode = choose_tiles(tokens=1, heads=64, dim=512, element_bytes=2, slots=640)
    assert decode.splits > 1
    assert choose_tiles(tokens=4096, heads=64, dim=512, element_bytes=2, slots=640).splits == 1


@pytest.mark.parametrize("shared_kilobytes", [227, 163, 99])
@pytest.mark.parametrize(("heads", "element_bytes"), [(8, 2), (64, 2), (128, 2), (64, 4)])
def test_tiles_fit(heads: int, element_bytes: int, shared_kilobytes: int):
    for tokens, dim in itertools.product((1, 100, 4096), (64, 192, 512)):
        tiles = choose_tiles(tokens, heads, dim, element_bytes, 640, shared_kilobytes << 10)
        assert tiles.shared_bytes(dim, element_bytes) <= shared_kilobytes << 10
    with pytest.raises(ValueError, match="no tiles of 512 channels"):
        choose_tiles(1, heads, 512, element_bytes, 640, 16 << 10)
