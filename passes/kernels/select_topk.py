"""The k best positions of each row of scores, ascending, without a sort; candidate blocks by the same means.

Computes `csa2::select_topk` and `csa2::candidate_blocks` as `csa2_compiled.indexer_math` defines them: ties go
to the lower position, 0.0 and -0.0 tie, NaN and -inf are never selected, -1 fills what is left. No arithmetic
rounds, so the results are equal, not close.

A program holds up to `block` scores of a row in registers, as integers that order like the floats. It finds the
k-th best by bisection, counting the keys above the middle (which stops as soon as exactly k are above), then
writes the positions of the keys above it and of the first keys equal to it, at places that one prefix sum
gives. Longer rows are a tournament: every block of a row sends its own k best, and the same kernel chooses
among these, in as many rounds as it takes; each round divides a row by about block / k. All blocks of a round
run at once, so a single long row (decode) also fills the device.

With visible_start and visible_stop, scores outside [start, stop) are not read, so whoever made them need not
have written them.

Needs: scores float32 [B, S, T], positions adjacent in memory; candidates bool [B, S, T]; ranges int32 [B, S].
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable

_EXCLUDED = tl.constexpr(-0x80000000)  # below the key of every float
_LARGEST = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class SelectTopkTiles:
    """block: scores a program holds, a power of two, 32768 at most; keys_per_thread: a power of two.

    max_registers: of a thread, so that more rows share a multiprocessor; None leaves it to the compiler. ways: into how
    many parts a round of the search divides what is left, 2 or 4.
    """

    block: int = 8192
    keys_per_thread: int = 32
    max_registers: int | None = None
    ways: int = 4

    def launch_options(self, block: int) -> dict[str, int]:
        num_warps = min(32, max(1, block // (32 * self.keys_per_thread)))
        return {"num_warps": num_warps} | ({} if self.max_registers is None else {"maxnreg": self.max_registers})


@dataclass(frozen=True)
class CandidateBlocksTiles:
    """blocks: candidate blocks a program reads or marks, a power of two; select: tiles of the selection."""

    blocks: int = 256
    num_warps: int = 4
    select: SelectTopkTiles = SelectTopkTiles()


def supports(
    k: int, num_positions: int, group_starts: Tensor | None = None, block: int = SelectTopkTiles.block
) -> bool:
    """True, or NotImplementedError that says why these kernels do not serve such a call.

    k: how many are selected of num_positions: positions, or blocks less the newest for candidate blocks.
    """
    if group_starts is not None:
        raise NotImplementedError("candidate blocks of packed documents (group_starts) have no kernel")
    if 2 * k > block < num_positions:
        raise NotImplementedError(
            f"k is {k}; rows of {num_positions} positions are divided into blocks of {block}, and k may be half of "
            f"that at most"
        )
    return True


def select_topk(
    scores: Tensor,
    candidates: Tensor | None,
    k: int,
    visible_start: Tensor | None = None,
    visible_stop: Tensor | None = None,
    *,
    tiles: SelectTopkTiles | None = None,
) -> Tensor:
    """int32 [B, S, min(k, T)] of scores float32 [B, S, T]; see `csa2_compiled.ops.select_topk`.

    visible_start, visible_stop: int32 [B, S], both or neither; scores outside of them count as -inf.
    """
    tiles = tiles or SelectTopkTiles()
    batch, queries, positions = scores.shape
    k = min(k, positions)
    supports(k, positions, block=tiles.block)
    rows = batch * queries
    if rows == 0 or k == 0:
        return torch.empty(batch, queries, k, dtype=torch.int32, device=scores.device)
    entrants, length = None, positions
    while True:
        block = min(tiles.block, max(32, triton.next_power_of_2(length)))
        blocks = triton.cdiv(length, block)
        winners = torch.empty(batch, queries, blocks * k, dtype=torch.int32, device=scores.device)
        traceable(select_topk_kernel)[(rows, blocks)](
            scores,
            candidates,
            visible_start,
            visible_stop,
            entrants,
            winners,
            queries,
            length,
            k,
            *scores.stride()[:2],
            *((0, 0) if candidates is None else candidates.stride()[:2]),
            *((0, 0) if visible_start is None else visible_start.stride()),
            *((0, 0) if visible_stop is None else visible_stop.stride()),
            HAS_CANDIDATES=candidates is not None and entrants is None,
            HAS_RANGE=visible_start is not None and entrants is None,
            HAS_ENTRANTS=entrants is not None,
            BLOCK=block,
            FILL=min(1024, triton.next_power_of_2(k)),
            WAYS=tiles.ways,
            **tiles.launch_options(block),
        )
        if blocks == 1:
            return winners
        entrants, length = winners, blocks * k


def candidate_blocks(
    scores: Tensor,
    visible_stop: Tensor,
    group_starts: Tensor | None,
    topk_blocks: int,
    block_size: int,
    visible_start: Tensor | None = None,
    *,
    tiles: CandidateBlocksTiles | None = None,
) -> Tensor:
    """bool [B, S, T] of scores float32 [B, S, T]; see `csa2_compiled.ops.candidate_blocks`.

    Scores outside [visible_start (None: 0), visible_stop) are not read. Raises NotImplementedError for
    group_starts.
    """
    tiles = tiles or CandidateBlocksTiles()
    batch, queries, positions = scores.shape
    blocks = triton.cdiv(positions, block_size)
    k = min(topk_blocks - 1, blocks)
    supports(k, blocks, group_starts, tiles.select.block)
    marks = torch.zeros(batch, queries, positions, dtype=torch.bool, device=scores.device)
    if marks.numel() == 0:
        return marks
    best = torch.empty(batch, queries, blocks, dtype=torch.float32, device=scores.device)
    rows, padded_size = batch * queries, triton.next_power_of_2(block_size)
    traceable(best_of_blocks_kernel)[(rows, triton.cdiv(blocks, tiles.blocks))](
        scores,
        visible_start,
        visible_stop,
        best,
        queries,
        positions,
        blocks,
        *scores.stride()[:2],
        *((0, 0) if visible_start is None else visible_start.stride()),
        *visible_stop.stride(),
        BLOCK_SIZE=block_size,
        PADDED_SIZE=padded_size,
        BLOCKS=tiles.blocks,
        HAS_START=visible_start is not None,
        num_warps=tiles.num_warps,
    )
    kept = select_topk(best, None, k, tiles=tiles.select)
    traceable(mark_blocks_kernel)[(rows, triton.cdiv(k + 1, tiles.blocks))](
        kept,
        visible_stop,
        marks,
        queries,
        positions,
        k,
        *visible_stop.stride(),
        BLOCK_SIZE=block_size,
        PADDED_SIZE=padded_size,
        BLOCKS=tiles.blocks,
        num_warps=tiles.num_warps,
    )
    return marks


@triton.jit
def select_topk_kernel(
    scores_ptr,
    candidates_ptr,
    visible_start_ptr,
    visible_stop_ptr,
    entrants_ptr,
    winners_ptr,
    queries,
    length,
    k,
    score_batch_stride,
    score_query_stride,
    candidate_batch_stride,
    candidate_query_stride,
    start_batch_stride,
    start_query_stride,
    stop_batch_stride,
    stop_query_stride,
    HAS_CANDIDATES: tl.constexpr,
    HAS_RANGE: tl.constexpr,
    HAS_ENTRANTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    WAYS: tl.constexpr,
):
    """winners [rows, blocks, k] of each block of a row's entrants [length], or of its positions themselves."""
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // queries, row % queries
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if HAS_ENTRANTS:
        position = tl.load(entrants_ptr + row * length + entry, mask=entry < length, other=-1)
        allowed = position >= 0
    else:
        position = entry
        allowed = entry < length
    if HAS_RANGE:
        start = tl.load(visible_start_ptr + batch * start_batch_stride + query * start_query_stride)
        stop = tl.load(visible_stop_ptr + batch * stop_batch_stride + query * stop_query_stride)
        allowed = allowed & (position >= start) & (position < stop)
    if HAS_CANDIDATES:
        row_candidates = candidates_ptr + batch * candidate_batch_stride + query * candidate_query_stride
        allowed = allowed & (tl.load(row_candidates + position, mask=allowed, other=0) != 0)
    row_scores = scores_ptr + batch * score_batch_stride + query * score_query_stride
    score = tl.load(row_scores + position, mask=allowed, other=-float("inf"))
    keys = _ordered_keys(score, allowed)

    threshold = _kth_best_key(keys, k, WAYS)
    above, equal = keys > threshold, (keys == threshold) & (keys > _EXCLUDED)
    # Both counts in one prefix sum, the equal ones in the upper half.
    counts = tl.cumsum(tl.where(above, 1, 0) + tl.where(equal, 1 << 16, 0), axis=0)
    num_above = tl.sum(tl.where(above, 1, 0), axis=0)
    above_so_far, equal_so_far = counts & 0xFFFF, (counts >> 16) & 0xFFFF
    selected = above | (equal & (equal_so_far <= k - num_above))
    place = above_so_far + tl.minimum(equal_so_far, k - num_above) - 1
    # Scattered stores take another layout: 16 bits a key is what then goes through shared memory.
    place = tl.where(selected, place, -1).to(tl.int16).to(tl.int32)
    winners = winners_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * k
    tl.store(winners + place, position, mask=place >= 0)

    num_selected = tl.sum(tl.where(selected, 1, 0), axis=0)
    for first in range(0, k, FILL):
        empty = first + tl.arange(0, FILL)
        tl.store(winners + empty, tl.full((FILL,), -1, tl.int32), mask=(empty >= num_selected) & (empty < k))


@triton.jit
def best_of_blocks_kernel(
    scores_ptr,
    visible_start_ptr,
    visible_stop_ptr,
    best_ptr,
    queries,
    positions,
    blocks,
    score_batch_stride,
    score_query_stride,
    start_batch_stride,
    start_query_stride,
    stop_batch_stride,
    stop_query_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """best [rows, blocks]: each block's best visible score; -inf for the newest block, which stays anyway."""
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // queries, row % queries
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, PADDED_SIZE)[None, :]
    position = block[:, None] * BLOCK_SIZE + within
    stop = tl.load(visible_stop_ptr + batch * stop_batch_stride + query * stop_query_stride)
    visible = (within < BLOCK_SIZE) & (position < tl.minimum(stop, positions))
    if HAS_START:
        start = tl.load(visible_start_ptr + batch * start_batch_stride + query * start_query_stride)
        visible = visible & (position >= start)
    row_scores = scores_ptr + batch * score_batch_stride + query * score_query_stride
    score = tl.load(row_scores + position, mask=visible, other=-float("inf"))
    best = tl.max(tl.where(score == score, score, -float("inf")), axis=1)
    best = tl.where(block == _newest_block(stop, BLOCK_SIZE), -float("inf"), best)
    tl.store(best_ptr + row * blocks + block, best, mask=block < blocks)


@triton.jit
def mark_blocks_kernel(
    kept_ptr,
    visible_stop_ptr,
    marks_ptr,
    queries,
    positions,
    k,
    stop_batch_stride,
    stop_query_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Set marks [rows, positions], bool, in the kept blocks [rows, k] (-1: none) and in the newest one."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    stop = tl.load(visible_stop_ptr + (row // queries) * stop_batch_stride + (row % queries) * stop_query_stride)
    block = tl.load(kept_ptr + row * k + entry, mask=entry < k, other=-1)
    block = tl.where(entry == k, _newest_block(stop, BLOCK_SIZE), block)
    within = tl.arange(0, PADDED_SIZE)[None, :]
    position = block[:, None] * BLOCK_SIZE + within
    inside = (block >= 0)[:, None] & (within < BLOCK_SIZE) & (position < positions)
    ones = tl.full((BLOCKS, PADDED_SIZE), 1, tl.int1)
    tl.store(marks_ptr + row * positions + position, ones, mask=inside)


@triton.jit
def _newest_block(stop, BLOCK_SIZE: tl.constexpr):
    return tl.where(stop > 0, (stop - 1) // BLOCK_SIZE, -1)


@triton.jit
def _ordered_keys(score, allowed):
    """int32 keys in the order of the scores; one below all others where not allowed, for NaN and for -inf."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(allowed & (score > -float("inf")), keys, _EXCLUDED)


@triton.jit
def _kth_best_key(keys, k, WAYS: tl.constexpr):
    """The k-th largest of keys; the least one that is not excluded where there are fewer than k."""
    low = tl.min(tl.where(keys > _EXCLUDED, keys, _LARGEST), axis=0)
    high = tl.max(keys, axis=0)
    count = tl.sum(tl.where(keys > _EXCLUDED, 1, 0), axis=0)
    # At least k keys are >= low (or all are), fewer than k are > high.
    while (count > k) & (low < high):
        if WAYS == 2:
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            reached = tl.sum(tl.where(keys >= middle, 1, 0), axis=0)
            enough = reached >= k
            low = tl.where(enough, middle, low)
            count = tl.where(enough, reached, count)
            high = tl.where(enough, high, middle - 1)
        else:
            # Three counts at once, in 16 bits each: half the rounds, and a round is mostly a wait for all warps.
            wide_low = low.to(tl.int64)
            span = high.to(tl.int64) - wide_low
            first = (wide_low + ((span + 3) >> 2)).to(tl.int32)
            second = (wide_low + ((2 * span + 3) >> 2)).to(tl.int32)
            third = (wide_low + ((3 * span + 3) >> 2)).to(tl.int32)
            reached = tl.where(keys >= first, 1, 0).to(tl.int64)
            reached += tl.where(keys >= second, 1, 0).to(tl.int64) << 16
            reached += tl.where(keys >= third, 1, 0).to(tl.int64) << 32
            counts = tl.sum(reached, axis=0)
            reach_first = (counts & 0xFFFF).to(tl.int32)
            reach_second = ((counts >> 16) & 0xFFFF).to(tl.int32)
            reach_third = (counts >> 32).to(tl.int32)
            high = tl.where(reach_third >= k, high, third - 1)
            high = tl.where(reach_second >= k, high, second - 1)
            high = tl.where(reach_first >= k, high, first - 1)
            low = tl.where(reach_first >= k, first, low)
            count = tl.where(reach_first >= k, reach_first, count)
            low = tl.where(reach_second >= k, second, low)
            count = tl.where(reach_second >= k, reach_second, count)
            low = tl.where(reach_third >= k, third, low)
            count = tl.where(reach_third >= k, reach_third, count)
    return low
