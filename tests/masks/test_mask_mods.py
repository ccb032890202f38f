"""Each mask and score mod alone: window, documents, selection bits, sink, slots."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention

from csa2_compiled import masks
from csa2_compiled.masks.selection import BITS_PER_WORD

CPU = torch.device("cpu")


def unpack(words: list[int]) -> list[int]:
    """Positions of the set bits of int32 words, in ascending order."""
    return [
        word * BITS_PER_WORD + bit
        for word, value in enumerate(words)
        for bit in range(BITS_PER_WORD)
        if (value % 2**BITS_PER_WORD) >> bit & 1
    ]


@st.composite
def selections(draw) -> tuple[int, list[list[list[int]]]]:
    """(T, positions per row and query): distinct, in any order, with holes of -1 anywhere."""
    compressed = draw(st.integers(1, 140))
    width = draw(st.integers(1, min(compressed, 40)))
    some = st.lists(st.integers(0, compressed - 1), unique=True, max_size=width)
    holed = some.flatmap(lambda picks: st.permutations(picks + [-1] * (width - len(picks))))
    queries = draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(holed, min_size=queries, max_size=queries), min_size=1, max_size=2))
    return compressed, rows


@given(selection=selections(), dtype=st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=100, deadline=None)
def test_bit_set_round_trip(selection, dtype):
    compressed, rows = selection
    bits = masks.pack_selection(torch.tensor(rows, dtype=dtype), compressed)
    assert bits.dtype == torch.int32
    assert bits.shape == (len(rows), len(rows[0]), math.ceil(compressed / BITS_PER_WORD))
    for packed_row, row in zip(bits.tolist(), rows, strict=True):
        for packed, picks in zip(packed_row, row, strict=True):
            assert unpack(packed) == sorted(pick for pick in picks if pick >= 0)


@given(selection=selections(), first_key=st.integers(0, 40), behind=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_selection_mask_tests_the_bits_and_nothing_outside(selection, first_key, behind):
    compressed, rows = selection
    bits = masks.pack_selection(torch.tensor(rows, dtype=torch.int32), compressed)
    mod = masks.generate_selection_mask(bits, first_key, compressed)
    num_keys = first_key + compressed + behind
    mask = create_mask(mod, len(rows), 2, len(rows[0]), num_keys, device="cpu")
    for head in range(2):
        for row, queries in enumerate(rows):
            for query, picks in enumerate(queries):
                chosen = mask[row, head, query].nonzero().flatten().tolist()
                assert chosen == sorted(first_key + pick for pick in picks if pick >= 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("positions", "compressed", "words"),
    [
        ([0], 1, [1]),
        ([30], 31, [2**30]),
        ([31], 32, [-(2**31)]),
        ([31], 33, [-(2**31), 0]),
        ([32], 33, [0, 1]),
        ([63], 64, [0, -(2**31)]),
        ([31, 32, 63], 70, [-(2**31), 1 - 2**31, 0]),
        (list(range(64)), 64, [-1, -1]),
        ([-1, -1, -1], 40, [0, 0]),
        ([5, -1, -1], 40, [32, 0]),
    ],
    ids=str,
)
def test_word_edges(positions, compressed, words, dtype):
    bits = masks.pack_selection(torch.tensor([[positions]], dtype=dtype), compressed)
    assert bits.tolist() == [[words]]
    mod = masks.generate_selection_mask(bits, 0, compressed)
    chosen = create_mask(mod, 1, 1, 1, compressed, device="cpu").flatten().nonzero().flatten().tolist()
    assert chosen == [position for position in positions if position >= 0]


def test_no_compressed_positions_pack_to_no_words():
    bits = masks.pack_selection(torch.empty(2, 3, 0, dtype=torch.int32), 0)
    assert bits.shape == (2, 3, 0)
    assert bits.dtype == torch.int32


def test_no_picks_pack_to_zeros():
    bits = masks.pack_selection(torch.empty(2, 3, 0, dtype=torch.int32), 33)
    assert torch.equal(bits, torch.zeros(2, 3, 2, dtype=torch.int32))


@given(tokens=st.integers(1, 30), window=st.integers(1, 35))
@settings(max_examples=60, deadline=None)
def test_window_indices_newest_first(tokens, window):
    indices = masks.window_indices(tokens, window, CPU)
    assert indices.dtype == torch.int32
    assert indices.shape == (1, tokens, window)
    for query, slots in enumerate(indices[0].tolist()):
        newest_first = list(range(query, max(query - window, -1), -1))
        assert slots == newest_first + [-1] * (window - len(newest_first))


@given(
    rows=st.integers(1, 24).flatmap(
        lambda tokens: st.lists(
            st.tuples(*(st.sampled_from([*range(query + 1), tokens]) for query in range(tokens))),
            min_size=1,
            max_size=3,
        )
    ),
    window=st.integers(1, 10),
)
@settings(max_examples=100, deadline=None)
def test_window_indices_stop_at_the_start(rows, window):
    """A query's start is any token up to itself, or the number of tokens when it is a pad."""
    tokens = len(rows[0])
    indices = masks.window_indices(tokens, window, CPU, torch.tensor(rows, dtype=torch.int32))
    assert indices.dtype == torch.int32
    assert indices.shape == (len(rows), tokens, window)
    for row, starts in enumerate(rows):
        for query, start in enumerate(starts):
            filled = [token for token in range(query, query - window, -1) if token >= start]
            assert indices[row, query].tolist() == filled + [-1] * (window - len(filled))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_window_mask_ends_with_the_tokens(window):
    # Queries as a tile has them: some stand behind the last token, and no key there is a token.
    tokens, queries, keys = 6, 8, 10
    mask = create_mask(masks.generate_window_mask(window, tokens), 1, 1, queries, keys, device="cpu")[0, 0]
    for query in range(queries):
        expected = list(range(max(query - window + 1, 0), min(query + 1, tokens)))
        assert mask[query].nonzero().flatten().tolist() == expected


def test_document_mask_starts_at_the_document_and_hides_padding():
    starts = torch.tensor([[0, 0, 2, 2, 5], [0, 0, 0, 5, 5]], dtype=torch.int32)
    mask = create_mask(masks.generate_document_mask(starts, 5), 2, 1, 5, 7, device="cpu")
    for row, queries in enumerate(starts.tolist()):
        for query, start in enumerate(queries):
            assert mask[row, 0, query].nonzero().flatten().tolist() == list(range(start, 5))


def test_slot_mask_is_the_filled_slots_for_every_head():
    filled = torch.tensor([[True, False, True], [True, True, False]])
    mask = create_mask(masks.generate_slot_mask(filled), 2, 1, 4, 3, device="cpu")
    assert torch.equal(mask, filled[:, None, None, :].expand(2, 1, 4, 3))


def test_sink_mask_is_one_key_for_every_query():
    mask = create_mask(masks.generate_sink_mask(4), 2, 3, 5, 6, device="cpu")
    assert torch.equal(mask, (torch.arange(6) == 4).expand(2, 3, 5, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads_are_rows", [False, True])
@pytest.mark.parametrize("sink_key", [0, 3, 6])
def test_sink_score_replaces_the_sink_key_only(sink_key, heads_are_rows, dtype):
    batch, heads, queries, keys = 2, 3, 3, 7
    sink = torch.tensor([0.3, -1.7, 20.1])
    score = torch.randn(batch, heads, queries, keys, generator=torch.Generator().manual_seed(0)).to(dtype)
    b, h, i, j = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    scored = masks.generate_sink_score(sink, sink_key, heads_are_rows)(score, b, h, i, j)
    expected = score.clone()
    for head in range(heads):
        if heads_are_rows:
            expected[:, :, head, sink_key] = sink[head].to(dtype)
        else:
            expected[:, head, :, sink_key] = sink[head].to(dtype)
    assert scored.dtype == dtype
    assert torch.equal(scored, expected)


@pytest.mark.parametrize("heads_are_rows", [False, True])
def test_sink_counts_in_the_denominator_only(heads_are_rows):
    """Through FlexAttention, with a key of zeros for the sink, against the formula of SPEC section 3.9."""
    generator = torch.Generator().manual_seed(0)
    heads, tokens, keys, dim = 4, 5, 6, 8
    q = torch.randn(tokens, heads, dim, generator=generator)
    kv = torch.randn(keys, dim, generator=generator)
    sink = torch.randn(heads, generator=generator)
    with_sink = torch.cat([torch.zeros(1, dim), kv])
    if heads_are_rows:
        query, key = q.unsqueeze(1), with_sink.expand(tokens, 1, -1, -1)
    else:
        query, key = q.transpose(0, 1).unsqueeze(0), with_sink.expand(1, heads, -1, -1)
    score_mod = masks.generate_sink_score(sink, 0, heads_are_rows)
    attended = flex_attention(query, key, key, score_mod=score_mod, scale=dim**-0.5)
    attended = attended[:, 0] if heads_are_rows else attended[0].transpose(0, 1)

    weights = torch.exp(q.double() @ kv.double().T * dim**-0.5)  # [tokens, heads, keys]
    denominator = weights.sum(-1) + sink.double().exp()
    expected = (weights / denominator.unsqueeze(-1)) @ kv.double()
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-6)


def test_mods_have_names_that_print_well():
    no_index = torch.zeros(1, 1, dtype=torch.int32)
    mods = {
        "window_128": masks.generate_window_mask(128, 4),
        "document": masks.generate_document_mask(no_index, 1),
        "selection": masks.generate_selection_mask(no_index.unsqueeze(0), 1, 1),
        "sink": masks.generate_sink_mask(1),
        "slots": masks.generate_slot_mask(no_index == 0),
    }
    assert {name: mod.__name__ for name, mod in mods.items()} == {name: name for name in mods}
    assert masks.generate_sink_score(torch.zeros(1), 0).__name__ == "sink"
