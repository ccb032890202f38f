"""What an index source selected, kept so that a recomputation of its layer replays it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """The parts of a `Publication` that have no gradient; shapes and dtypes as there.

    index_keys: [B, T, Di], or None: whoever replays the selection makes them. topk_indices: int32 [B, S, min(K, T)].
    candidates: bool [B, S, T] or None.
    """

    index_keys: Tensor | None
    topk_indices: Tensor
    candidates: Tensor | None


class SelectionRecord:
    """Empty at a layer's first run, which leaves its selection here; every later run replays that selection.

    A replay makes no scores or candidate blocks, and no index keys where the selection has them. One record serves one
    layer within one model step.
    """

    def __init__(self) -> None:
        self._selection: Selection | None = None
        self._version = 0  # of the selected positions
        self.selecting = False  # while the layer runs what a replay leaves out

    @property
    def selection(self) -> Selection | None:
        """What the first run left, or None before it. Raises RuntimeError when it was modified in place since."""
        if self._selection is not None and self._selection.topk_indices._version != self._version:
            raise RuntimeError("a recorded selection's topk_indices were modified in place; a state is immutable")
        return self._selection

    def keep(self, selection: Selection) -> None:
        """Leave a selection."""
        self._selection, self._version = selection, selection.topk_indices._version

    @contextmanager
    def skipped_by_replay(self) -> Iterator[None]:
        """Around operations that only the first run performs."""
        self.selecting = True
        try:
            yield
        finally:
            self.selecting = False
