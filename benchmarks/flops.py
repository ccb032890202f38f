"""Floating point operations of what the benchmarks time; every product and every sum counts as one."""

from torch import Tensor

from csa2_compiled import CSA2Config


def filled_slots(tokens: int, window: int, topk_indices: Tensor | None) -> int:
    """Slots that a prefill of one row of tokens attends to, the sink not counted.

    topk_indices: int32 [1, S, K], -1 where a slot is empty, or None for a window layer.
    """
    in_window = sum(min(position + 1, window) for position in range(tokens))
    return in_window + (0 if topk_indices is None else int((topk_indices >= 0).sum()))


def visible_pairs(tokens: int, ratio: int) -> int:
    """Pairs of a query and a compressed position that it may see, in a prefill of one row of tokens."""
    return sum((position + 1) // ratio for position in range(tokens))


def attention_flops(cfg: CSA2Config, slots: int) -> int:
    """Of the attention core: two products of head_dim channels for each head and slot."""
    return 4 * cfg.num_attention_heads * cfg.head_dim * slots


def index_score_flops(cfg: CSA2Config, pairs: int) -> int:
    """Of the index scores: one product of index_head_dim channels for each index head and pair."""
    return 2 * cfg.index_n_heads * cfg.index_head_dim * pairs
