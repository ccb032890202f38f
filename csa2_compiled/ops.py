"""Named ops: the few regions of CSA2 that compiler passes care about, each one node in a graph.

Every op is plain tensor code (its *body*) registered with torch.library: a schema, a shape rule and a
gradient. Eager calls run the body; in a compiled graph a pass may replace the node by a kernel, and the
inlining pass puts the body back where none did, so that Inductor fuses it like any tensor code. `BODIES`
maps each op to that body.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csa2_compiled.attention_math import attend_backward_body, attend_body, gather_kv_body
from csa2_compiled.indexer_math import (
    candidate_blocks_body,
    head_products,
    index_scores_body,
    select_topk_body,
)
from csa2_compiled.matmul import matmul_float32
from csa2_compiled.quantization import quantize_dequantize_body
from csa2_compiled.rope import apply_rope_body


def rms_norm_body(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * normalized).to(x.dtype).contiguous()


@torch.library.custom_op("csa2::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: x [..., dim], weight float32 [dim]; float32 inside, x's dtype out."""
    return rms_norm_body(x, weight, eps)


@torch.library.custom_op("csa2::apply_rope", mutates_args=())
def apply_rope(x: Tensor, rotations: Tensor, inverse: bool) -> Tensor:
    """Rotate the last R channels of x by its positions' angles; `inverse` turns back.

    x: floating [B, S, D] or [B, S, heads, D]; rotations: float32 [B or 1, S, R/2, 2], cosine and sine.
    Returns x's shape and dtype; the complex product is float32.
    """
    return apply_rope_body(x, rotations, inverse)


@torch.library.custom_op("csa2::quantize_dequantize", mutates_args=())
def quantize_dequantize(x: Tensor, format_name: str) -> Tensor:
    """Round x [..., dim] to what `format_name` ("fp8", "nvfp4", "mxfp4") can hold, in x's dtype.

    The gradient passes unchanged (straight-through).
    """
    return quantize_dequantize_body(x, format_name)


@torch.library.custom_op("csa2::index_scores", mutates_args=())
def index_scores(q: Tensor, k: Tensor, weights: Tensor, visible_start: Tensor, visible_stop: Tensor) -> Tensor:
    """Index score of every compressed position: sum over heads of relu(q . k) * weight.

    q [B, S, Hi, Di] and k [B, T, Di] share a dtype; weights float32 [B, S, Hi]; position t is visible when
    visible_start <= t < visible_stop (int32 [B, S]). Returns float32 [B, S, T], -inf where not visible.
    """
    return index_scores_body(q, k, weights, visible_start, visible_stop)


@torch.library.custom_op("csa2::candidate_blocks", mutates_args=())
def candidate_blocks(
    scores: Tensor, visible_stop: Tensor, group_starts: Tensor | None, topk_blocks: int, block_size: int
) -> Tensor:
    """Positions in the blocks with the best visible scores; the newest visible position's block stays.

    scores float32 [B, S, T], -inf where not visible; visible_stop int32 [B, S]; group_starts int32 [B, T]
    gives the first position of each position's document (None: one document, starting at 0). Ties go to
    the lower block. Returns bool [B, S, T], whole blocks, also where they reach past the newest position.
    """
    return candidate_blocks_body(scores, visible_stop, group_starts, topk_blocks, block_size)


@torch.library.custom_op("csa2::select_topk", mutates_args=())
def select_topk(scores: Tensor, candidates: Tensor | None, k: int) -> Tensor:
    """The k best positions of each query, ascending, -1 behind them where fewer are allowed.

    scores float32 [B, S, T], -inf where not visible (NaN is never selected); candidates bool [B, S, T] or
    None. Ties go to the lower position. Returns int32 [B, S, min(k, T)].
    """
    return select_topk_body(scores, candidates, k)


@torch.library.custom_op("csa2::gather_kv", mutates_args=())
def gather_kv(keys: Tensor, indices: Tensor) -> Tensor:
    """Gather each query's slots: keys [B, N, D], indices int32 [B, S, slots] -> [B, S, slots, D].

    A slot of index -1 is empty and becomes zeros. The gradient accumulates in float32.
    """
    return gather_kv_body(keys, indices)


@torch.library.custom_op("csa2::attend", mutates_args=())
def attend(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention core over slots of one or two sources, as one op, for training.

    q: [B, S, H, D]; sink: float32 [H] (or wider, with q); window_kv: [B, N, D] with window_indices int32 [B, S, W];
    compressed_kv: [B, T, D] with topk_indices int32 [B, S, K], or neither; -1 where a slot is empty. Returns the
    output, [B, S, H, D] in q's dtype, and the natural logarithm of the softmax's denominator, sink included, float32
    or wider [B, S, H], which has no gradient. Rows are gathered anew in the backward pass, and none is kept.
    """
    for name, kv in (("window_kv", window_kv), ("compressed_kv", compressed_kv)):
        if kv is not None and kv.dtype != q.dtype:
            raise ValueError(f"{name} is {kv.dtype}; it must have the dtype of q, {q.dtype}")
    return attend_body(q, sink, window_kv, window_indices, compressed_kv, topk_indices)


@torch.library.custom_op("csa2::attend_backward", mutates_args=())
def attend_backward(
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
    """Gradients of `attend` with respect to q, sink, window_kv and compressed_kv, in their shapes and dtypes.

    grad_out, out: [B, S, H, D]; logsumexp: as `attend` returned it. A row's gradient is summed in float32 or wider
    over all slots that name it. Without compressed_kv the last gradient is an empty tensor.
    """
    return attend_backward_body(
        grad_out, out, logsumexp, q, sink, window_kv, window_indices, compressed_kv, topk_indices
    )


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@apply_rope.register_fake
def _(x: Tensor, rotations: Tensor, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@quantize_dequantize.register_fake
def _(x: Tensor, format_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@index_scores.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, visible_start: Tensor, visible_stop: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape[0], q.shape[1], k.shape[1], dtype=wide)


@candidate_blocks.register_fake
def _(scores: Tensor, visible_stop: Tensor, group_starts: Tensor | None, topk_blocks: int, block_size: int) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool, memory_format=torch.contiguous_format)


@select_topk.register_fake
def _(scores: Tensor, candidates: Tensor | None, k: int) -> Tensor:
    batch, queries, positions = scores.shape
    return scores.new_empty(batch, queries, torch.sym_min(k, positions), dtype=torch.int32)


@gather_kv.register_fake
def _(keys: Tensor, indices: Tensor) -> Tensor:
    return keys.new_empty(*indices.shape, keys.shape[-1])


@attend.register_fake
def _(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@attend_backward.register_fake
def _(
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
    grad_compressed = window_kv.new_empty(0) if compressed_kv is None else compressed_kv.new_empty(compressed_kv.shape)
    return q.new_empty(q.shape), sink.new_empty(sink.shape), window_kv.new_empty(window_kv.shape), grad_compressed


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide, grad_wide = x.to(wide), grad.to(wide)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + ctx.eps)
    normalized = x_wide * scale
    grad_normalized = grad_wide * weight.to(wide)
    along = (grad_normalized * normalized).mean(-1, keepdim=True)
    grad_x = scale * (grad_normalized - normalized * along)
    grad_weight = (grad_wide * normalized).sum_to_size(weight.shape)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _apply_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rotations, ctx.inverse = inputs
    ctx.save_for_backward(rotations)


def _apply_rope_backward(ctx: Any, grad: Tensor) -> Any:
    (rotations,) = ctx.saved_tensors
    return apply_rope(grad, rotations, not ctx.inverse), None, None


def _index_scores_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output)


def _index_scores_backward(ctx: Any, grad: Tensor) -> Any:
    q, k, weights, scores = ctx.saved_tensors
    batch, queries, heads, dim = q.shape
    grad = torch.where(scores > float("-inf"), grad, 0)  # invisible entries are constants
    products = head_products(q, k)
    grad_weights = (products.relu() * grad.unsqueeze(2)).sum(-1)
    grad_products = torch.where(products > 0, grad.unsqueeze(2) * weights.to(grad.dtype).unsqueeze(-1), 0)
    flat = grad_products.reshape(batch, queries * heads, -1)
    grad_q = matmul_float32(flat, k.to(flat.dtype)).view(q.shape)
    grad_k = matmul_float32(flat.transpose(1, 2), q.reshape(batch, queries * heads, dim).to(flat.dtype))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_weights.to(weights.dtype), None, None


def _gather_kv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    keys, indices = inputs
    ctx.save_for_backward(indices)
    ctx.num_keys = keys.shape[1]


def _gather_kv_backward(ctx: Any, grad: Tensor) -> Any:
    (indices,) = ctx.saved_tensors
    batch, queries, slots, dim = grad.shape
    wide = torch.promote_types(grad.dtype, torch.float32)
    # Empty slots add into a spare last row, which is cut off.
    rows = torch.where(indices >= 0, indices, ctx.num_keys).long()
    rows = rows.reshape(batch, queries * slots, 1).expand(-1, -1, dim)
    sums = grad.new_zeros(batch, ctx.num_keys + 1, dim, dtype=wide)
    sums = sums.scatter_add(1, rows, grad.to(wide).reshape(batch, queries * slots, dim))
    return sums[:, :-1].to(grad.dtype), None


def _attend_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs)


def _attend_backward(ctx: Any, grad_out: Tensor, _: Any) -> Any:
    out, logsumexp, q, sink, window_kv, window_indices, compressed_kv, topk_indices = ctx.saved_tensors
    grad_q, grad_sink, grad_window, grad_compressed = attend_backward(
        grad_out, out, logsumexp, q, sink, window_kv, window_indices, compressed_kv, topk_indices
    )
    return grad_q, grad_sink, grad_window, None, None if compressed_kv is None else grad_compressed, None


rms_norm.register_autograd(_rms_norm_backward, setup_context=_rms_norm_setup)
apply_rope.register_autograd(_apply_rope_backward, setup_context=_apply_rope_setup)
quantize_dequantize.register_autograd(lambda ctx, grad: (grad, None))
index_scores.register_autograd(_index_scores_backward, setup_context=_index_scores_setup)
gather_kv.register_autograd(_gather_kv_backward, setup_context=_gather_kv_setup)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError("csa2::attend has no second derivative; differentiate it once, or train on the CPU")


attend.register_autograd(_attend_backward, setup_context=_attend_setup)
attend_backward.register_autograd(_no_second_derivative)

BODIES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.csa2.rms_norm.default: rms_norm_body,
    torch.ops.csa2.apply_rope.default: apply_rope_body,
    torch.ops.csa2.quantize_dequantize.default: quantize_dequantize_body,
    torch.ops.csa2.index_scores.default: index_scores_body,
    torch.ops.csa2.candidate_blocks.default: candidate_blocks_body,
    torch.ops.csa2.select_topk.default: select_topk_body,
    torch.ops.csa2.gather_kv.default: gather_kv_body,
    torch.ops.csa2.attend.default: attend_body,
    torch.ops.csa2.attend_backward.default: attend_backward_body,
}
