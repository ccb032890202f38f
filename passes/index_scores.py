"""The index score pass: `index_scores` becomes one kernel that makes no tensor of all heads.

before::

    %scores = call_function csa2.index_scores(%q, %k, %weights, %start, %stop)

after::

    %scores = call_function aten.empty([1, 4096, 4096])
    call_function triton_kernel_wrapper_mutation(index_scores_tiles_kernel, %q, %k, ..., %scores)
"""

from functools import partial
from typing import Any

import torch
from torch import fx

from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    NodePass,
    all_arguments,
    example_of,
    replace_by_trace,
    why_not_cuda,
)
from csa2_compiled.passes.select_topk import READS_VISIBLE_ONLY


class IndexScores(NodePass):
    """Serves CUDA and index heads of whole multiples of 16 channels."""

    name = "index_scores"
    targets = (torch.ops.csa2.index_scores.default,)

    def why_not(self, node: Any) -> str | None:
        dim = example_of(node.all_input_nodes[0]).shape[-1]
        if dim % 16:
            return f"index_head_dim is {dim}, not a multiple of 16"
        return why_not_cuda(node, FLOAT_DTYPES)

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        from csa2_compiled.passes.kernels.index_scores import index_scores

        body = partial(index_scores, write_invisible=not node.meta.get(READS_VISIBLE_ONLY, False))
        replace_by_trace(graph, node, body, all_arguments(node))
        return [node.target.name()]
