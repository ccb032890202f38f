"""The sliding window: a query sees itself and the ``window - 1`` tokens before it."""

import torch
from torch import Tensor

from csa2_compiled.masks.signatures import MaskMod


def generate_window_mask(window: int, num_tokens: int) -> MaskMod:
    """Mask mod over keys whose first ``num_tokens`` are the raw token keys (dense layout).

    Query i sees token key j when ``i - window < j <= i``.
    """

    def window_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window) & (j < num_tokens)

    window_mask.__name__ = f"window_{window}"
    return window_mask


def window_indices(num_tokens: int, window: int, device: torch.device, starts: Tensor | None = None) -> Tensor:
    """Token indices in every query's window, newest first, so that the filled slots come first.

    starts: int [B, S], the index of the first token each query may see (its document's start; S for a
    padded query, which sees nothing); None when the sequence is one document.
    Returns int32 [B or 1, S, window]; -1 where the slot is empty.
    """
    query = torch.arange(num_tokens, device=device, dtype=torch.int32)[None, :, None]
    token = query - torch.arange(window, device=device, dtype=torch.int32)
    first = 0 if starts is None else starts[..., None]
    return torch.where(token >= first, token, -1)


def ring_and_fresh(positions: Tensor, past: Tensor, ring_rows: int) -> Tensor:
    """Where a token lies in a cache's ring followed by the tokens of the step in work.

    positions: int, non-negative; past: int, how many tokens came before the step, broadcast against it. ring_rows:
    rows of the ring and one spare. Returns the row, in the dtype of both.
    """
    return torch.where(positions < past, positions % (ring_rows - 1), ring_rows + positions - past)


def cached_window_indices(
    past: Tensor, num_tokens: int, window: int, ring_rows: int, starts: Tensor | None = None, written: bool = False
) -> Tensor:
    """Rows of every query's window, newest first, in a cache's ring followed by the step's own keys.

    past: int64 [B]; ring_rows: as in `ring_and_fresh`; starts: int [B, S], num_tokens for a padded query, which sees
    nothing; written: the ring already holds the step's keys. Returns int32 [B, S, window]; -1 where the slot is empty.
    """
    query = past.unsqueeze(1) + torch.arange(num_tokens, device=past.device)
    positions = query.unsqueeze(-1) - torch.arange(window, device=past.device)
    seen = positions >= 0
    if starts is not None:
        seen = seen & (starts < num_tokens).unsqueeze(-1)
    positions = positions.clamp(min=0)
    rows = positions % (ring_rows - 1) if written else ring_and_fresh(positions, past[:, None, None], ring_rows)
    return torch.where(seen, rows, -1).to(torch.int32)
