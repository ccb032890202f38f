"""What FlexAttention is told in both layouts, against SPEC section 3.9 in plain Python sets."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from csa2_compiled import masks, ops
from csa2_compiled.masks.block_mask import slot_block_counts
from csa2_compiled.masks.layout import KEY_BLOCK
from csa2_compiled.sparse_attention import (
    SLOT_KEY_BLOCK,
    dense_block_mask,
    slot_block_mask,
    visible_keys,
    with_sink_slot,
)
from csa2_compiled.tokens import check_token_arguments, group_alignment, lay_out_tokens

HEADS = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A call as plain Python: every token's document id (0 is a pad) and selected positions."""

    form: str
    documents: list[list[int]]
    ratio: int
    window: int
    topk: int
    selected: list[list[list[int]]]

    @property
    def batch(self) -> int:
        return len(self.documents)

    @property
    def tokens(self) -> int:
        return len(self.documents[0])

    @property
    def compressed(self) -> int:
        return self.tokens // self.ratio if self.ratio else 0

    @property
    def sink_key(self) -> int:
        return self.tokens + self.compressed

    def seen(self, row: int, query: int) -> list[int]:
        """Keys of the query: own document's newest tokens, itself included, its selection, and the sink."""
        ids = self.documents[row]
        window = [
            token
            for token in range(max(query - self.window + 1, 0), query + 1)
            if ids[query] != 0 and ids[token] == ids[query]
        ]
        return [*window, *(self.tokens + t for t in self.selected[row][query]), self.sink_key]

    def starts(self) -> Tensor | None:
        ids = torch.tensor(self.documents)
        arguments = {
            "whole": {},
            "padded": {"attention_mask": (ids != 0).long()},
            "packed": {"document_ids": ids},
            "packed and padded": {"document_ids": ids, "attention_mask": ids != 0},
        }[self.form]
        check_token_arguments(self.batch, self.tokens, group_alignment((self.ratio,)), **arguments)
        return lay_out_tokens(self.tokens, CPU, **arguments).starts

    def topk_indices(self) -> Tensor | None:
        """int32 [B, S, min(K, T)], ascending, -1 behind; None in a window layer."""
        if self.ratio == 0:
            return None
        width = min(self.topk, self.compressed)
        rows = [[picks + [-1] * (width - len(picks)) for picks in row] for row in self.selected]
        return torch.tensor(rows, dtype=torch.int32).view(self.batch, self.tokens, width)

    def visible(self) -> Tensor:
        recent = masks.window_indices(self.tokens, self.window, CPU, self.starts())
        return visible_keys(recent.expand(self.batch, -1, -1), self.topk_indices())

    def dense(self) -> BlockMask:
        return dense_block_mask(self.visible(), self.topk_indices(), self.compressed, self.window, self.starts())

    def slots(self) -> Tensor:
        return with_sink_slot(self.visible())


def random_documents(rng: random.Random, form: str, tokens: int, ratio: int) -> list[int]:
    if form == "whole":
        return [1] * tokens
    if form == "padded":
        length = rng.randint(0, tokens)
        return [1] * length + [0] * (tokens - length)
    ids, start, document = [0] * tokens, 0, 0
    alignment = max(ratio, 1)
    while start < tokens:
        stop = rng.randint(start + 1, tokens)
        next_start = -(-stop // alignment) * alignment
        if form == "packed and padded":
            # An attention mask allows pads at the end only, so documents fill their groups.
            stop = min(next_start, tokens)
        document += rng.randint(1, 3)
        ids[start:stop] = [document] * (stop - start)
        start = next_start
        if form == "packed":
            start += rng.choice([0, 0, alignment])
        elif rng.random() < 0.2:
            break
    return ids


def random_selection(rng: random.Random, ids: list[int], ratio: int, topk: int) -> list[list[int]]:
    """Some of the compressed positions that each token may see, at most ``topk``, ascending."""
    selection = []
    for query, document in enumerate(ids):
        if document == 0 or ratio == 0:
            selection.append([])
            continue
        start = ids.index(document)
        visible = range(start // ratio, start // ratio + (query - start + 1) // ratio)
        most = min(topk, len(visible))
        count = rng.choice([most, most, rng.randint(0, most)])
        selection.append(sorted(rng.sample(visible, count)))
    return selection


@st.composite
def cases(draw, min_tokens: int = 1, max_tokens: int = 40, max_window: int = 12, max_topk: int = 8) -> Case:
    form = draw(st.sampled_from(["whole", "padded", "packed", "packed and padded"]))
    tokens, ratio = draw(st.integers(min_tokens, max_tokens)), draw(st.integers(0, 4))
    topk = draw(st.integers(1, max_topk))
    rng = random.Random(draw(st.integers(0, 2**32)))
    documents = [random_documents(rng, form, tokens, ratio) for _ in range(draw(st.integers(1, 3)))]
    return Case(
        form=form,
        documents=documents,
        ratio=ratio,
        window=draw(st.integers(1, max_window)),
        topk=topk,
        selected=[random_selection(rng, ids, ratio, topk) for ids in documents],
    )


# Enough tokens and slots for several blocks of the sizes that the attention core uses.
many_blocks = cases(min_tokens=100, max_tokens=300, max_window=140, max_topk=40)


def visited(num_blocks: Tensor, indices: Tensor) -> set[tuple[int, int, int]]:
    """(row, block, other block) of all listed blocks; checks that each list is ascending."""
    blocks = set()
    for row, (row_counts, row_lists) in enumerate(zip(num_blocks[:, 0].tolist(), indices[:, 0].tolist(), strict=True)):
        for block, (count, listed) in enumerate(zip(row_counts, row_lists, strict=True)):
            assert listed[:count] == sorted(set(listed[:count]))
            blocks.update((row, block, other) for other in listed[:count])
    return blocks


def visited_blocks(block_mask: BlockMask) -> set[tuple[int, int, int]]:
    """(row, query block, key block) of all that FlexAttention visits, partial blocks and full ones."""
    blocks = visited(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is not None:
        blocks |= visited(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return blocks


def mask_of(block_mask: BlockMask, rows: int, heads: int = 1) -> Tensor:
    """The mask as FlexAttention applies it, bool [rows, heads, queries, keys]: the mod in visited blocks."""
    queries, keys = block_mask.seq_lengths
    query_block, key_block = block_mask.BLOCK_SIZE
    inside = torch.zeros(rows, 1, queries, keys, dtype=torch.bool)
    for row, i, j in visited_blocks(block_mask):
        inside[row, :, i * query_block : (i + 1) * query_block, j * key_block : (j + 1) * key_block] = True
    return create_mask(block_mask.mask_mod, rows, heads, queries, keys, device="cpu") & inside


def check_occupancy(block_mask: BlockMask, rows: int) -> None:
    """Compare the visited blocks with those that hold a pair of the full boolean mask."""
    queries, keys = block_mask.seq_lengths
    golden = create_block_mask(
        block_mask.mask_mod, rows, None, queries, keys, device="cpu", BLOCK_SIZE=block_mask.BLOCK_SIZE
    )
    assert block_mask.shape == golden.shape
    assert block_mask.kv_indices.shape == golden.kv_indices.shape
    assert block_mask.full_kv_num_blocks is None
    assert visited_blocks(block_mask) == visited_blocks(golden)
    assert block_mask.q_indices is None  # only gradients walk the other way round


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_dense_mask_is_the_set_of_the_spec(case):
    mask = mask_of(case.dense(), case.batch, heads=HEADS)
    assert mask.shape == (case.batch, HEADS, case.tokens, case.sink_key + 1)
    assert torch.equal(mask, mask[:, :1].expand_as(mask)), "all heads see the same keys"
    for row in range(case.batch):
        for query in range(case.tokens):
            assert mask[row, 0, query].nonzero().flatten().tolist() == case.seen(row, query), (row, query)


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_slots_hold_every_key_of_the_spec_once(case):
    slots = case.slots()
    mask = mask_of(slot_block_mask(slots, HEADS), case.batch * case.tokens)
    # Every key's value tells its number, and 0, an empty slot's value, stands for the sink's zeros.
    numbers = torch.arange(1, case.sink_key + 1, dtype=torch.float32)
    values = ops.gather_kv(numbers.view(1, -1, 1).expand(case.batch, -1, 1), slots)
    values = values.view(case.batch * case.tokens, -1)
    assert mask.shape == (case.batch * case.tokens, 1, HEADS, slots.shape[-1])
    assert torch.equal(mask, mask[:, :, :1].expand_as(mask)), "all heads see the same slots"
    for row in range(case.batch):
        for query in range(case.tokens):
            token_row = row * case.tokens + query
            seen = values[token_row][mask[token_row, 0, 0]].long().tolist()
            expected = [0, *(key + 1 for key in case.seen(row, query)[:-1])]
            assert sorted(seen) == expected, (row, query)


@given(case=many_blocks)
@settings(max_examples=15, deadline=None)
def test_masks_of_many_blocks_are_the_set_of_the_spec(case):
    dense = mask_of(case.dense(), case.batch)
    slots = case.slots()
    filled = mask_of(slot_block_mask(slots, HEADS), case.batch * case.tokens)[:, 0, 0]
    filled = filled.view(case.batch, case.tokens, -1)
    for row in range(case.batch):
        for query in range(case.tokens):
            expected = case.seen(row, query)
            assert dense[row, 0, query].nonzero().flatten().tolist() == expected
            seen = slots[row, query][filled[row, query]].tolist()
            assert sorted(seen) == [-1, *expected[:-1]]


@given(case=many_blocks)
@settings(max_examples=15, deadline=None)
def test_dense_visits_exactly_the_occupied_blocks(case):
    block_mask = case.dense()
    assert block_mask.BLOCK_SIZE == (KEY_BLOCK, KEY_BLOCK)
    check_occupancy(block_mask, case.batch)


@given(case=cases(max_tokens=24, max_window=140, max_topk=80))
@settings(max_examples=40, deadline=None)
def test_slots_visit_exactly_the_occupied_blocks(case):
    block_mask = slot_block_mask(case.slots(), HEADS)
    assert block_mask.BLOCK_SIZE == (KEY_BLOCK, SLOT_KEY_BLOCK)
    check_occupancy(block_mask, case.batch * case.tokens)


@pytest.mark.parametrize(("query_block", "key_block"), [(1, 1), (3, 5), (7, 4), (8, 16), (16, 8), (128, 2)])
@given(case=cases())
@settings(max_examples=20, deadline=None)
def test_any_block_size(case, query_block, key_block):
    """Most of these sizes divide neither the number of queries nor that of keys."""
    sink = torch.full((case.batch, case.tokens, 1), case.sink_key, dtype=torch.int32)
    num_keys = case.sink_key + 1
    counts = masks.block_pair_counts(torch.cat([case.visible(), sink], dim=-1), num_keys, query_block, key_block)
    expected = torch.zeros_like(counts)
    for row in range(case.batch):
        for query in range(case.tokens):
            for key in case.seen(row, query):
                expected[row, query // query_block, key // key_block] += 1
    assert counts.dtype == torch.int32
    assert torch.equal(counts, expected)
    block_mask = masks.block_mask_from_counts(
        counts, case.dense().mask_mod, case.tokens, num_keys, query_block, key_block
    )
    check_occupancy(block_mask, case.batch)


@given(
    filled=st.integers(1, 70).flatmap(
        lambda slots: st.lists(st.lists(st.booleans(), min_size=slots, max_size=slots), min_size=1, max_size=4)
    ),
    key_block=st.sampled_from([1, 3, 16, 64]),
)
@settings(max_examples=60, deadline=None)
def test_slot_block_counts(filled, key_block):
    counts = slot_block_counts(torch.tensor(filled), key_block)
    assert counts.dtype == torch.int32
    blocks = range(0, len(filled[0]), key_block)
    assert counts.tolist() == [[[sum(row[at : at + key_block]) for at in blocks]] for row in filled]


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor had that was made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("form", ["whole", "packed"])
def test_no_tensor_of_queries_times_keys(form):
    rng = random.Random(0)
    tokens, ratio, window, topk = 2048, 1, 16, 32
    documents = random_documents(rng, form, tokens, ratio)
    selected = random_selection(rng, documents, ratio, topk)
    case = Case(form, [documents], ratio, window, topk, [selected])
    starts, topk_indices = case.starts(), case.topk_indices()

    with LargestTensor() as made:
        recent = masks.window_indices(tokens, window, CPU, starts)
        visible = visible_keys(recent, topk_indices)
        dense = dense_block_mask(visible, topk_indices, case.compressed, window, starts)
        slots = slot_block_mask(with_sink_slot(visible), HEADS)
    # The slots of all queries, and the bit sets: queries times keys / 32.
    assert made.numel <= max(tokens * (1 + window + topk), tokens * case.compressed // 32)
    assert made.numel <= tokens * case.compressed / 16

    with LargestTensor() as made_from_mask:
        create_block_mask(dense.mask_mod, None, None, tokens, case.sink_key + 1, device="cpu")
    assert made_from_mask.numel >= tokens * case.compressed, "the recorder misses what a full mask takes"
    assert dense.sparsity() > 0
    assert slots.seq_lengths == (HEADS, 1 + window + topk)


@pytest.mark.parametrize("heads", [4, 128, 129, 256])
def test_slots_keep_all_heads_in_one_query_block(heads):
    block_mask = slot_block_mask(torch.zeros(1, 3, 65, dtype=torch.int32), heads)
    assert block_mask.BLOCK_SIZE[0] >= heads
    assert block_mask.kv_num_blocks.shape == (3, 1, 1)
