"""The plain tensor code behind the indexer's named ops: scores, candidate blocks, selection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from csa2_compiled.matmul import matmul_float32

_ORDERED_NEGATIVE_INFINITY = -2139095041  # the bits of -inf, mapped as `best_positions` maps them


def positions_visible(num_compressed: int, visible_start: Tensor, visible_stop: Tensor) -> Tensor:
    """bool [B, S, T]: compressed position t is visible when start <= t < stop (both int [B, S])."""
    position = torch.arange(num_compressed, device=visible_start.device)
    return (position >= visible_start.unsqueeze(-1)) & (position < visible_stop.unsqueeze(-1))


def head_products(q: Tensor, k: Tensor) -> Tensor:
    """Dot products of every index head, at least float32: q [B, S, Hi, Di], k [B, T, Di] -> [B, S, Hi, T]."""
    batch, queries, heads, dim = q.shape
    products = matmul_float32(q.reshape(batch, queries * heads, dim), k.transpose(1, 2))
    return products.view(batch, queries, heads, k.shape[1])


def index_scores_body(q: Tensor, k: Tensor, weights: Tensor, visible_start: Tensor, visible_stop: Tensor) -> Tensor:
    products = head_products(q, k).relu()
    scores = (products * weights.to(products.dtype).unsqueeze(-1)).sum(2)
    visible = positions_visible(k.shape[1], visible_start, visible_stop)
    return torch.where(visible, scores, float("-inf")).contiguous()


def best_positions(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best entries of the last dim, ties going to the lower position; NaN counts as -inf.

    torch.topk breaks ties as it likes, and ties are common here (relu gives zeros). So score and position
    are made one 64-bit key: the float's bits in an order that integers share, then the positions after it.
    Returns (positions int64, whether that entry's score is above -inf), best first.
    """
    scores = torch.where(scores.isnan(), float("-inf"), scores.to(torch.float32))
    scores = torch.where(scores == 0, 0.0, scores)  # -0.0 and 0.0 tie
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    last = scores.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(scores.shape[-1], device=scores.device))
    best = keys.topk(k, dim=-1).values
    return last - (best & 0xFFFFFFFF), (best >> 32) > _ORDERED_NEGATIVE_INFINITY


def select_topk_body(scores: Tensor, candidates: Tensor | None, k: int) -> Tensor:
    if candidates is not None:
        scores = torch.where(candidates, scores, float("-inf"))
    positions = scores.shape[-1]
    best, allowed = best_positions(scores, torch.sym_min(k, positions))
    ascending = torch.where(allowed, best, positions).sort(dim=-1).values
    return torch.where(ascending < positions, ascending, -1).to(torch.int32)


def candidate_blocks_body(
    scores: Tensor, visible_stop: Tensor, group_starts: Tensor | None, topk_blocks: int, block_size: int
) -> Tensor:
    batch, queries, positions = scores.shape
    blocks = -(-positions // block_size)
    newest = (visible_stop - 1).clamp(min=0).long()
    # A range can be empty with a stop above 0: that of a query before its document's first complete group.
    sees = visible_stop > 0 if group_starts is None else (scores != float("-inf")).any(-1)
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    if group_starts is None:
        padded = F.pad(scores, (0, blocks * block_size - positions), value=float("-inf"))
        best = padded.view(batch, queries, blocks, block_size).amax(-1)
        newest_block = newest // block_size
    else:
        # Blocks are counted from each document's first position, so a document may add a ragged block.
        offset = torch.arange(positions, device=scores.device) - group_starts
        block_of = (offset % block_size == 0).cumsum(-1).clamp(min=1) - 1  # [B, T]
        best = torch.full_like(scores, float("-inf")).scatter_reduce(
            2, block_of.unsqueeze(1).expand_as(scores), scores, "amax"
        )
        newest_block = F.pad(block_of, (0, 1)).gather(1, newest)  # padded, since T may be 0
    is_newest = torch.arange(best.shape[-1], device=scores.device) == newest_block.unsqueeze(-1)
    is_newest = is_newest & sees.unsqueeze(-1)
    others = torch.where(is_newest, float("-inf"), best)
    kept_blocks, reachable = best_positions(others, torch.sym_min(topk_blocks - 1, best.shape[-1]))
    kept = is_newest | torch.zeros_like(is_newest).scatter(2, kept_blocks, reachable)
    if group_starts is None:
        return kept[..., torch.arange(positions, device=scores.device) // block_size].contiguous()
    return kept.gather(2, block_of.unsqueeze(1).expand(-1, queries, -1))
