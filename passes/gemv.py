"""The matrix-vector pass: a projection of a single token reads its weight at the speed of the memory.

before::

    %projected = call_function aten.mm(%row, %transposed_weight)

after::

    %projected = call_function aten.empty([1, 1, 32768])
    call_function triton_kernel_wrapper_mutation(gemv_kernel, %row, %weight, ..., %projected)

Grouped projections (aten.bmm) are served likewise. Products and sums are float32, as cuBLAS has them, in
another order.
"""

import torch
from torch import Tensor, fx

from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import example_of, replace_by_trace, why_not_cuda

aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Gemv(CompilerPass):
    """Serves CUDA, one row, and weights whose input channels are adjacent in memory."""

    name = "gemv"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in (aten.mm.default, aten.bmm.default):
                reason = self._why_not(node)
                if reason is None:
                    self._rewrite(graph, node)
                    report.fire(node.target.name())
                else:
                    report.decline(node.target.name(), reason)
        return report

    def _why_not(self, node: fx.Node) -> str | None:
        x, weight = (example_of(argument) for argument in node.all_input_nodes[:2])
        rows = x.shape[-2]
        if not isinstance(rows, int) or rows != 1:
            return "more than one row, which a matrix product serves"
        if len(node.all_input_nodes) != 2 or weight.stride(-2) != 1 or x.stride(-1) != 1:
            return "the weight's input channels are not adjacent in memory"
        return why_not_cuda(node, _DTYPES)

    def _rewrite(self, graph: fx.Graph, node: fx.Node) -> None:
        from csa2_compiled.passes.kernels.gemv import gemv

        shape = tuple(example_of(node).shape)

        def body(x: Tensor, transposed_weight: Tensor) -> Tensor:
            if x.dim() == 2:
                x, transposed_weight = x.unsqueeze(0), transposed_weight.unsqueeze(0)
            return gemv(x, transposed_weight.transpose(1, 2)).view(shape)

        replace_by_trace(graph, node, body, node.args)
