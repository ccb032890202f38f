"""Matrix-vector products for decoding: one row of activations against a weight matrix, read once.

out[g, n] = sum over k of x[g, k] * weight[g, n, k]. A program takes `rows` rows of the weight and goes through
their channels in tiles of `channels`; every lane keeps float32 partial sums, which a tree adds at the end.

Needs: x [G, 1, K] and weight [G, N, K] of one dtype (float32, bfloat16, float16), channels adjacent in memory.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable


@dataclass(frozen=True)
class GemvTiles:
    """rows: of the weight a program takes; channels: of each it reads at once; both powers of two."""

    rows: int
    channels: int
    num_warps: int
    num_stages: int = 1


def choose_tiles(num_rows: int, num_channels: int) -> GemvTiles:
    """Tiles for a weight [num_rows, num_channels], all groups counted as rows: from a sweep on one H200."""
    if num_rows >= 4096 and num_channels < 2048:
        tiles = (16, 256) if num_rows >= 16384 else (4, 512)
        return GemvTiles(*tiles, num_warps=4)
    if num_rows >= 4096:
        return GemvTiles(2, 1024, num_warps=4)
    channels = min(2048 if num_rows < 1024 else 1024, triton.next_power_of_2(num_channels))
    return GemvTiles(1, channels, num_warps=max(1, channels // 256))


def gemv(x: Tensor, weight: Tensor, *, tiles: GemvTiles | None = None) -> Tensor:
    """x [G, 1, K] times the transpose of weight [G, N, K], in x's dtype: [G, 1, N]."""
    groups, num_rows, num_channels = weight.shape
    tiles = tiles or choose_tiles(groups * num_rows, num_channels)
    out = torch.empty(groups, 1, num_rows, dtype=x.dtype, device=x.device)
    traceable(gemv_kernel)[(triton.cdiv(num_rows, tiles.rows), groups)](
        x,
        weight,
        out,
        num_rows,
        num_channels,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        ROWS=tiles.rows,
        CHANNELS=tiles.channels,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return out


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_channels,
    x_group_stride,
    weight_group_stride,
    weight_row_stride,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = row < num_rows
    x_ptr += group * x_group_stride
    weight_rows = (weight_ptr + group * weight_group_stride + row.to(tl.int64) * weight_row_stride)[:, None]
    sums = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in tl.range(0, num_channels, CHANNELS, num_stages=STAGES):
        channel = (first + tl.arange(0, CHANNELS))[None, :]
        exists = channel < num_channels
        x = tl.load(x_ptr + channel, mask=exists, other=0.0).to(tl.float32)
        weight = tl.load(weight_rows + channel, mask=row_exists[:, None] & exists, other=0.0).to(tl.float32)
        sums += weight * x
    out = tl.sum(sums, axis=1)
    tl.store(out_ptr + group * num_rows + row, out.to(out_ptr.dtype.element_ty), mask=row_exists)
