"""The training pass: the attention core and its backward become kernels that gather inside.

before, in the forward and in the backward graph::

    %attend = call_function csa2.attend(%q, %sink, %window_kv, %recent, %compressed_kv, %topk)
    %grads = call_function csa2.attend_backward(%grad_out, %out, %logsumexp, %q, %sink, ...)

after::

    %out = call_function aten.empty([1, 4096, 64, 512])
    call_function triton_kernel_wrapper_mutation(sparse_attention_kernel, %q, ..., %out, %logsumexp)

    call_function triton_kernel_wrapper_mutation(grad_q_kernel, %grad_out, ..., %grad_q, %mean, %kept)
    call_function triton_kernel_wrapper_mutation(grad_slots_kernel, %grad_out, %q, %kept, ..., %workspace)
    call_function triton_kernel_wrapper_mutation(sum_slots_kernel, %workspace, ..., %sums)

The last three repeat for each chunk of queries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.inductor import shared_memory_per_block
from csa2_compiled.passes.kv_gather import HOPPER, hopper_attention, why_not_hopper
from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    NodePass,
    all_arguments,
    example_of,
    has_symbols,
    replace_by_trace,
    why_not_cuda,
)

csa2 = torch.ops.csa2


class Attend(NodePass):
    """Serves CUDA, up to 128 heads of 512 channels, where all sizes are known while compiling."""

    name = "attend"
    targets = (csa2.attend.default, csa2.attend_backward.default)

    def why_not(self, node: Any) -> str | None:
        reason = why_not_cuda(node, FLOAT_DTYPES) or why_not_sizes(node)
        if reason is not None:
            return reason
        try:
            _tiles(node)
        except ValueError as error:
            return str(error)
        return None

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        tiles, names = _tiles(node), [node.target.name()]
        body: Callable[..., Any] = _backward
        if node.target is csa2.attend.default:
            q = example_of(_query(node))
            batch, tokens, heads, dim = q.shape
            body = _forward
            if why_not_hopper(q, heads, dim, batch * tokens) is None:
                body = _forward_on_hopper
                names.append(HOPPER)
        replace_by_trace(graph, node, lambda *arguments: body(tiles, *arguments), all_arguments(node))
        return names


def why_not_sizes(node: Any) -> str | None:
    """Why the kernels do not take the sizes of a node's inputs; None when they do."""
    if has_symbols(*(argument for argument in all_arguments(node) if argument is not None)):
        return "a size is not known while compiling"
    sources = all_arguments(node)[2 if node.target is csa2.attend.default else 5 :: 2]
    if any(example_of(kv).dtype != example_of(_query(node)).dtype for kv in sources if kv is not None):
        return "q and the keys have not one dtype"
    heads, dim = example_of(_query(node)).shape[2:]
    if heads > 128 or dim > 512:
        return f"{heads} heads of {dim} channels; the kernel takes up to 128 of 512"
    return None


def _query(node: Any) -> Any:
    return all_arguments(node)[0 if node.target is csa2.attend.default else 3]


def _tiles(node: Any) -> Any:
    from csa2_compiled.passes.kernels.sparse_attention import choose_tiles
    from csa2_compiled.passes.kernels.sparse_attention_backward import choose_backward_tiles

    q = example_of(_query(node))
    batch, tokens, heads, dim = q.shape
    memory = shared_memory_per_block(q.device)
    if node.target is csa2.attend_backward.default:
        return choose_backward_tiles(heads, dim, q.element_size(), memory)
    indices = (argument for argument in all_arguments(node)[3::2] if argument is not None)
    slots = sum(example_of(i).shape[-1] for i in indices)
    return choose_tiles(batch * tokens, heads, dim, q.element_size(), slots, memory)


def _forward(tiles: Any, q: Tensor, sink: Tensor, *sources: Tensor | None) -> tuple[Tensor, Tensor]:
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention

    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return sparse_attention(q, sink, *sources, logsumexp=logsumexp, tiles=tiles), logsumexp


def _forward_on_hopper(_: Any, q: Tensor, sink: Tensor, *sources: Tensor | None) -> tuple[Tensor, Tensor]:
    return hopper_attention(q, sink, *sources, None, False, False)


def _backward(tiles: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from csa2_compiled.passes.kernels.sparse_attention_backward import sparse_attention_backward

    return sparse_attention_backward(*arguments, tiles=tiles)
