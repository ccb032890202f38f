"""Bytes of text files as packed rows: documents cut into windows, windows packed without crossing one another."""

import hashlib
import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that no loss counts
FORM_FEED = b"\f"


class TrainDataError(ValueError):
    """A text that cannot be trained on; `field` names what to change, the message begins with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


@dataclass(frozen=True)
class Window:
    """Bytes start to stop (exclusive) of all documents one after another; part of one document."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Position:
    """Where the data goes on: the next row of an epoch."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Batch:
    """Packed rows: input_ids int64 [B, S], document_ids int64 [B, S] (1, 2, ... along a row, 0 pad)."""

    input_ids: Tensor
    document_ids: Tensor

    @property
    def targets(self) -> Tensor:
        """The next byte where it belongs to the same document, else IGNORED: int64 [B, S]."""
        following = F.pad(self.input_ids[:, 1:], (0, 1), value=0)
        same = F.pad(self.document_ids[:, 1:], (0, 1), value=0) == self.document_ids
        return torch.where(same & (self.document_ids != 0), following, IGNORED)

    @property
    def num_bytes(self) -> int:
        """Bytes of text, pads left out."""
        return int((self.document_ids != 0).sum())

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(self.input_ids.to(device), self.document_ids.to(device))


def read_documents(paths: Sequence[Path], separator: bytes = FORM_FEED) -> list[bytes]:
    """The documents of some files: what stands between separators, which belong to none; empty ones are left out.

    separator: b"" makes each file one document. The files are held in memory. Raises TrainDataError.
    """
    documents: list[bytes] = []
    for path in paths:
        if path.is_dir():
            raise TrainDataError("text", f"{path} is a directory; a file is needed")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TrainDataError("text", f"{path} cannot be read: {error.strerror}") from error
        if not data:
            raise TrainDataError("text", f"{path} is empty; at least one byte is needed")
        documents += [part for part in (data.split(separator) if separator else [data]) if part]
    return documents


def pack(lengths: Sequence[int], seq_len: int, alignment: int) -> list[list[int]]:
    """Which of the pieces share a row: indices into `lengths`, in their order within each row.

    Each piece lies whole in one row of seq_len and starts at a multiple of `alignment`. Best fit, the longest first;
    pieces of one length stay in the order given.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room left from the next aligned start, row; ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(free, (lengths[index], -1))
        room, row = free.pop(place) if place < len(free) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room -= -(-lengths[index] // alignment) * alignment
        if room > 0:
            insort(free, (room, row))
    return rows


class TrainData:
    """Windows of some documents, a share of them held out, in an order that a seed fixes.

    Documents are cut into windows of at most seq_len bytes. A window's first byte is never predicted. Every epoch has
    each training window once, in rows packed and ordered anew from seed and epoch.
    """

    def __init__(
        self, documents: Sequence[bytes], seq_len: int, alignment: int, seed: int = 0, val_fraction: float = 0.0
    ) -> None:
        """alignment: starts of documents, from `group_alignment`. val_fraction: share of windows held out, at least
        one window unless it is 0. Raises TrainDataError."""
        odd = next((type(document).__name__ for document in documents if not isinstance(document, bytes)), None)
        if odd is not None:
            raise TrainDataError("documents", f"they hold an object of type {odd}; each must be bytes")
        if max(map(len, documents), default=0) < 2:
            raise TrainDataError("text", "no document has two bytes; there is nothing to predict")
        self.seq_len, self.alignment, self.seed = seq_len, alignment, seed
        self._text = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
        self.fingerprint = _fingerprint(documents)
        windows = _windows(documents, seq_len)
        held_out = self._held_out(windows, val_fraction)
        self.val_windows = tuple(windows[i] for i in sorted(held_out))
        self.train_windows = tuple(window for i, window in enumerate(windows) if i not in held_out)
        self._epoch_rows = lru_cache(maxsize=2)(self._pack_epoch)

    def rows(self, epoch: int) -> list[list[Window]]:
        """The rows of an epoch, in order; the same for the same seed."""
        return self._epoch_rows(epoch)

    def batch(self, position: Position, batch_size: int) -> tuple[Batch, Position]:
        """The next `batch_size` rows, going on into the next epochs, and the position after them."""
        rows: list[list[Window]] = []
        epoch, row = position.epoch, position.row
        while len(rows) < batch_size:
            taken = self.rows(epoch)[row : row + batch_size - len(rows)]
            rows += taken
            row += len(taken)
            if row >= len(self.rows(epoch)):
                epoch, row = epoch + 1, 0
        return self._batch(rows, batch_size), Position(epoch, row)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out windows, always the same; the last batch is filled up with rows of pads."""
        return self.batches_of(self.val_windows, batch_size)

    def batches_of(self, windows: Sequence[Window], batch_size: int) -> Iterator[Batch]:
        """Some windows once, packed; the last batch is filled up with rows of pads."""
        rows = self._pack(windows)
        for first in range(0, len(rows), batch_size):
            yield self._batch(rows[first : first + batch_size], batch_size)

    def _pack_epoch(self, epoch: int) -> list[list[Window]]:
        order = random.Random(f"{self.seed} epoch {epoch}")
        windows = order.sample(self.train_windows, len(self.train_windows))
        rows = self._pack(windows)
        order.shuffle(rows)
        return rows

    def _pack(self, windows: Sequence[Window]) -> list[list[Window]]:
        lengths = [len(window) for window in windows]
        return [[windows[i] for i in row] for row in pack(lengths, self.seq_len, self.alignment)]

    def _held_out(self, windows: list[Window], val_fraction: float) -> set[int]:
        """Indices of the validation windows. Of those with two bytes or more, one remains for training."""
        useful = [i for i, window in enumerate(windows) if len(window) > 1]
        if val_fraction == 0:
            return set()
        if len(useful) < 2:
            raise TrainDataError(
                "val_fraction",
                f"{val_fraction:g} of one window is asked for; give more text, a smaller seq_len, or 0 for none",
            )
        count = min(max(1, math.floor(val_fraction * len(windows))), len(useful) - 1)
        return set(random.Random(f"{self.seed} validation").sample(useful, count))

    def _batch(self, rows: Sequence[Sequence[Window]], batch_size: int) -> Batch:
        input_ids = torch.zeros(batch_size, self.seq_len, dtype=torch.int64)
        document_ids = torch.zeros_like(input_ids)
        for row, windows in enumerate(rows):
            start = 0
            for number, window in enumerate(windows, 1):
                stop = start + len(window)
                input_ids[row, start:stop] = self._text[window.start : window.stop]
                document_ids[row, start:stop] = number
                start = -(-stop // self.alignment) * self.alignment
        return Batch(input_ids, document_ids)


def _windows(documents: Sequence[bytes], seq_len: int) -> list[Window]:
    windows: list[Window] = []
    first = 0
    for document in documents:
        end = first + len(document)
        windows += [Window(start, min(start + seq_len, end)) for start in range(first, end, seq_len)]
        first = end
    return windows


def _fingerprint(documents: Sequence[bytes]) -> str:
    """SHA-256 of the documents and where they end."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return digest.hexdigest()
