"""The selection pass: `select_topk` and `candidate_blocks` become kernels that sort nothing.

Where their scores come from `index_scores`, they read the visible ranges only, so that the scores' kernel need
not write the rest.

before::

    %topk = call_function csa2.select_topk(%scores, %candidates, 512)

after::

    %topk = call_function aten.empty([1, 4096, 512])
    call_function triton_kernel_wrapper_mutation(select_topk_kernel, %scores, %candidates, ..., %topk)
"""

from typing import Any

import torch
from torch import fx

from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import all_arguments, example_of, has_symbols, is_call, replace_by_trace, why_not_cuda

READS_VISIBLE_ONLY = "csa2_users_read_visible_only"  # meta of scores whose every user does


class SelectTopk(CompilerPass):
    """Serves float32 scores of a known size on CUDA; candidate blocks of packed documents stay plain."""

    name = "select_topk"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        ops = torch.ops.csa2
        targets = (ops.select_topk.default, ops.candidate_blocks.default)
        nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in targets]
        reasons = {node: self._why_not(node) for node in nodes}
        for scores in {node.args[0] for node in nodes if is_call(node.args[0], ops.index_scores.default)}:
            scores.meta[READS_VISIBLE_ONLY] = all(reasons.get(user, "another use") is None for user in scores.users)
        for node in nodes:
            reason = reasons[node]
            if reason is None:
                self._rewrite(graph, node)
                report.fire(node.target.name())
            else:
                report.decline(node.target.name(), reason)
        return report

    def _why_not(self, node: Any) -> str | None:
        reason = why_not_cuda(node, (torch.float32,))
        if reason is None and has_symbols(node):
            reason = "the number of positions is not known while compiling"
        if reason is not None:
            return reason
        from csa2_compiled.passes.kernels import select_topk as kernels

        positions, arguments = example_of(node.args[0]).shape[-1], all_arguments(node)
        try:
            if node.target is torch.ops.csa2.select_topk.default:
                kernels.supports(min(arguments[2], positions), positions)
            else:
                _, _, group_starts, topk_blocks, block_size = arguments
                blocks = -(-positions // block_size)
                kernels.supports(min(topk_blocks - 1, blocks), blocks, group_starts)
        except NotImplementedError as error:
            return str(error)
        return None

    def _rewrite(self, graph: fx.Graph, node: Any) -> None:
        from csa2_compiled.passes.kernels import select_topk as kernels

        scores = node.args[0]
        start: Any = None
        stop: Any = None
        if is_call(scores, torch.ops.csa2.index_scores.default):
            start, stop = scores.args[3:5]
        if node.target is torch.ops.csa2.select_topk.default:
            replace_by_trace(graph, node, kernels.select_topk, (*all_arguments(node), start, stop))
        else:
            replace_by_trace(graph, node, kernels.candidate_blocks, (*all_arguments(node), start))
