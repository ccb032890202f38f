"""The matrix-vector pass: a projection of one token, or of a few, reads its weight at the speed of the memory.

before::

    %projected = call_function aten.mm(%row, %transposed_weight)

after::

    %projected = call_function aten.empty([1, 1, 32768])
    call_function triton_kernel_wrapper_mutation(gemv_kernel, %row, %weight, ..., %projected)

Grouped projections (aten.bmm) are served likewise. Products and sums are float32, as cuBLAS has them, in
another order. Of more than one row, only products of up to 64 rows that were bfloat16 with a float32 weight are
rewritten (the pooled projections of ratio > 1): cuBLAS multiplies 16-bit weights well, but has no exact product of
these.
"""

from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    NodePass,
    example_of,
    is_call,
    replace_by_trace,
    why_not_cuda,
)

aten = torch.ops.aten


_MOST_ROWS = 64  # `few_rows.MOST_ROWS`, which needs Triton


class Gemv(NodePass):
    """Serves CUDA, one row or a few, and weights whose input channels are adjacent in memory."""

    name = "gemv"
    targets = (aten.mm.default, aten.bmm.default)

    def why_not(self, node: Any) -> str | None:
        x, weight = (example_of(argument) for argument in node.args)
        rows = x.shape[-2]
        if not isinstance(rows, int) or (rows != 1 and _few_rows(node) is None):
            return "more than one row, which a matrix product serves"
        if weight.stride(-2) != 1 or x.stride(-1) != 1:
            return "the weight's input channels are not adjacent in memory"
        return why_not_cuda(node, FLOAT_DTYPES)

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        few = _few_rows(node)
        if few is not None:
            from csa2_compiled.passes.kernels.few_rows import few_rows_product

            rows, channels = example_of(node.args[0]).shape

            def few_rows(x: Tensor, transposed_weight: Tensor) -> Tensor:
                return few_rows_product(x.reshape(rows, channels), transposed_weight.t())

            replace_by_trace(graph, node, few_rows, (few, node.args[1]))
            return [node.target.name()]
        from csa2_compiled.passes.kernels.gemv import gemv

        shape = tuple(example_of(node).shape)

        def body(x: Tensor, transposed_weight: Tensor) -> Tensor:
            if x.dim() == 2:
                x, transposed_weight = x.unsqueeze(0), transposed_weight.unsqueeze(0)
            return gemv(x, transposed_weight.transpose(1, 2)).view(shape)

        replace_by_trace(graph, node, body, node.args)
        return [node.target.name()]


def _few_rows(node: Any) -> Any:
    """The bfloat16 node behind the rows of a product with a float32 weight, where a kernel takes them; else None."""
    if node.target is not aten.mm.default:
        return None
    x, weight = (example_of(argument) for argument in node.args)
    if not isinstance(x.shape[0], int) or not 1 < x.shape[0] <= _MOST_ROWS or weight.dtype != torch.float32:
        return None
    source = node.args[0]
    while is_call(source, aten.reshape.default) or is_call(source, aten.view.default):
        source = source.args[0]
    if not is_call(source, torch.ops.prims.convert_element_type.default):
        return None
    value = example_of(source.args[0])
    return source.args[0] if value.dtype == torch.bfloat16 and value.stride(-1) == 1 else None
