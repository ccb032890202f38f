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
