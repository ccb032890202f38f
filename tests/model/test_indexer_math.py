"""Index scores, candidate blocks and selection against loops and sorts over Python floats."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2_compiled import ops
from csa2_compiled.indexer_math import (
    best_positions,
    candidate_blocks_body,
    index_scores_body,
    positions_visible,
    select_topk_body,
)

INFINITY, NAN = math.inf, math.nan
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127
many = settings(max_examples=300, deadline=None)

# Few values, so that ties abound; the ends of the scale; and any float32 at all.
score = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, SMALLEST, -SMALLEST, LARGEST, -LARGEST, INFINITY, -INFINITY, NAN]),
    st.sampled_from([0.0, -0.0, 1.0, -1.0]),
    st.floats(width=32),
)


def float32(rows: list, *shape: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(shape)


def is_selectable(value: float) -> bool:
    return value > -INFINITY  # False for NaN


def best_of(row: list[float], count: int) -> list[int]:
    """The places of the `count` best selectable values, best first, of equals the first (0.0 equals -0.0)."""
    places = [t for t, value in enumerate(row) if is_selectable(value)]
    return sorted(places, key=lambda t: (-row[t], t))[:count]


def selection(row: list[float], k: int) -> list[int]:
    picks = sorted(best_of(row, k))
    return picks + [-1] * (min(k, len(row)) - len(picks))


@st.composite
def selection_inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, int]:
    batch, queries, positions = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 12))
    count = batch * queries * positions
    scores = draw(st.lists(score, min_size=count, max_size=count))
    candidates = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count))
    shape = batch, queries, positions
    allowed = None if candidates is None else torch.tensor(candidates, dtype=torch.bool).reshape(shape)
    return float32(scores, *shape), allowed, draw(st.integers(1, 15))


@many
@given(selection_inputs())
def test_select_topk_is_a_stable_sort(inputs: tuple[Tensor, Tensor | None, int]):
    scores, candidates, k = inputs
    picks = select_topk_body(scores, candidates, k)
    assert picks.dtype == torch.int32
    assert picks.shape == (*scores.shape[:2], min(k, scores.shape[2]))
    masked = scores if candidates is None else scores.where(candidates, -INFINITY)
    for row, actual in zip(masked.flatten(0, 1).tolist(), picks.flatten(0, 1).tolist(), strict=True):
        assert actual == selection(row, k)


@many
@given(st.lists(score, min_size=1, max_size=12), st.data())
def test_best_positions_come_best_first(row: list[float], data: st.DataObject):
    k = data.draw(st.integers(1, len(row)))
    positions, allowed = best_positions(float32(row, len(row)), k)
    expected = best_of(row, k)
    assert positions[allowed].tolist() == expected
    assert allowed.tolist() == [True] * len(expected) + [False] * (k - len(expected))


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
        ([-0.0, 0.0, -0.0, 0.0], 3, [0, 1, 2]),
        ([0.0, -0.0, 1.0, -0.0], 3, [0, 1, 2]),
        ([NAN, 1.0, -NAN, -LARGEST], 3, [1, 3, -1]),
        ([-INFINITY, NAN, -INFINITY], 2, [-1, -1]),
        ([INFINITY, 1.0, INFINITY, INFINITY], 2, [0, 2]),
        ([-1.0, -2.0, -SMALLEST, -0.0], 2, [2, 3]),
        ([3.0, -INFINITY, 5.0], 9, [0, 2, -1]),
        ([], 4, []),
    ],
    ids=str,
)
def test_select_topk_by_hand(row: list[float], k: int, expected: list[int]):
    assert ops.select_topk(float32(row, 1, 1, len(row)), None, k).tolist() == [[expected]]


def test_selection_takes_ties_in_order_over_a_long_row():
    scores = torch.zeros(1, 2, 5000)
    scores[0, 1, 4000:] = 1.0
    picks = ops.select_topk(scores, None, 1500)
    assert torch.equal(picks[0, 0], torch.arange(1500, dtype=torch.int32))
    assert torch.equal(picks[0, 1, :500], torch.arange(500, dtype=torch.int32))
    assert torch.equal(picks[0, 1, 500:], torch.arange(4000, 5000, dtype=torch.int32))


def from_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def special_bits() -> list[int]:
    """Every exponent (subnormals, infinity and NaN among them) with the significands at its ends and middle."""
    significands = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF]
    parts = itertools.product((0, 1), range(256), significands)
    return [sign << 31 | exponent << 23 | significand for sign, exponent, significand in parts]


@pytest.mark.parametrize("bits", [special_bits(), [high << 16 for high in range(1 << 16)]], ids=["special", "high"])
def test_the_order_of_bits_is_the_order_of_floats(bits: list[int]):
    shuffle = torch.randperm(len(bits), generator=torch.Generator().manual_seed(0)).tolist()
    values = from_bits([bits[i] for i in shuffle])
    # Python reads the same bits as a double, and so compares subnormals however the CPU flags are set.
    row = [struct.unpack("<f", struct.pack("<I", bits[i]))[0] for i in shuffle]
    positions, allowed = best_positions(values, len(bits))
    expected = best_of(row, len(row))
    assert positions[allowed].tolist() == expected
    assert allowed.sum() == len(expected)
    ordered = [row[t] for t in expected]
    assert all(before >= after for before, after in itertools.pairwise(ordered))


def test_neighbouring_floats_are_told_apart():
    bits = special_bits()
    values = from_bits(bits)
    above = torch.nextafter(values, torch.full_like(values, INFINITY))
    apart = above > values
    assert apart.sum() > 4000  # all but NaN and +inf; -0.0 has the smallest subnormal above it
    pairs = torch.stack([values[apart], above[apart]], dim=-1)
    assert best_positions(pairs, 1)[0].eq(1).all()
    assert best_positions(pairs.flip(-1), 1)[0].eq(0).all()


def loop_scores(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in float64 and the sum of the magnitudes of their terms, which bounds the rounding."""
    batch, queries, heads, dim = q.shape
    scores = torch.full((batch, queries, k.shape[1]), -INFINITY, dtype=torch.float64)
    magnitudes = torch.zeros_like(scores)
    q_list, k_list, weight_list = q.double().tolist(), k.double().tolist(), weights.double().tolist()
    for b, s in itertools.product(range(batch), range(queries)):
        for t in range(max(int(start[b, s]), 0), min(int(stop[b, s]), k.shape[1])):
            total, magnitude = 0.0, 0.0
            for h in range(heads):
                terms = [q_list[b][s][h][d] * k_list[b][t][d] for d in range(dim)]
                total += max(math.fsum(terms), 0.0) * weight_list[b][s][h]
                magnitude += math.fsum(map(abs, terms)) * abs(weight_list[b][s][h])
            scores[b, s, t], magnitudes[b, s, t] = total, magnitude
    return scores, magnitudes


RANGES = {
    "prefill": ([[0] * 6] * 2, [[0, 1, 2, 3, 4, 5]] * 2),
    "documents": ([[0, 0, 2, 2, 4, 0], [0, 0, 0, 3, 3, 3]], [[1, 2, 2, 4, 5, 0], [1, 2, 3, 3, 4, 5]]),
    "nothing": ([[0] * 6] * 2, [[0] * 6] * 2),
    "everything": ([[0] * 6] * 2, [[9] * 6] * 2),
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("positions", [5, 1, 0])
def test_index_scores_against_a_loop(ranges: tuple[list, list], dtype: torch.dtype, positions: int):
    generator = torch.Generator().manual_seed(0)
    q = ops.quantize_dequantize(3 * torch.randn(2, 6, 3, 32, generator=generator), "mxfp4").to(dtype)
    k = ops.quantize_dequantize(torch.randn(2, positions, 32, generator=generator), "mxfp4").to(dtype)
    q[:, ::3] = 0  # every score of such a query is a tie
    weights = torch.randn(2, 6, 3, generator=generator)
    start, stop = (torch.tensor(x, dtype=torch.int32) for x in ranges)
    scores = index_scores_body(q, k, weights, start, stop)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    assert scores.shape == (2, 6, positions)
    expected, magnitudes = loop_scores(q, k, weights, start, stop)
    visible = expected > -INFINITY
    assert torch.equal(scores > -INFINITY, visible)
    assert torch.equal(positions_visible(positions, start, stop), visible)
    # Products of two mxfp4 values are exact in float32; 32 additions, 3 weightings and 3 sums round.
    error = (scores.double() - expected)[visible].abs()
    assert (error <= 38 * 2**-24 * magnitudes[visible]).all()


def test_index_scores_may_be_negative_and_selected():
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 3, 4)
    stop = torch.tensor([[2]], dtype=torch.int32)
    scores = ops.index_scores(q, k, torch.full((1, 1, 1), -0.5), torch.zeros_like(stop), stop)
    assert scores.tolist() == [[[-2.0, -2.0, -INFINITY]]]
    assert ops.select_topk(scores, None, 3).tolist() == [[[0, 1, -1]]]


def loop_candidates(
    row: list[float], first: int, newest: int | None, document: range, keep: int, size: int
) -> set[int]:
    """SPEC section 3 step 7 for one query: the positions of its document in the kept blocks.

    newest: the newest visible position, None if the query sees nothing.
    """
    if newest is None:
        return set()
    best: dict[int, float] = {}
    for t in range(first, newest + 1):
        if is_selectable(row[t]):
            block = (t - first) // size
            best[block] = max(best.get(block, -INFINITY), row[t])
    always = (newest - first) // size
    others = sorted(best.keys() - {always}, key=lambda block: (-best[block], block))
    kept = {always, *others[: keep - 1]}
    return {t for t in document if (t - first) // size in kept}


@st.composite
def candidate_inputs(draw: st.DrawFn, packed: bool):
    """Rows of documents of ragged length, with pad groups between, and queries that see part of one.

    Returns the arguments and, by [row][query], the positions expected, with the positions that no document has.
    """
    batch, queries, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    keep, positions = draw(st.integers(1, 4)), draw(st.integers(0, 14))
    visible_score = score.filter(lambda value: value != -INFINITY)
    scores, stops, starts, expected, pads = [], [], [], [], []
    for _ in range(batch):
        documents, row_starts, row_pads = [], [], set()
        while len(row_starts) < positions:
            at, left = len(row_starts), positions - len(row_starts)
            length = draw(st.integers(1, left)) if packed else left
            if packed and draw(st.integers(0, 3)) == 0:
                row_pads |= set(range(at, at + length))
                row_starts += [positions] * length
            else:
                documents.append(range(at, at + length))
                row_starts += [at] * length
        starts.append(row_starts)
        pads.append(row_pads)
        scores.append([])
        stops.append([])
        expected.append([])
        for _ in range(queries):
            row = [-INFINITY] * positions
            if documents and not (packed and draw(st.integers(0, 5)) == 0):
                document = draw(st.sampled_from(documents))
                first, stop = document.start, document.start + draw(st.integers(0, len(document)))
                row[first:stop] = draw(st.lists(visible_score, min_size=stop - first, max_size=stop - first))
            else:  # a padded query, or a row without positions
                document, first, stop = range(0), 0, 0
            newest = stop - 1 if stop > first else None
            scores[-1].append(row)
            stops[-1].append(stop)
            expected[-1].append(loop_candidates(row, first, newest, document, keep, size))
    group_starts = torch.tensor(starts, dtype=torch.int32).reshape(batch, positions) if packed else None
    tensor = float32(scores, batch, queries, positions)
    arguments = tensor, torch.tensor(stops, dtype=torch.int32), group_starts, keep, size
    return arguments, expected, pads


def assert_candidates(inputs) -> None:
    arguments, expected, pads = inputs
    actual = candidate_blocks_body(*arguments)
    assert actual.dtype == torch.bool
    assert actual.shape == arguments[0].shape
    for kept_row, wanted_row, nobody in zip(actual.tolist(), expected, pads, strict=True):
        for kept, wanted in zip(kept_row, wanted_row, strict=True):
            # A pad group is nobody's: no score ever stands there, and what the mask says does not matter.
            assert {t for t, flag in enumerate(kept) if flag} - nobody == wanted


@many
@given(candidate_inputs(packed=False))
def test_candidate_blocks_of_one_document(inputs):
    assert_candidates(inputs)


@many
@given(candidate_inputs(packed=True))
def test_candidate_blocks_of_packed_documents(inputs):
    assert_candidates(inputs)


@many
@given(candidate_inputs(packed=False))
def test_one_document_may_be_given_as_a_packed_row(inputs):
    (scores, stop, _, keep, size), _, _ = inputs
    starts = torch.zeros(scores.shape[0], scores.shape[2], dtype=torch.int32)
    alone = candidate_blocks_body(scores, stop, None, keep, size)
    assert torch.equal(candidate_blocks_body(scores, stop, starts, keep, size), alone)


def candidates_of(row: list[float], stop: int, keep: int, size: int, starts: list[int] | None = None) -> list[int]:
    group_starts = None if starts is None else torch.tensor([starts], dtype=torch.int32)
    visible_stop = torch.tensor([[stop]], dtype=torch.int32)
    kept = ops.candidate_blocks(float32(row, 1, 1, len(row)), visible_stop, group_starts, keep, size)
    return kept[0, 0].nonzero().flatten().tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_the_block_of_the_newest_position_stays(packed: bool):
    starts = [0] * 5 if packed else None
    assert candidates_of([9.0, 8.0, 7.0, 6.0, -5.0], 5, 1, 2, starts) == [4]
    assert candidates_of([9.0, 8.0, 7.0, 6.0, NAN], 5, 2, 2, starts) == [0, 1, 4]
    assert candidates_of([INFINITY, 8.0, INFINITY, 6.0, 0.0], 5, 1, 2, starts) == [4]
    # It reaches past the newest position.
    assert candidates_of([9.0, 8.0, 7.0, -INFINITY, -INFINITY], 3, 1, 2, starts) == [2, 3]


@pytest.mark.parametrize("packed", [False, True])
def test_a_query_that_sees_nothing_has_no_candidates(packed: bool):
    assert candidates_of([-INFINITY] * 5, 0, 2, 2, [0] * 5 if packed else None) == []


def test_a_query_before_its_document_s_first_position_has_no_candidates():
    # Its visible range is empty and stops where the document before it ends.
    assert candidates_of([-INFINITY] * 5, 3, 2, 2, [0, 0, 0, 3, 3]) == []
    assert candidates_of([-INFINITY] * 5, 5, 2, 2, [0, 0, 0, 0, 0]) == []


def test_blocks_count_from_their_document_s_start():
    starts = [0, 0, 0, 3, 3, 3, 3]
    row = [-INFINITY] * 3 + [1.0, 5.0, 0.0, 4.0]
    assert candidates_of(row, 7, 2, 2, starts) == [3, 4, 5, 6]
    assert candidates_of(row, 7, 1, 3, starts) == [6]
    assert candidates_of([1.0, 0.0, 0.0] + [-INFINITY] * 4, 3, 1, 2, starts) == [2]


def test_compiled_bodies_select_alike():
    """Inductor fuses the bits, the comparison with NaN and the -0.0 rule; it must not simplify them away."""

    def bodies(scores: Tensor, stop: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        packed = candidate_blocks_body(scores, stop, starts, 2, 2)
        alone = [candidate_blocks_body(scores, stop, None, keep, 4) for keep in (1, 3)]
        return packed, *alone, select_topk_body(scores, packed, 4), select_topk_body(scores, None, 20)

    pool = float32([0.0, -0.0, 1.0, -1.0, SMALLEST, -SMALLEST, LARGEST, INFINITY, NAN], 9)
    generator = torch.Generator().manual_seed(0)
    scores = pool[torch.randint(9, (2, 40, 11), generator=generator)]
    stop = torch.randint(12, (2, 40), dtype=torch.int32, generator=generator)
    scores = scores.where(torch.arange(11) < stop.unsqueeze(-1), -INFINITY)
    starts = torch.tensor([[0] * 11, [0] * 4 + [4] * 7], dtype=torch.int32)
    compiled = torch.compile(bodies)(scores, stop, starts)
    for actual, expected in zip(compiled, bodies(scores, stop, starts), strict=True):
        assert torch.equal(actual, expected)
