"""Where each token stands: positions, documents and padding, checked once for all layers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class CSA2InputError(ValueError):
    """A bad input; the message names the argument, what came and what is allowed."""


@dataclass(frozen=True)
class Tokens:
    """The layout of a batch of token rows.

    positions: int64 [B or 1, S], restarting in each document. starts: int32 [B, S], the index of the first
    token of each token's document (S for padding), or None when every row is one document without padding.
    past: int64 [B], the tokens each row holds in a cache, or None without one; then a row is one document.
    """

    positions: Tensor
    starts: Tensor | None = None
    past: Tensor | None = None

    @property
    def is_real(self) -> Tensor | None:
        """bool [B, S], False at padding; None when there is none."""
        return None if self.starts is None else self._is_real(self.starts)

    @staticmethod
    def _is_real(starts: Tensor) -> Tensor:
        return torch.lt(starts, starts.shape[1])

    @property
    def ends(self) -> Tensor:
        """Tokens each row holds with these, int64 [B]; there must be a cache."""
        assert self.past is not None
        return self.past + (self.positions.shape[1] if self.is_real is None else self.is_real.sum(1))

    def new_groups(self, ratio: int) -> tuple[Tensor, Tensor]:
        """The groups that these tokens can complete after the past, int64 [B, n], and whether they do, bool [B, n]."""
        assert self.past is not None
        most = -(-self.positions.shape[1] // ratio)
        groups = (self.past // ratio).unsqueeze(1) + torch.arange(most, device=self.past.device)
        return groups, (groups + 1) * ratio <= self.ends.unsqueeze(1)

    def ring_rows(self, size: int) -> Tensor:
        """Where in a ring of `size` rows each token goes, int64 [B, S]: `size` for one that is not kept."""
        assert self.past is not None
        positions = self.past.unsqueeze(1) + torch.arange(self.positions.shape[1], device=self.past.device)
        ends = self.ends.unsqueeze(1)
        return torch.where((positions < ends) & (positions >= ends - size), positions % size, size)

    def compressed_positions(self, ratio: int) -> Tensor:
        """Position j * r of every complete group, int64 [B or 1, S // ratio]; without a cache."""
        groups = self.positions.shape[1] // ratio
        return self.positions[:, : groups * ratio : ratio]

    def visible_range(self, ratio: int) -> tuple[Tensor, Tensor]:
        """First and one-past-last compressed position each query may see, int32 [B or 1, S] each."""
        complete = ((self.positions + 1) // ratio).to(torch.int32)
        if self.starts is None:
            return torch.zeros_like(complete), complete
        real = self._is_real(self.starts)
        first = torch.where(real, self.starts // ratio, 0)
        return first, torch.where(real, first + complete, 0)

    def group_starts(self, ratio: int) -> Tensor | None:
        """First compressed position of each group's document, int32 [B, S // ratio]; None: one document a row."""
        if self.starts is None or self.past is not None:
            return None
        groups = self.starts.shape[1] // ratio
        return self.starts[:, : groups * ratio : ratio] // ratio


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which no value can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def group_alignment(compress_ratios: tuple[int, ...]) -> int:
    """Documents start at multiples of this many tokens, so that no group spans two (window layers: ratio 0)."""
    return math.lcm(*(ratio or 1 for ratio in compress_ratios))


def lay_out_tokens(
    num_tokens: int,
    device: torch.device,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    past: Tensor | None = None,
) -> Tokens:
    """Positions and document starts from a padding mask or document ids (assumed checked).

    past: int64 [B], the tokens that a cache holds of each row, which these follow; not with document ids.
    """
    index = torch.arange(num_tokens, device=device)
    if past is not None:
        positions = past.unsqueeze(1) + index
        if attention_mask is None:
            return Tokens(positions, past=past)
        real = attention_mask != 0
        starts = torch.where(real, 0, num_tokens).to(torch.int32)
        return Tokens(torch.where(real, positions, 0), starts, past)
    if document_ids is not None:
        ids = document_ids  # 0 wherever the mask is
    elif attention_mask is not None:
        ids = attention_mask.to(torch.int32)
    else:
        return Tokens(index.unsqueeze(0))
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = torch.where(is_start, index, 0).cummax(dim=1).values
    positions = torch.where(ids != 0, index - starts, 0)
    return Tokens(positions, torch.where(ids != 0, starts, num_tokens).to(torch.int32))


def check_token_arguments(
    batch: int,
    num_tokens: int,
    alignment: int,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> None:
    """Refuse a padding mask or document ids that cannot be laid out.

    Reads values, so it synchronizes with the device; a compiled model runs it before the graph.
    alignment: from `group_alignment`. Raises CSA2InputError.
    """
    for name, value in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if value is None:
            continue
        if value.dim() != 2 or tuple(value.shape) != (batch, num_tokens):
            raise CSA2InputError(
                f"{name} has shape {tuple(value.shape)}; it must be [batch, tokens] = [{batch}, {num_tokens}]"
            )
        if value.is_floating_point() or value.is_complex():
            raise CSA2InputError(f"{name} has dtype {value.dtype}; it must be an integer or bool dtype")
    if attention_mask is not None:
        _check_mask_values(attention_mask)
    if attention_mask is not None and document_ids is None:
        _check_right_padding(attention_mask)
    if document_ids is not None:
        _check_document_ids(document_ids, alignment)
    if attention_mask is not None and document_ids is not None:
        unlike = (attention_mask != 0) != (document_ids != 0)
        if unlike.any():
            row, token = unlike.nonzero()[0].tolist()
            raise CSA2InputError(
                f"attention_mask and document_ids disagree at row {row}, token {token}: mask "
                f"{int(attention_mask[row, token])}, document {int(document_ids[row, token])}; "
                "a pad is 0 in both"
            )


def _check_mask_values(mask: Tensor) -> None:
    odd = (mask != 0) & (mask != 1)
    if odd.any():
        row, token = odd.nonzero()[0].tolist()
        raise CSA2InputError(
            f"attention_mask is {int(mask[row, token])} at row {row}, token {token}; it must be 1 (token) or 0 (pad)"
        )


def _check_right_padding(mask: Tensor) -> None:
    real = mask != 0
    after_pad = real[:, 1:] & ~real[:, :-1]
    if after_pad.any():
        row, token = after_pad.nonzero()[0].tolist()
        raise CSA2InputError(
            f"attention_mask has a token at row {row}, index {token + 1} after a pad; only right padding is "
            "allowed (use document_ids for packed rows)"
        )


def _check_document_ids(ids: Tensor, alignment: int) -> None:
    if (ids < 0).any():
        row, token = (ids < 0).nonzero()[0].tolist()
        raise CSA2InputError(
            f"document_ids is {int(ids[row, token])} at row {row}, token {token}; ids are positive, 0 is a pad"
        )
    newest = torch.cat([torch.zeros_like(ids[:, :1]), ids.cummax(dim=1).values[:, :-1]], dim=1)
    backwards = (ids != 0) & (ids < newest)
    if backwards.any():
        row, token = backwards.nonzero()[0].tolist()
        raise CSA2InputError(
            f"document_ids falls from {int(newest[row, token])} to {int(ids[row, token])} at row {row}, token "
            f"{token}; ids must not decrease along a row (0 is a pad)"
        )
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
    resumed = (ids != 0) & (before == 0) & (ids == newest)
    if resumed.any():
        row, token = resumed.nonzero()[0].tolist()
        raise CSA2InputError(
            f"document_ids has document {int(ids[row, token])} again at row {row}, token {token} after a pad; "
            "a document is one run of tokens"
        )
    index = torch.arange(ids.shape[1], device=ids.device)
    unaligned = (ids != 0) & (ids != before) & (index % alignment != 0)
    if unaligned.any():
        row, token = unaligned.nonzero()[0].tolist()
        raise CSA2InputError(
            f"document_ids starts document {int(ids[row, token])} at row {row}, token {token}; a document must "
            f"start at a multiple of {alignment} (pad the one before with 0)"
        )
    begins_with_pad = (ids[:, 0] == 0) & (ids != 0).any(dim=1)
    if begins_with_pad.any():
        row = int(begins_with_pad.nonzero()[0])
        raise CSA2InputError(f"document_ids begins row {row} with a pad; a row begins with a document")
