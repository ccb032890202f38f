"""Where the window of a query lies in a cache's ring followed by the step's own keys."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from csa2_compiled import masks


def concatenated(past: int, num_tokens: int, ring_size: int) -> list[int | None]:
    """The position that stands in each row of ring, spare row and fresh keys; None where none does."""
    rows: list[int | None] = [None] * (ring_size + 1)
    for position in range(past):
        rows[position % ring_size] = position  # a newer one overwrites
    return rows + list(range(past, past + num_tokens))


@given(
    pasts=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    num_tokens=st.integers(1, 12),
    window=st.integers(1, 9),
    more=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_every_slot_holds_the_position_it_should(pasts, num_tokens, window, more):
    """The rows that the indices name hold the newest `window` positions up to each query, newest first."""
    ring_size = max(window - 1 + more, 1)
    indices = masks.cached_window_indices(torch.tensor(pasts), num_tokens, window, ring_size + 1)
    assert indices.dtype == torch.int32
    assert indices.shape == (len(pasts), num_tokens, window)
    for row, past in enumerate(pasts):
        keys = concatenated(past, num_tokens, ring_size)
        for query in range(num_tokens):
            slots = indices[row, query].tolist()
            positions = [keys[slot] if slot >= 0 else None for slot in slots]
            newest_first = list(range(past + query, max(past + query - window, -1), -1))
            assert positions == newest_first + [None] * (window - len(newest_first))
            assert ring_size not in slots  # the spare row


@given(
    pasts=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    num_tokens=st.integers(1, 9),
    window=st.integers(1, 9),
    more=st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_a_ring_that_holds_a_short_step_has_every_slot(pasts, num_tokens, window, more):
    """Of as many tokens as overwrite none that the step's first query sees."""
    ring_size = max(window - 1 + more, 1)
    num_tokens = min(num_tokens, ring_size + 1 - window)
    assume(num_tokens > 0)  # a ring without room for a step
    indices = masks.cached_window_indices(torch.tensor(pasts), num_tokens, window, ring_size + 1, written=True)
    for row, past in enumerate(pasts):
        ring = concatenated(past + num_tokens, 0, ring_size)
        for query in range(num_tokens):
            positions = [ring[slot] if slot >= 0 else None for slot in indices[row, query].tolist()]
            newest_first = list(range(past + query, max(past + query - window, -1), -1))
            assert positions == newest_first + [None] * (window - len(newest_first))


@given(past=st.integers(0, 20), counts=st.lists(st.integers(0, 6), min_size=1, max_size=3), window=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_padded_queries_see_nothing_and_others_what_they_saw(past, counts, window):
    tokens = 6
    real = torch.arange(tokens) < torch.tensor(counts).unsqueeze(1)
    starts = torch.where(real, 0, tokens).to(torch.int32)
    pasts = torch.full((len(counts),), past)
    padded = masks.cached_window_indices(pasts, tokens, window, window + 1, starts)
    whole = masks.cached_window_indices(pasts, tokens, window, window + 1)
    assert padded.dtype == torch.int32
    assert torch.equal(padded[real], whole[real])
    assert (padded[~real] == -1).all()


@pytest.mark.parametrize("window", [1, 4])
def test_an_empty_past_is_the_window_of_a_prefill(window):
    ring_rows = window + 3
    cached = masks.cached_window_indices(torch.zeros(1, dtype=torch.int64), 10, window, ring_rows)
    whole = masks.window_indices(10, window, torch.device("cpu"))
    assert torch.equal(cached, torch.where(whole >= 0, whole + ring_rows, -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ring_and_fresh_by_hand(dtype):
    """A ring of 4 rows and a spare one, 6 tokens before the step: row 5 is the step's first token."""
    positions, past = torch.tensor([2, 3, 4, 5, 6, 7, 9], dtype=dtype), torch.tensor([6], dtype=dtype)
    rows = masks.ring_and_fresh(positions, past, 5)
    assert rows.dtype == dtype
    assert rows.tolist() == [2, 3, 0, 1, 5, 6, 8]


def test_ring_and_fresh_broadcasts_over_rows():
    positions = torch.tensor([[[0, 1], [2, 3]], [[2, 3], [4, 5]]])  # groups of two
    rows = masks.ring_and_fresh(positions, torch.tensor([3, 2])[:, None, None], 4)
    assert rows.tolist() == [[[0, 1], [2, 4]], [[4, 5], [6, 7]]]
