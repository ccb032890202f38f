"""The index score pass: `index_scores` becomes one kernel that makes no tensor of all heads.

before::

    %scores = call_function csa2.index_scores(%q, %k, %weights, %start, %stop)

after::

    %scores = call_function aten.empty([1, 4096, 4096])
    call_function triton_kernel_wrapper_mutation(index_scores_tiles_kernel, %q, %k, ..., %scores)
"""

from functools import partial

import torch
from torch import fx

from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import all_arguments, example_of, replace_by_trace, why_not_cuda
from csa2_compiled.passes.select_topk import READS_VISIBLE_ONLY

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class IndexScores(CompilerPass):
    """Serves CUDA and index heads of whole multiples of 16 channels."""

    name = "index_scores"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.csa2.index_scores.default:
                reason = self._why_not(node)
                if reason is None:
                    self._rewrite(graph, node)
                    report.fire(node.target.name())
                else:
                    report.decline(node.target.name(), reason)
        return report

    def _why_not(self, node: fx.Node) -> str | None:
        dim = example_of(node.all_input_nodes[0]).shape[-1]
        if dim % 16:
            return f"index_head_dim is {dim}, not a multiple of 16"
        return why_not_cuda(node, _DTYPES)

    def _rewrite(self, graph: fx.Graph, node: fx.Node) -> None:
        from csa2_compiled.passes.kernels.index_scores import index_scores

        body = partial(index_scores, write_invisible=not node.meta.get(READS_VISIBLE_ONLY, False))
        replace_by_trace(graph, node, body, all_arguments(node))
