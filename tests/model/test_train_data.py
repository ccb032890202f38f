"""Packing of texts: every byte once, documents apart, aligned, and the same again from the same seed."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2_compiled.tokens import check_token_arguments
from csa2_compiled.train_data import IGNORED, Batch, Position, TrainData, TrainDataError, pack, read_documents

documents_strategy = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12).filter(
    lambda documents: max(map(len, documents)) > 1
)


def epoch_batch(data: TrainData, epoch: int) -> Batch:
    batch, after = data.batch(Position(epoch), len(data.rows(epoch)))
    assert after == Position(epoch + 1)
    return batch


def windows_in(batch: Batch) -> list[bytes]:
    found = []
    for ids, documents in zip(batch.input_ids, batch.document_ids, strict=True):
        found += [bytes(ids[documents == number].tolist()) for number in range(1, int(documents.max()) + 1)]
    return found


def cut(documents: list[bytes], seq_len: int) -> list[bytes]:
    return [d[start : start + seq_len] for d in documents for start in range(0, len(d), seq_len)]


@settings(max_examples=60, deadline=None)
@given(documents_strategy, st.integers(2, 24), st.integers(1, 6), st.integers(0, 3))
def test_an_epoch_has_every_byte_once(documents: list[bytes], seq_len: int, alignment: int, epoch: int) -> None:
    data = TrainData(documents, seq_len, alignment, seed=5)
    batch = epoch_batch(data, epoch)
    assert batch.input_ids.shape == batch.document_ids.shape == (len(data.rows(epoch)), seq_len)
    assert sorted(windows_in(batch)) == sorted(cut(documents, seq_len))
    assert batch.num_bytes == sum(map(len, documents))
    assert (batch.input_ids[batch.document_ids == 0] == 0).all()
    # Monotone ids, aligned starts, no document twice: what a model checks.
    check_token_arguments(*batch.input_ids.shape, alignment, document_ids=batch.document_ids)


@settings(max_examples=60, deadline=None)
@given(documents_strategy, st.integers(2, 24), st.floats(0.01, 0.9))
def test_validation_is_apart_from_training(documents: list[bytes], seq_len: int, fraction: float) -> None:
    if sum(len(piece) > 1 for piece in cut(documents, seq_len)) < 2:
        with pytest.raises(TrainDataError, match=r"^val_fraction: .* of one window"):
            TrainData(documents, seq_len, 2, val_fraction=fraction)
        return
    data = TrainData(documents, seq_len, 2, val_fraction=fraction)
    held_out, trained = set(data.val_windows), set(data.train_windows)
    assert held_out
    assert trained
    assert not held_out & trained
    everything = sorted(held_out | trained, key=lambda window: window.start)
    assert [len(window) for window in everything] == [len(piece) for piece in cut(documents, seq_len)]
    validation = [piece for batch in data.validation_batches(3) for piece in windows_in(batch)]
    assert len(validation) == len(held_out)
    assert sorted(validation + windows_in(epoch_batch(data, 0))) == sorted(cut(documents, seq_len))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30), st.integers(1, 7))
def test_packing_overfills_no_row(lengths: list[int], seq_len: int, alignment: int) -> None:
    rows = pack(lengths, seq_len, alignment)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        start = 0
        for index in row:
            assert start + lengths[index] <= seq_len
            start += -(-lengths[index] // alignment) * alignment


def test_packing_takes_the_tightest_row() -> None:
    assert pack([10, 6, 4, 7, 3], 10, 1) == [[0], [3, 4], [1, 2]]
    assert pack([5, 4, 1], 10, 4) == [[0, 2], [1]]  # after 5 the next start is 8
    assert pack([], 10, 4) == []


def test_order_comes_from_the_seed() -> None:
    documents = [bytes([65 + i]) * (3 + i % 7) for i in range(26)]
    first, again, other = (TrainData(documents, 16, 2, seed, 0.2) for seed in (3, 3, 4))
    assert first.val_windows == again.val_windows != other.val_windows
    assert torch.equal(epoch_batch(first, 0).input_ids, epoch_batch(again, 0).input_ids)
    assert [first.rows(i) for i in range(3)] == [again.rows(i) for i in range(3)]
    assert first.rows(0) != first.rows(1)
    assert first.rows(0) != other.rows(0)


def test_batches_go_on_from_a_position_into_the_next_epochs() -> None:
    data = TrainData([bytes([i]) * 8 for i in range(5)], 8, 1)
    rows = torch.cat([epoch_batch(data, epoch).input_ids for epoch in range(3)])
    position, seen = Position(), []
    for batch_size in (3, 4, 7):
        batch, position = data.batch(position, batch_size)
        seen.append(batch.input_ids)
    assert torch.equal(torch.cat(seen), rows[:14])
    assert position == Position(2, 4)


def test_nothing_is_predicted_across_documents_or_pads() -> None:
    batch = Batch(torch.tensor([[1, 2, 3, 4, 5, 0, 6, 0]]), torch.tensor([[1, 1, 2, 2, 2, 0, 3, 0]]))
    _ = IGNORED
    assert batch.targets.tolist() == [[2, _, 4, 5, _, _, _, _]]
    assert batch.num_bytes == 6


@settings(max_examples=30, deadline=None)
@given(documents_strategy, st.integers(2, 24))
def test_targets_are_the_next_bytes_of_each_window(documents: list[bytes], seq_len: int) -> None:
    batch = epoch_batch(TrainData(documents, seq_len, 3), 0)
    predicted = [t for row in batch.targets.tolist() for t in row if t != IGNORED]
    assert len(predicted) == sum(len(piece) - 1 for piece in cut(documents, seq_len))
    assert sorted(predicted) == sorted(byte for piece in cut(documents, seq_len) for byte in piece[1:])


def test_the_fingerprint_knows_bytes_and_ends() -> None:
    def fingerprint(*documents: bytes) -> str:
        return TrainData(documents, 8, 1).fingerprint

    assert fingerprint(b"ab", b"cd") == fingerprint(b"ab", b"cd")
    assert len({fingerprint(*d) for d in ((b"ab", b"cd"), (b"abc", b"d"), (b"abcd",), (b"ab", b"ce"))}) == 4


def test_documents_end_at_separators_and_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a\fbc\f\f\xff")
    two.write_bytes(b"d--e")
    assert read_documents([one, two]) == [b"a", b"bc", b"\xff", b"d--e"]
    assert read_documents([one, two], b"--") == [b"a\fbc\f\f\xff", b"d", b"e"]
    assert read_documents([one, two], b"") == [b"a\fbc\f\f\xff", b"d--e"]


def test_texts_without_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, problem in (("none", "cannot be read"), ("", "is a directory"), ("empty", "is empty")):
        with pytest.raises(TrainDataError, match=problem) as raised:
            read_documents([tmp_path / name])
        assert raised.value.field == "text"
    for documents in ([], [b"a", b"b"]):
        with pytest.raises(TrainDataError, match="two bytes"):
            TrainData(documents, 8, 1)


def test_batches_move_to_a_device() -> None:
    batch = Batch(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)).to(torch.device("meta"))
    tensors: tuple[Tensor, Tensor] = (batch.input_ids, batch.document_ids)
    assert all(tensor.is_meta for tensor in tensors)
