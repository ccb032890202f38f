"""The k best positions of each row of scores, ascending, without a sort; candidate blocks by the same means.

Computes `csa2::select_topk` and `csa2::candidate_blocks` as `csa2_compiled.indexer_math` defines them: ties go
to the lower position, 0.0 and -0.0 tie, NaN and -inf are never selected, -1 fills what is left. No arithmetic
rounds, so the results are equal, not close.

A program holds up to `block` scores of a row in registers, as integers that order like the floats; where at most
half or a quarter of these are visible, a smaller body serves. It looks for the k-th best by counting the keys at
or above a guess, and stops as soon as exactly k are. The first guess is that quantile of a normal distribution with
the scores' mean and variance, the others interpolate between the counts so far, and every third one halves the
interval of keys, so that no distribution takes more than about a hundred rounds (five are usual). Then it writes
the positions of the keys above the k-th best and of the first keys equal to it, at places that one prefix sum
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
_LARGEST_BLOCK = 32768  # two counts share an integer


@dataclass(frozen=True)
class SelectTopkTiles:
    """block: scores a program holds, a power of two, at most 32768; keys_per_thread: a power of two."""

    block: int = 4096
    keys_per_thread: int = 32

    def num_warps(self, block: int) -> int:
        return min(32, max(1, block // (32 * self.keys_per_thread)))


def choose_tiles(rows: int, k: int) -> SelectTopkTiles:
    """Tiles for the k best of that many rows, from a sweep on one H200: few rows are shared by more threads."""
    block = min(_LARGEST_BLOCK, max(SelectTopkTiles.block, triton.next_power_of_2(2 * k)))
    return SelectTopkTiles(block=block, keys_per_thread=16 if rows <= 256 else 32)


@dataclass(frozen=True)
class CandidateBlocksTiles:
    """blocks: candidate blocks a program reads or marks, a power of two; select: of the selection, None to choose."""

    blocks: int = 256
    num_warps: int = 4
    select: SelectTopkTiles | None = None


def supports(k: int, num_positions: int, group_starts: Tensor | None = None, block: int = _LARGEST_BLOCK) -> bool:
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
    batch, queries, positions = scores.shape
    rows = batch * queries
    k = min(k, positions)
    tiles = tiles or choose_tiles(rows, k)
    supports(k, positions, block=tiles.block)
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
            HAS_CANDIDATES=candidates is not None,
            HAS_RANGE=visible_start is not None,
            HAS_ENTRANTS=entrants is not None,
            BLOCK=block,
            FILL=min(1024, triton.next_power_of_2(k)),
            num_warps=tiles.num_warps(block),
        )
        if blocks == 1:
            return winners
        entrants, length = winners, blocks * k
        candidates = visible_start = visible_stop = None  # winners are allowed


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
    supports(k, blocks, group_starts, tiles.select.block if tiles.select else _LARGEST_BLOCK)
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
):
    """winners [rows, blocks, k] of each block of a row's entrants [length], or of its positions themselves."""
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // queries, row % queries
    first = tl.program_id(1) * BLOCK
    last = tl.minimum(first + BLOCK, length)
    if HAS_RANGE:
        start = tl.load(visible_start_ptr + batch * start_batch_stride + query * start_query_stride)
        stop = tl.load(visible_stop_ptr + batch * stop_batch_stride + query * stop_query_stride)
        first, last = tl.maximum(first, start), tl.minimum(last, stop)
    row_scores = scores_ptr + batch * score_batch_stride + query * score_query_stride
    row_candidates = candidates_ptr
    if HAS_CANDIDATES:
        row_candidates += batch * candidate_batch_stride + query * candidate_query_stride
    row_entrants = entrants_ptr
    if HAS_ENTRANTS:
        row_entrants += row * length
    winners = winners_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * k
    if HAS_RANGE and BLOCK >= 128:
        if last - first <= BLOCK // 4:
            num_selected = _select(row_scores, row_candidates, row_entrants, winners, first, last, k, BLOCK // 4)
        elif last - first <= BLOCK // 2:
            num_selected = _select(row_scores, row_candidates, row_entrants, winners, first, last, k, BLOCK // 2)
        else:
            num_selected = _select(row_scores, row_candidates, row_entrants, winners, first, last, k, BLOCK)
    else:
        num_selected = _select(row_scores, row_candidates, row_entrants, winners, first, last, k, BLOCK)
    for first_empty in range(0, k, FILL):
        empty = first_empty + tl.arange(0, FILL)
        tl.store(winners + empty, tl.full((FILL,), -1, tl.int32), mask=(empty >= num_selected) & (empty < k))


@triton.jit
def _select(row_scores, row_candidates, row_entrants, winners, first, last, k, ENTRIES: tl.constexpr):
    """Write the k best of entries [first, last), at most ENTRIES, to winners; how many there were to write."""
    entry = first + tl.arange(0, ENTRIES)
    exists = entry < last
    if row_entrants is not None:
        position = tl.load(row_entrants + entry, mask=exists, other=-1)
        allowed = position >= 0
    else:
        position, allowed = entry, exists
    if row_candidates is not None:
        allowed = allowed & (tl.load(row_candidates + position, mask=allowed, other=0) != 0)
    score = tl.load(row_scores + position, mask=allowed, other=-float("inf"))
    keys = _ordered_keys(score, allowed)

    threshold = _kth_best_key(keys, k)
    above, equal = keys > threshold, (keys == threshold) & (keys > _EXCLUDED)
    # Both counts in one prefix sum, the equal ones in the upper half.
    counts = tl.cumsum(tl.where(above, 1, 0) + tl.where(equal, 1 << 16, 0), axis=0)
    num_above = tl.sum(tl.where(above, 1, 0), axis=0)
    above_so_far, equal_so_far = counts & 0xFFFF, (counts >> 16) & 0xFFFF
    selected = above | (equal & (equal_so_far <= k - num_above))
    place = above_so_far + tl.minimum(equal_so_far, k - num_above) - 1
    # Scattered stores take another layout: 16 bits a key is what then goes through shared memory.
    place = tl.where(selected, place, -1).to(tl.int16).to(tl.int32)
    tl.store(winners + place, position, mask=place >= 0)
    return tl.sum(tl.where(selected, 1, 0), axis=0)


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
def _value_of(key):
    """The float that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(value):
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kth_best_key(keys, k):
    """The k-th largest of keys; the least one that is not excluded where there are fewer than k."""
    allowed = keys > _EXCLUDED
    low = tl.min(tl.where(allowed, keys, _LARGEST), axis=0)
    high = tl.max(keys, axis=0)
    count = tl.sum(tl.where(allowed, 1, 0), axis=0)
    # count >= k keys (or all there are) are >= low, above < k are > high.
    above = 0
    guess = low
    if count > k:
        values = tl.where(allowed, _value_of(keys), 0.0)
        mean = tl.sum(values, axis=0) / count
        variance = tl.sum(values * values, axis=0) / count - mean * mean
        guess = _key_of(mean + tl.sqrt(tl.maximum(variance, 0.0)) * _normal_quantile(k / count))
    rounds = 0
    while (count > k) & (low < high):
        # Any guess in (low, high] is right, also one that overflow or NaN has led to.
        guess = tl.minimum(tl.maximum(guess, low + 1), high)
        reached = tl.sum(tl.where(keys >= guess, 1, 0), axis=0)
        enough = reached >= k
        low = tl.where(enough, guess, low)
        count = tl.where(enough, reached, count)
        high = tl.where(enough, high, guess - 1)
        above = tl.where(enough, above, reached)
        rounds += 1
        from_low = _value_of(low)
        part = (count - k).to(tl.float32) / (count - above).to(tl.float32)
        between = _key_of(from_low + (_value_of(high) - from_low) * part)
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        guess = tl.where(rounds % 3 == 0, middle, between)
    return low


@triton.jit
def _normal_quantile(share):
    """z that a normally distributed value exceeds with probability share, to 5e-4 (Abramowitz and Stegun, 26.2.23)."""
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return tl.where(share <= 0.5, z, -z)
