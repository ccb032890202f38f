"""Products of a few bfloat16 rows with a float32 weight, which is read once: pooled projections while decoding.

out[m, n] = sum over k of x[m, k] * weight[n, k]. A program takes a tile of the weight's rows and a share of its
channels; it splits the weight, in registers, into three bfloat16 numbers, which keep all of its 24 bits, so that the
tensor cores form every product exactly and only float32 sums round, as in `csa2_compiled.matmul.linear_float32`. The
shares are added afterwards, in ascending order.

Needs: x bfloat16 [M, K], M up to 64; weight float32 [N, K]; channels adjacent in memory.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.tile_math import dot_float32, round_to

MOST_ROWS = 64
_FILLING_PROGRAMS = 256


@dataclass(frozen=True)
class FewRowsTiles:
    """outputs: rows of the weight a program takes, at least 16; channels: of each it reads at once; powers of two."""

    outputs: int = 32
    channels: int = 64
    num_warps: int = 4
    num_stages: int = 3


def few_rows_product(x: Tensor, weight: Tensor, *, tiles: FewRowsTiles | None = None) -> Tensor:
    """x [M, K] times the transpose of weight [N, K], float32 [M, N]."""
    tiles = tiles or FewRowsTiles()
    rows, num_channels = x.shape
    num_outputs = weight.shape[0]
    blocks = triton.cdiv(num_outputs, tiles.outputs)
    shares = max(1, min(_FILLING_PROGRAMS // blocks, triton.cdiv(num_channels, tiles.channels)))
    parts = torch.empty(shares, rows, num_outputs, dtype=torch.float32, device=x.device)
    traceable(few_rows_kernel)[(blocks, shares)](
        x,
        weight,
        parts,
        rows,
        num_outputs,
        num_channels,
        x.stride(0),
        weight.stride(0),
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=tiles.outputs,
        CHANNELS=tiles.channels,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return parts.sum(0)


@triton.jit
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    parts_ptr,
    num_rows,
    num_outputs,
    num_channels,
    x_row_stride,
    weight_row_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    row_exists, output_exists = row < num_rows, output < num_outputs
    x_rows = (x_ptr + row.to(tl.int64) * x_row_stride)[:, None]
    weight_rows = (weight_ptr + output.to(tl.int64) * weight_row_stride)[:, None]
    share = tl.cdiv(tl.cdiv(num_channels, CHANNELS), tl.num_programs(1)) * CHANNELS
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, num_channels)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, last, CHANNELS, num_stages=STAGES):
        channel = (start + tl.arange(0, CHANNELS))[None, :]
        exists = channel < last
        x = tl.trans(tl.load(x_rows + channel, mask=row_exists[:, None] & exists, other=0.0))
        rest = tl.load(weight_rows + channel, mask=output_exists[:, None] & exists, other=0.0)
        for _ in tl.static_range(3):
            part = round_to(rest, tl.bfloat16)
            rest -= part.to(tl.float32)
            sums = dot_float32(part, x, sums)
    at = (tl.program_id(1) * num_rows + row[None, :]).to(tl.int64) * num_outputs + output[:, None]
    tl.store(parts_ptr + at, sums, mask=row_exists[None, :] & output_exists[:, None])
