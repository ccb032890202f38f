"""Index scores with the head loop inside: no [B, S, Hi, T] tensor.

Computes `csa2::index_scores`: score[s, t] = sum over heads of relu(q[s, h] . k[t]) * weight[s, h], float32,
-inf where position t is not visible to query s. Two forms, chosen by the number of queries:

- *tiles* of queries x positions for a prefill. A program keeps one tile of keys and goes through the heads; the
  dot is accumulated in float32 by the tensor cores, heads are added in ascending order, each by one fused
  multiply-add.
- *rows* for a few queries (decode). Positions are the rows of the dot and one query's heads its columns, so
  that no row is padding; a program keeps its keys and goes through up to `queries` queries. Heads are added as
  a tree.

Either order differs from the plain body's; the products themselves are exact in float32 for the quantized
values. NaN in q, k or weights gives NaN. A tile that no query of the program sees is not computed: it is
written as -inf, or left unwritten with ``write_invisible=False`` when the consumer reads visible ranges only.

Needs: q [B, S, Hi, Di] and k [B, T, Di] of one dtype (float16, bfloat16, float32), Di a multiple of 16,
channels adjacent in memory; weights float32 [B, S, Hi]; visible_start and visible_stop int32 [B, S].
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.tile_math import dot_float32

FEW_QUERIES = 32


@dataclass(frozen=True)
class IndexScoresTiles:
    """Powers of two. queries: rows of a tile, at least 16; in the *rows* form how many a program goes through.

    positions: columns of a tile; in the *rows* form its rows, at least 16. max_registers: of a thread, so that more
    programs share a multiprocessor; None leaves it to the compiler.
    """

    queries: int
    positions: int
    num_warps: int
    num_stages: int
    heads_are_columns: bool = False
    max_registers: int | None = None

    def launch_options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def choose_tiles(num_queries: int, element_bytes: int) -> IndexScoresTiles:
    """Tiles for a call with that many queries a sequence."""
    if num_queries < FEW_QUERIES:
        return IndexScoresTiles(queries=8, positions=64, num_warps=4, num_stages=2, heads_are_columns=True)
    if element_bytes == 4:
        return IndexScoresTiles(queries=32, positions=64, num_warps=4, num_stages=2)  # without tensor cores
    return IndexScoresTiles(queries=64, positions=128, num_warps=4, num_stages=3)


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    visible_start: Tensor,
    visible_stop: Tensor,
    *,
    write_invisible: bool = True,
    tiles: IndexScoresTiles | None = None,
) -> Tensor:
    """Scores float32 [B, S, T] of q [B, S, Hi, Di] against k [B, T, Di]; see `csa2_compiled.ops.index_scores`.

    write_invisible: False leaves positions outside [visible_start, visible_stop) undefined.
    """
    batch, queries, heads, dim = q.shape
    positions = k.shape[1]
    scores = torch.empty(batch, queries, positions, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    tiles = tiles or choose_tiles(queries, q.element_size())
    grid = (triton.cdiv(positions, tiles.positions), triton.cdiv(queries, tiles.queries), batch)
    arguments = (
        q,
        k,
        weights,
        visible_start,
        visible_stop,
        scores,
        queries,
        positions,
        *q.stride()[:3],
        *k.stride()[:2],
        *weights.stride(),
        *visible_start.stride(),
        *visible_stop.stride(),
    )
    sizes = {
        "HEADS": heads,
        "DIM": dim,
        "PADDED_DIM": triton.next_power_of_2(dim),
        "WRITE_INVISIBLE": write_invisible,
        "QUERIES": tiles.queries,
        "POSITIONS": tiles.positions,
        "STAGES": tiles.num_stages,
    }
    if tiles.heads_are_columns:
        padded_heads = max(16, triton.next_power_of_2(heads))
        traceable(index_scores_rows_kernel)[grid](
            *arguments, **sizes, PADDED_HEADS=padded_heads, **tiles.launch_options()
        )
    else:
        traceable(index_scores_tiles_kernel)[grid](*arguments, **sizes, **tiles.launch_options())
    return scores


@triton.jit
def index_scores_tiles_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    visible_start_ptr,
    visible_stop_ptr,
    scores_ptr,
    num_queries,
    num_positions,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_position_stride,
    weight_batch_stride,
    weight_token_stride,
    weight_head_stride,
    start_batch_stride,
    start_token_stride,
    stop_batch_stride,
    stop_token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WRITE_INVISIBLE: tl.constexpr,
    QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    STAGES: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    first_position = tl.program_id(0) * POSITIONS
    first_query = tl.program_id(1) * QUERIES
    query = first_query + tl.arange(0, QUERIES)
    position = first_position + tl.arange(0, POSITIONS)
    query_exists, position_exists = query < num_queries, position < num_positions
    row = query.to(tl.int64)

    start_rows = visible_start_ptr + batch * start_batch_stride + row * start_token_stride
    stop_rows = visible_stop_ptr + batch * stop_batch_stride + row * stop_token_stride
    start = tl.load(start_rows, mask=query_exists, other=0)
    stop = tl.load(stop_rows, mask=query_exists, other=0)
    # A scalar base and 32-bit offsets within the tile: 64-bit pointers to all of it would not fit in registers.
    tile = scores_ptr + (batch * num_queries + first_query) * num_positions + first_position
    within_tile = tl.arange(0, QUERIES)[:, None] * num_positions + tl.arange(0, POSITIONS)[None, :]

    if _tile_is_visible(start, stop, first_position, POSITIONS):
        channel = tl.arange(0, PADDED_DIM)[None, :]
        k_rows = k_ptr + batch * k_batch_stride + position.to(tl.int64)[:, None] * k_position_stride
        k = tl.load(k_rows + channel, mask=position_exists[:, None] & (channel < DIM), other=0.0)
        q_rows = q_ptr + batch * q_batch_stride + row[:, None] * q_token_stride
        weight_rows = weights_ptr + batch * weight_batch_stride + row * weight_token_stride
        q_exists = query_exists[:, None] & (channel < DIM)
        total = tl.zeros((QUERIES, POSITIONS), tl.float32)
        for head in tl.range(0, HEADS, num_stages=STAGES):
            q = tl.load(q_rows + tl.cast(head, tl.int64) * q_head_stride + channel, mask=q_exists, other=0.0)
            weight = tl.load(weight_rows + head * weight_head_stride, mask=query_exists, other=0.0)
            product = dot_float32(q, tl.trans(k), tl.zeros((QUERIES, POSITIONS), tl.float32))
            total += tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
        visible = (position[None, :] >= start[:, None]) & (position[None, :] < stop[:, None])
        exists = query_exists[:, None] & position_exists[None, :]
        tl.store(tile + within_tile, tl.where(visible, total, -float("inf")), mask=exists)
    elif WRITE_INVISIBLE:
        exists = query_exists[:, None] & position_exists[None, :]
        total = tl.full((QUERIES, POSITIONS), -float("inf"), tl.float32)
        tl.store(tile + within_tile, total, mask=exists)


@triton.jit
def index_scores_rows_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    visible_start_ptr,
    visible_stop_ptr,
    scores_ptr,
    num_queries,
    num_positions,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_position_stride,
    weight_batch_stride,
    weight_token_stride,
    weight_head_stride,
    start_batch_stride,
    start_token_stride,
    stop_batch_stride,
    stop_token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WRITE_INVISIBLE: tl.constexpr,
    QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    first_position = tl.program_id(0) * POSITIONS
    first_query = tl.program_id(1) * QUERIES
    query = first_query + tl.arange(0, QUERIES)
    position = first_position + tl.arange(0, POSITIONS)
    position_exists = position < num_positions

    start_rows = visible_start_ptr + batch * start_batch_stride
    stop_rows = visible_stop_ptr + batch * stop_batch_stride
    starts = tl.load(start_rows + query.to(tl.int64) * start_token_stride, mask=query < num_queries, other=0)
    stops = tl.load(stop_rows + query.to(tl.int64) * stop_token_stride, mask=query < num_queries, other=0)
    last_query = tl.minimum(first_query + QUERIES, num_queries)
    scores = scores_ptr + batch * num_queries * num_positions + position

    if _tile_is_visible(starts, stops, first_position, POSITIONS):
        channel = tl.arange(0, PADDED_DIM)[None, :]
        head = tl.arange(0, PADDED_HEADS)
        k_rows = k_ptr + batch * k_batch_stride + position.to(tl.int64)[:, None] * k_position_stride
        k = tl.load(k_rows + channel, mask=position_exists[:, None] & (channel < DIM), other=0.0)
        q_rows = q_ptr + batch * q_batch_stride + head.to(tl.int64)[:, None] * q_head_stride
        weight_rows = weights_ptr + batch * weight_batch_stride + head * weight_head_stride
        q_exists = (head < HEADS)[:, None] & (channel < DIM)
        for number in tl.range(first_query, last_query, num_stages=STAGES):
            row = tl.cast(number, tl.int64)
            q = tl.load(q_rows + row * q_token_stride + channel, mask=q_exists, other=0.0)
            weight = tl.load(weight_rows + row * weight_token_stride, mask=head < HEADS, other=0.0)
            start = tl.load(start_rows + row * start_token_stride)
            stop = tl.load(stop_rows + row * stop_token_stride)
            product = dot_float32(k, tl.trans(q), tl.zeros((POSITIONS, PADDED_HEADS), tl.float32))
            weighted = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if HEADS < PADDED_HEADS:
                weighted = tl.where((head < HEADS)[None, :], weighted, 0.0)  # an infinity in k makes NaN of padding
            visible = (position >= start) & (position < stop)
            score = tl.where(visible, tl.sum(weighted, axis=1), -float("inf"))
            tl.store(scores + row * num_positions, score, mask=position_exists)
    elif WRITE_INVISIBLE:
        for number in tl.range(first_query, last_query):
            score = tl.full((POSITIONS,), -float("inf"), tl.float32)
            tl.store(scores + tl.cast(number, tl.int64) * num_positions, score, mask=position_exists)


@triton.jit
def _tile_is_visible(starts, stops, first_position, POSITIONS: tl.constexpr):
    """Whether any of the ranges that start and stop bound reaches into the tile's positions."""
    seen = (starts < stops) & (starts < first_position + POSITIONS) & (stops > first_position)
    return tl.max(tl.where(seen, 1, 0), axis=0) > 0
