"""The plain tensor code of the attention core, forward and backward, over gathered slots."""

import torch
from torch import Tensor

from csa2_compiled.matmul import matmul_float32, weighted_sum


def gather_kv_body(keys: Tensor, indices: Tensor) -> Tensor:
    batch, queries, slots = indices.shape
    dim = keys.shape[-1]
    rows = indices.clamp(min=0).reshape(batch, queries * slots, 1).long()
    gathered = keys.gather(1, rows.expand(-1, -1, dim)).view(batch, queries, slots, dim)
    return torch.where((indices >= 0).unsqueeze(-1), gathered, 0).contiguous()


def slot_logits(q: Tensor, gathered: Tensor, visible: Tensor) -> Tensor:
    """q . k / sqrt(D) of every filled slot, -inf elsewhere: float32 or wider [B * S, H, slots].

    q: [B, S, H, D]; gathered: [B, S, slots, D]; visible: int32 [B, S, slots], -1 where a slot is empty.
    """
    batch, tokens, heads, dim = q.shape
    rows, num_slots = batch * tokens, gathered.shape[2]
    keys = gathered.view(rows, num_slots, dim)
    logits = matmul_float32(q.reshape(rows, heads, dim), keys.transpose(1, 2)) * dim**-0.5
    return torch.where((visible >= 0).view(rows, 1, num_slots), logits, float("-inf"))


def with_sink(logits: Tensor, sink: Tensor) -> Tensor:
    """The sink's logit before those of the slots: [B * S, H, 1 + slots]."""
    return torch.cat([sink.to(logits.dtype).view(1, -1, 1).expand(logits.shape[0], -1, 1), logits], dim=-1)


def attend_plain(q: Tensor, gathered: Tensor, visible: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the sink and gathered slots: the output, q's shape and dtype, and the logits, sink first.

    Arguments as in `slot_logits` and `with_sink`; logits [B * S, H, 1 + slots], float32 or wider.
    """
    logits = with_sink(slot_logits(q, gathered, visible), sink)
    attended = weighted_sum(logits.softmax(dim=-1)[..., 1:], gathered.flatten(0, 1)).to(q.dtype)
    return attended.view(q.shape), logits


def attend_body(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gathered, visible = _gather_slots(window_kv, window_indices, compressed_kv, topk_indices)
    attended, logits = attend_plain(q, gathered, visible, sink)
    return attended, logits.logsumexp(dim=-1).view(q.shape[:3])


def attend_backward_body(
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, heads, dim = q.shape
    rows = batch * tokens
    gathered, visible = _gather_slots(window_kv, window_indices, compressed_kv, topk_indices)
    keys, queries, grads = gathered.flatten(0, 1), q.reshape(rows, heads, dim), grad_out.reshape(rows, heads, dim)
    # The softmax's own share of the gradient: each probability's gradient counts relative to their mean.
    mean = (grad_out.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1)
    probabilities = torch.exp(slot_logits(q, gathered, visible) - logsumexp.view(rows, heads, 1))
    grad_logits = probabilities * (matmul_float32(grads, keys.transpose(1, 2)) - mean.view(rows, heads, 1))
    grad_q = weighted_sum(grad_logits, keys) * dim**-0.5
    grad_sink = -(torch.exp(sink.to(logsumexp.dtype) - logsumexp) * mean).sum((0, 1))
    # Key and value are one vector.
    grad_slots = weighted_sum(grad_logits.transpose(1, 2), queries) * dim**-0.5
    grad_slots = grad_slots + weighted_sum(probabilities.transpose(1, 2), grads)
    by_slot = grad_slots.view(batch, tokens, -1, dim)
    window = window_indices.shape[-1]
    grad_window = _sum_rows(by_slot[:, :, :window], window_indices, window_kv)
    if compressed_kv is None or topk_indices is None:
        grad_compressed = window_kv.new_empty(0)
    else:
        grad_compressed = _sum_rows(by_slot[:, :, window:], topk_indices, compressed_kv)
    return grad_q.to(q.dtype).view(q.shape), grad_sink.to(sink.dtype), grad_window, grad_compressed


def _gather_slots(
    window_kv: Tensor, window_indices: Tensor, compressed_kv: Tensor | None, topk_indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of all slots, [B, S, W + K, D], and their indices, int32 [B, S, W + K]."""
    gathered = gather_kv_body(window_kv, window_indices)
    if compressed_kv is None or topk_indices is None:
        return gathered, window_indices
    gathered = torch.cat([gathered, gather_kv_body(compressed_kv, topk_indices)], dim=2)
    return gathered, torch.cat([window_indices, topk_indices], dim=-1)


def _sum_rows(slots: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """The sum of each row's slots, in the slots' dtype, then in that of `like` [B, N, D]: slots [B, S, slots, D]."""
    batch, num_keys, dim = like.shape
    first = torch.arange(batch, device=indices.device).view(batch, 1, 1) * num_keys
    # Empty slots add into a spare last row. Whole rows are added, so that deterministic sums sort no more than those.
    rows = torch.where(indices >= 0, indices + first, batch * num_keys).flatten()
    sums = slots.new_zeros(batch * num_keys + 1, dim).index_add(0, rows, slots.reshape(-1, dim))
    return sums[:-1].view(like.shape).to(like.dtype, memory_format=torch.contiguous_format)
