"""Products of a few rows with weights that are read once, for decoding several sequences together.

out[m, n] = sum over k of x[m, k] * weight[n, k], of up to four weights that multiply the same x in one launch, or of
groups with an x and a weight each. A weight is cut into blocks of `outputs` rows, a block into chunks of `channels`,
and all chunks of all weights, in order, into even shares, one a program: so the device is full whatever the shapes. A
program keeps several chunks in flight. Where its share ends inside a block, others have the rest of that block: then
every program leaves float32 sums behind, which a second kernel adds in ascending order. Where programs have whole
blocks it writes the result at once.

A float32 weight is split, in registers, into three bfloat16 numbers, which keep all of its 24 bits, so that the
tensor cores form every product exactly and only float32 sums round, as in `csa2_compiled.matmul.linear_float32`.

Needs: x bfloat16 or float16 [M, K] or [G, M, K], M up to 64; weights [N, K] or [G, N, K] of x's dtype, or float32
with a bfloat16 x; channels adjacent in memory; weights of one launch with one dtype and distance between rows.
"""
# mypy: disable-error-code="import-not-found, no-untyped-def"

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.tile_math import dot_float32, round_to

MOST_WEIGHTS = 4
# Of an H100 or H200. Elsewhere only speed depends on the first; the second is asked of the device.
_MULTIPROCESSORS = 132
SHARED_MEMORY = 227 << 10


@dataclass(frozen=True)
class FewRowsTiles:
    """outputs: rows of a weight in a block, at least 16; channels: of each in a chunk; both powers of two.

    programs: among which the chunks of all blocks are divided; None for one a block. num_stages: chunks in flight.
    """

    outputs: int = 128
    channels: int = 64
    programs: int | None = None
    num_warps: int = 4
    num_stages: int = 4


def choose_tiles(groups: int, rows: int, dtype: torch.dtype, shared_memory: int = SHARED_MEMORY) -> FewRowsTiles:
    """Tiles for weights of this dtype, `groups` of each, and `rows` rows of x.

    shared_memory: bytes that a program may use.
    """
    tiles = _tiles_for_much_memory(groups, dtype)
    while _shared_memory(tiles, rows, dtype) > shared_memory:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.outputs > 16:
            tiles = replace(tiles, outputs=tiles.outputs // 2)
        else:
            raise ValueError(f"no tiles for {rows} rows fit {shared_memory} bytes of shared memory")
    return tiles


def _tiles_for_much_memory(groups: int, dtype: torch.dtype) -> FewRowsTiles:
    """From a sweep of the released shapes with 8 and 64 rows on one H200."""
    if groups > 1 and dtype != torch.float32:
        return FewRowsTiles(64, 128, num_stages=5)
    return FewRowsTiles(64, 64, programs=2 * _MULTIPROCESSORS, num_stages=4 if dtype == torch.float32 else 5)


def _shared_memory(tiles: FewRowsTiles, rows: int, dtype: torch.dtype) -> int:
    """No less than a program uses: chunks of the weight and of x, and the sums once, on their way to the memory."""
    chunk = tiles.channels * (tiles.outputs * dtype.itemsize + _padded_rows(rows) * 2)
    return tiles.num_stages * chunk + tiles.outputs * _padded_rows(rows) * 4


def _padded_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def few_rows_products(
    x: Tensor, weights: Sequence[Tensor], *, tiles: FewRowsTiles | None = None, shared_memory: int = SHARED_MEMORY
) -> tuple[Tensor, ...]:
    """x [M, K] times the transpose of each weight [N, K], in the weights' dtype: [M, N] each.

    shared_memory: bytes that a program may use, where no tiles are given. Raises ValueError for too many weights.
    """
    if len(weights) > MOST_WEIGHTS:
        raise ValueError(f"weights are {len(weights)}; a launch takes at most {MOST_WEIGHTS}")
    stacked = [weight.unsqueeze(0) for weight in weights]
    return tuple(out.squeeze(1) for out in _products(x.unsqueeze(0), stacked, tiles, shared_memory))


def grouped_few_rows_product(
    x: Tensor, weight: Tensor, *, tiles: FewRowsTiles | None = None, shared_memory: int = SHARED_MEMORY
) -> Tensor:
    """x [G, M, K] times the transposes of weight [G, N, K], in x's dtype: [M, G, N]. shared_memory: as above."""
    return _products(x, [weight], tiles, shared_memory)[0]


def _products(x: Tensor, weights: Sequence[Tensor], tiles: FewRowsTiles | None, shared_memory: int) -> list[Tensor]:
    """x [G, M, K], weights [G, N, K]: [M, G, N] each; one weight or G = 1."""
    groups, rows, num_channels = x.shape
    outputs = [weight.shape[1] for weight in weights]
    tiles = tiles or choose_tiles(groups, rows, weights[0].dtype, shared_memory)
    outs = [torch.empty(rows, groups, n, dtype=weights[0].dtype, device=x.device) for n in outputs]
    stops = list(accumulate(triton.cdiv(n, tiles.outputs) for n in outputs))
    blocks, chunks = groups * stops[-1], triton.cdiv(num_channels, tiles.channels)
    programs = min(tiles.programs or blocks, blocks * chunks)
    padded_rows = _padded_rows(rows)
    parts = None
    if blocks % programs:
        slots = programs + blocks - 1
        parts = torch.empty(slots, tiles.outputs, padded_rows, dtype=torch.float32, device=x.device)
    of_outs = (*_padded(outs), *_padded(outputs), *_padded(stops[:-1])[:-1])
    traceable(few_rows_kernel)[(programs,)](
        x,
        *_padded(weights),
        *of_outs,
        parts,
        stops[-1],
        rows,
        num_channels,
        x.stride(0),
        x.stride(1),
        weights[0].stride(0),
        weights[0].stride(1),
        GROUPS=groups,
        EVEN_CHANNELS=num_channels % tiles.channels == 0,
        ROWS=padded_rows,
        OUTPUTS=tiles.outputs,
        CHANNELS=tiles.channels,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    if parts is not None:
        part_outputs = min(tiles.outputs, 16)
        traceable(add_shares_kernel)[(blocks, tiles.outputs // part_outputs)](
            parts,
            *of_outs,
            programs,
            chunks,
            stops[-1],
            rows,
            ROWS=padded_rows,
            OUTPUTS=tiles.outputs,
            PART_OUTPUTS=part_outputs,
            MOST_SHARES=triton.cdiv(programs, blocks) + (programs % blocks > 0),
            num_warps=4,
        )
    return outs


def _padded(values: Sequence[Any]) -> list[Any]:
    return [*values, *[None] * (MOST_WEIGHTS - len(values))]


@triton.jit
def few_rows_kernel(
    x_ptr,
    weight_0_ptr,
    weight_1_ptr,
    weight_2_ptr,
    weight_3_ptr,
    out_0_ptr,
    out_1_ptr,
    out_2_ptr,
    out_3_ptr,
    outputs_0,
    outputs_1,
    outputs_2,
    outputs_3,
    stop_0,
    stop_1,
    stop_2,
    parts_ptr,
    group_blocks,
    num_rows,
    num_channels,
    x_group_stride,
    x_row_stride,
    weight_group_stride,
    weight_row_stride,
    GROUPS: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    chunks = tl.cdiv(num_channels, CHANNELS)
    blocks = GROUPS * group_blocks
    row, output, channel = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, CHANNELS)
    row_exists = row < num_rows
    x_offsets = row[:, None] * x_row_stride + channel[None, :]
    weight_offsets = output[:, None] * weight_row_stride + channel[None, :]
    place = program.to(tl.int64) * (blocks * chunks)  # may need more than 32 bits
    first, last = (place // programs).to(tl.int32), ((place + blocks * chunks) // programs).to(tl.int32)
    block, chunk = first // chunks, first % chunks
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for number in tl.range(first, last, num_stages=STAGES):
        group, of_group = block // group_blocks, block
        if GROUPS > 1:
            of_group = block % group_blocks
        num_outputs = _pick(of_group, stop_0, stop_1, stop_2, outputs_0, outputs_1, outputs_2, outputs_3)
        first_output = (of_group - _pick(of_group, stop_0, stop_1, stop_2, 0, stop_0, stop_1, stop_2)) * OUTPUTS
        output_exists = output < num_outputs - first_output
        weight_ptr = _pick(of_group, stop_0, stop_1, stop_2, weight_0_ptr, weight_1_ptr, weight_2_ptr, weight_3_ptr)
        weight_at = weight_ptr + first_output.to(tl.int64) * weight_row_stride + chunk * CHANNELS
        x_at = x_ptr + chunk * CHANNELS
        if GROUPS > 1:
            weight_at += group.to(tl.int64) * weight_group_stride
            x_at += group.to(tl.int64) * x_group_stride
        weight_mask, x_mask = output_exists[:, None], row_exists[:, None]
        if not EVEN_CHANNELS:
            channel_exists = (channel < num_channels - chunk * CHANNELS)[None, :]
            weight_mask, x_mask = weight_mask & channel_exists, x_mask & channel_exists
        weight = tl.load(weight_at + weight_offsets, mask=weight_mask, other=0.0)
        x = tl.trans(tl.load(x_at + x_offsets, mask=x_mask, other=0.0))
        if weight.dtype == tl.float32:
            for _ in tl.static_range(3):
                # Cut, not rounded: 8 bits of the 24 a time, by an instruction that is faster than a conversion.
                part = (weight.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                weight -= part
                sums = dot_float32(part.to(tl.bfloat16), x, sums)
        else:
            sums = dot_float32(weight, x, sums)
        ends = chunk == chunks - 1
        if ends | (number == last - 1):
            if parts_ptr is None:
                out_ptr = _pick(of_group, stop_0, stop_1, stop_2, out_0_ptr, out_1_ptr, out_2_ptr, out_3_ptr)
                out_rows = out_ptr + (row.to(tl.int64) * GROUPS + group)[None, :] * num_outputs + first_output
                exists = output_exists[:, None] & row_exists[None, :]
                tl.store(out_rows + output[:, None], round_to(sums, out_ptr.dtype.element_ty), mask=exists)
            else:
                # Going on to the next program or the next block raises this sum, so that no two shares have one slot.
                slot = (program + block).to(tl.int64)
                tl.store(parts_ptr + (slot * OUTPUTS + output[:, None]) * ROWS + row[None, :], sums)
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        block = tl.where(ends, block + 1, block)
        chunk = tl.where(ends, 0, chunk + 1)


@triton.jit
def add_shares_kernel(
    parts_ptr,
    out_0_ptr,
    out_1_ptr,
    out_2_ptr,
    out_3_ptr,
    outputs_0,
    outputs_1,
    outputs_2,
    outputs_3,
    stop_0,
    stop_1,
    stop_2,
    programs,
    chunks,
    group_blocks,
    num_rows,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PART_OUTPUTS: tl.constexpr,
    MOST_SHARES: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    in_block = tl.program_id(1) * PART_OUTPUTS + tl.arange(0, PART_OUTPUTS)
    row = tl.arange(0, ROWS)
    # The programs that have the first and the last chunk of the block.
    first = ((block * chunks + 1) * programs - 1) // (blocks * chunks)
    last = ((block + 1) * chunks * programs - 1) // (blocks * chunks)
    sums = tl.zeros((PART_OUTPUTS, ROWS), tl.float32)
    for share in tl.static_range(MOST_SHARES):
        slot = (first + share + block).to(tl.int64)
        at = (slot * OUTPUTS + in_block[:, None]) * ROWS + row[None, :]
        sums += tl.load(parts_ptr + at, mask=first + share <= last, other=0.0)
    group, of_group = block // group_blocks, block % group_blocks
    num_outputs = _pick(of_group, stop_0, stop_1, stop_2, outputs_0, outputs_1, outputs_2, outputs_3)
    out_ptr = _pick(of_group, stop_0, stop_1, stop_2, out_0_ptr, out_1_ptr, out_2_ptr, out_3_ptr)
    output = (of_group - _pick(of_group, stop_0, stop_1, stop_2, 0, stop_0, stop_1, stop_2)) * OUTPUTS + in_block
    groups = blocks // group_blocks
    out_rows = out_ptr + (row.to(tl.int64) * groups + group)[None, :] * num_outputs
    exists = (output < num_outputs)[:, None] & (row < num_rows)[None, :]
    tl.store(out_rows + output[:, None], round_to(sums, out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _pick(block, stop_0, stop_1, stop_2, value_0, value_1, value_2, value_3):
    """The value of the weight that a block is of. stops: the blocks of a weight and of those before it, together."""
    value = value_0
    if value_1 is not None:
        value = tl.where(block < stop_0, value, value_1)
    if value_2 is not None:
        value = tl.where(block < stop_1, value, value_2)
    if value_3 is not None:
        value = tl.where(block < stop_2, value, value_3)
    return value
