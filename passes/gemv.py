"""The matrix-vector pass: a projection of a single token reads its weight at the speed of the memory.

before::

    %projected = call_function aten.mm(%row, %transposed_weight)

after::

    %projected = call_function aten.empty([1, 1, 32768])
    call_function triton_kernel_wrapper_mutation(gemv_kernel, %row, %weight, ..., %projected)

Grouped projections (aten.bmm) are served likewise. Products and sums are float32, as cuBLAS has them, in
another order.
"""

from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.rewrite import FLOAT_DTYPES, NodePass, example_of, replace_by_trace, why_not_cuda

aten = torch.ops.aten


class Gemv(NodePass):
    """Serves CUDA, one row, and weights whose input channels are adjacent in memory."""

    name = "gemv"
    targets = (aten.mm.default, aten.bmm.default)

    def why_not(self, node: Any) -> str | None:
        x, weight = (example_of(argument) for argument in node.args)
        if not isinstance(x.shape[-2], int) or x.shape[-2] != 1:
            return "more than one row, which a matrix product serves"
        if weight.stride(-2) != 1 or x.stride(-1) != 1:
            return "the weight's input channels are not adjacent in memory"
        return why_not_cuda(node, FLOAT_DTYPES)

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        from csa2_compiled.passes.kernels.gemv import gemv

        shape = tuple(example_of(node).shape)

        def body(x: Tensor, transposed_weight: Tensor) -> Tensor:
            if x.dim() == 2:
                x, transposed_weight = x.unsqueeze(0), transposed_weight.unsqueeze(0)
            return gemv(x, transposed_weight.transpose(1, 2)).view(shape)

        replace_by_trace(graph, node, body, node.args)
        return [node.target.name()]
