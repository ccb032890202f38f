"""What layers hand to the layers after them."""

from dataclasses import dataclass

from torch import Tensor

from csa2_compiled.rows import Rows, read_rows


@dataclass(frozen=True)
class Publication:
    """What the nearest source of one compress ratio published.

    compressed_kv: [B, T, D], after RoPE and quantization. index_keys: [B, T, Di], likewise.
    topk_indices: int32 [B, S, min(K, T)], ascending compressed positions, -1 behind them.
    candidates: bool [B, S, T], or None before the candidate source.
    With a cache, compressed_kv and index_keys are views of its rows, packed if it is, and T may count rows that are
    not filled yet, which no query sees.
    """

    compress_ratio: int
    compressed_kv: Rows
    index_keys: Rows
    topk_indices: Tensor
    candidates: Tensor | None = None


@dataclass(frozen=True)
class CSA2State:
    """Immutable state that goes from layer to layer within one model step.

    A fresh ``CSA2State()`` goes into the first layer. ``publications`` holds one entry a compress ratio,
    the latest first; the properties speak of the latest, None before there is one.
    """

    publications: tuple[Publication, ...] = ()

    def of_ratio(self, compress_ratio: int) -> Publication | None:
        """The latest publication of that ratio, if any."""
        for publication in self.publications:
            if publication.compress_ratio == compress_ratio:
                return publication
        return None

    def publish(self, publication: Publication) -> "CSA2State":
        """A new state in which `publication` is the latest and replaces the one of its ratio."""
        others = tuple(p for p in self.publications if p.compress_ratio != publication.compress_ratio)
        return CSA2State((publication, *others))

    @property
    def compressed_kv(self) -> Tensor | None:
        return read_rows(self.publications[0].compressed_kv) if self.publications else None

    @property
    def index_keys(self) -> Tensor | None:
        return read_rows(self.publications[0].index_keys) if self.publications else None

    @property
    def topk_indices(self) -> Tensor | None:
        return self.publications[0].topk_indices if self.publications else None

    @property
    def candidates(self) -> Tensor | None:
        return self.publications[0].candidates if self.publications else None


@dataclass(frozen=True)
class CSA2Output:
    """hidden_states: [B, S, hidden_size] in the input's dtype; state: for the next layer."""

    hidden_states: Tensor
    state: CSA2State
