"""Index scores and selection in one kernel, which never holds the scores of more queries than run at once.

A candidate for the passes, timed by attention.py beside the two kernels that they use. A program takes a few queries
at a time: it multiplies a tile of keys with all heads of these queries, adds the heads, leaves the scores in its own
rows of a scratch that stays in the L2 cache, and then selects from them as `select_topk` does. Programs take blocks of
queries in a zigzag, since later queries see more.

Needs: what `index_scores` and `select_topk` need; heads a power of two; at most 32768 positions.
"""

# mypy: disable-error-code="import-not-found, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.select_topk import _select
from csa2_compiled.passes.kernels.tile_math import dot_float32


def scores_and_selection(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    visible_start: Tensor,
    visible_stop: Tensor,
    topk: int,
    *,
    queries: int = 4,
    positions: int = 128,
    programs: int = 264,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Tensor:
    """int32 [1, S, topk] of q [1, S, Hi, Di] against k [1, T, Di], contiguous; see `csa2_compiled.ops.select_topk`.

    queries, positions: of a tile; programs: how many share the blocks of queries.
    """
    batch, tokens, heads, dim = q.shape
    if batch != 1:
        raise ValueError(f"q has a batch of {batch}; this kernel takes 1")
    length = k.shape[1]
    blocks = triton.cdiv(tokens, queries)
    programs = min(programs, blocks)
    scratch = torch.empty(programs, queries, length, dtype=torch.float32, device=q.device)
    winners = torch.empty(1, tokens, topk, dtype=torch.int32, device=q.device)
    scores_and_selection_kernel[(programs,)](
        q,
        k,
        weights,
        visible_start,
        visible_stop,
        scratch,
        winners,
        tokens,
        length,
        topk,
        blocks,
        HEADS=heads,
        DIM=dim,
        QUERIES=queries,
        POSITIONS=positions,
        ENTRIES=max(128, triton.next_power_of_2(length)),
        FILL=min(1024, triton.next_power_of_2(topk)),
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return winners


@triton.jit
def scores_and_selection_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    visible_start_ptr,
    visible_stop_ptr,
    scratch_ptr,
    winners_ptr,
    num_queries,
    num_positions,
    topk,
    blocks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(0)
    own_scores = scratch_ptr + tl.program_id(0).to(tl.int64) * QUERIES * num_positions
    column = tl.arange(0, QUERIES * HEADS)
    channel = tl.arange(0, DIM)[None, :]
    within = tl.arange(0, QUERIES)
    for turn in range(tl.cdiv(blocks, programs)):
        forward = turn * programs + tl.program_id(0)
        block = tl.where(turn % 2 == 0, forward, (turn + 1) * programs - 1 - tl.program_id(0))
        if block < blocks:
            first_query = block * QUERIES
            exists = first_query + column // HEADS < num_queries
            row = first_query.to(tl.int64) * HEADS + column
            q = tl.load(q_ptr + row[:, None] * DIM + channel, mask=exists[:, None], other=0.0)
            weight = tl.load(weights_ptr + row, mask=exists, other=0.0)
            query = first_query + within
            start = tl.load(visible_start_ptr + query, mask=query < num_queries, other=0)
            stop = tl.load(visible_stop_ptr + query, mask=query < num_queries, other=0)
            seen = start < stop
            first = tl.min(tl.where(seen, start, num_positions), axis=0) // POSITIONS
            last = tl.cdiv(tl.max(tl.where(seen, stop, 0), axis=0), POSITIONS)
            for tile in tl.range(first, last, num_stages=STAGES):
                position = tile * POSITIONS + tl.arange(0, POSITIONS)
                position_exists = position < num_positions
                k = tl.load(k_ptr + position[:, None] * DIM + channel, mask=position_exists[:, None], other=0.0)
                product = dot_float32(k, tl.trans(q), tl.zeros((POSITIONS, QUERIES * HEADS), tl.float32))
                weighted = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
                score = tl.sum(tl.reshape(weighted, (POSITIONS, QUERIES, HEADS)), axis=2)
                at = own_scores + within[None, :] * num_positions + position[:, None]
                tl.store(at, score, mask=position_exists[:, None])
            tl.debug_barrier()
            for number in range(QUERIES):
                chosen = first_query + number
                if chosen < num_queries:
                    begin, end = tl.load(visible_start_ptr + chosen), tl.load(visible_stop_ptr + chosen)
                    scores = own_scores + number * num_positions
                    winners = winners_ptr + chosen.to(tl.int64) * topk
                    if end - begin <= ENTRIES // 4:
                        selected = _select(scores, None, None, winners, begin, end, topk, ENTRIES // 4)
                    elif end - begin <= ENTRIES // 2:
                        selected = _select(scores, None, None, winners, begin, end, topk, ENTRIES // 2)
                    else:
                        selected = _select(scores, None, None, winners, begin, end, topk, ENTRIES)
                    for first_empty in range(0, topk, FILL):
                        empty = first_empty + tl.arange(0, FILL)
                        free = (empty >= selected) & (empty < topk)
                        tl.store(winners + empty, tl.full((FILL,), -1, tl.int32), mask=free)
            tl.debug_barrier()
