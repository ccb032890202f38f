"""The indexer's selection as a mask over compressed positions, one bit a position."""

import torch
from torch import Tensor

from csa2_compiled.masks.signatures import MaskMod

BITS_PER_WORD = 32


def pack_selection(topk_indices: Tensor, num_compressed: int) -> Tensor:
    """Turn selected positions into a bit set that a mask mod can test in constant time.

    topk_indices: int [B, S, K], -1 where absent, no position twice.
    Returns int32 [B, S, ceil(num_compressed / 32)]: an eighth of a byte a position, where a boolean mask
    would take a byte.
    """
    batch, queries, _ = topk_indices.shape
    words = (num_compressed + BITS_PER_WORD - 1) // BITS_PER_WORD
    position = topk_indices.clamp(min=0)
    # Distinct bits add up without carries, so a sum is the union (bit 31 wraps to the sign, as it should).
    bit = torch.where(topk_indices >= 0, torch.ones_like(position) << (position % BITS_PER_WORD), 0)
    empty = torch.zeros(batch, queries, words, dtype=torch.int32, device=topk_indices.device)
    return empty.scatter_add(2, (position // BITS_PER_WORD).long(), bit.to(torch.int32))


def generate_selection_mask(bits: Tensor, first_key: int, num_compressed: int) -> MaskMod:
    """Mask mod over keys whose range ``first_key .. first_key + num_compressed`` is compressed positions.

    bits: int32 [B, S, ceil(num_compressed / 32)] from `pack_selection`.
    """

    def selection_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Clamped, because a mod is evaluated at every key of a tile and must not read outside the bits.
        position = (j - first_key).clamp(0, num_compressed - 1)
        chosen = (bits[b, i, position // BITS_PER_WORD] >> (position % BITS_PER_WORD)) & 1
        return (chosen == 1) & (j >= first_key) & (j < first_key + num_compressed)

    selection_mask.__name__ = "selection"
    return selection_mask
