"""BlockMasks built from indices: work and memory follow the number of slots, never queries x keys."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from csa2_compiled.masks.own_buffer import own_buffer
from csa2_compiled.masks.signatures import MaskMod


def block_pair_counts(indices: Tensor, num_keys: int, query_block: int, key_block: int) -> Tensor:
    """Count the visible (query, key) pairs in every block.

    indices: int [N, S, slots], the keys each query sees, -1 where a slot is empty, no key twice.
    Returns int32 [N, ceil(S / query_block), ceil(num_keys / key_block)].
    """
    rows, queries, slots = indices.shape
    query_blocks, key_blocks = -(-queries // query_block), -(-num_keys // key_block)
    # Empty slots, and those of the queries that fill the last block, are counted in a block column of their
    # own, which is cut off again. Padding keeps a division of the query index out of the scatter: Inductor's
    # CPU backend loses the tail of such a loop (seen with torch 2.13).
    padded = F.pad(indices, (0, 0, 0, query_blocks * query_block - queries), value=-1)
    column = torch.where(padded >= 0, padded // key_block, key_blocks).long()
    column = column.view(rows, query_blocks, query_block * slots)
    counts = torch.zeros(rows, query_blocks, key_blocks + 1, dtype=torch.int32, device=indices.device)
    return counts.scatter_add(2, column, torch.ones_like(column, dtype=torch.int32))[..., :key_blocks]


def slot_block_counts(filled: Tensor, key_block: int) -> Tensor:
    """Count the filled slots in every block of a row (slots layout).

    filled: bool [N, slots]. Returns int32 [N, 1, ceil(slots / key_block)].
    """
    blocks = -(-filled.shape[1] // key_block)
    padded = F.pad(filled, (0, blocks * key_block - filled.shape[1]))
    return padded.view(filled.shape[0], 1, blocks, key_block).sum(-1, dtype=torch.int32)


def block_mask_from_counts(
    counts: Tensor,
    mask_mod: MaskMod,
    num_queries: int,
    num_keys: int,
    query_block: int,
    key_block: int,
) -> BlockMask:
    """Make FlexAttention's BlockMask: a block is visited when it holds at least one visible pair.

    counts: int32 [N, query blocks, key blocks]. Every visited block is a partial one, so the mask mod
    decides inside it; no block is taken as full. There are no lists of the query blocks that a key block sees, which
    only gradients read: both layouts are for calls without, and making them was half of what Dynamo traced.
    """
    occupied = (counts > 0).unsqueeze(1)
    # A stable descending sort of the occupancy lists the occupied blocks first, in ascending order.
    order = torch.argsort(occupied.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        own_buffer(occupied.sum(-1, dtype=torch.int32)),
        own_buffer(order),
        BLOCK_SIZE=(query_block, key_block),
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
        compute_q_blocks=False,
    )
