"""The rotation pass: [RMSNorm ->] RoPE [-> quantize-dequantize] become one read and one write.

before::

    %normed = call_function csa2.rms_norm(%kv, %weight, 1e-20)
    %turned = call_function csa2.apply_rope(%normed, %rotations, False)
    %window_kv = call_function csa2.quantize_dequantize(%turned, "fp8")

after::

    %window_kv = call_function aten.empty_like(%kv)
    call_function triton_kernel_wrapper_mutation(rope_quantize_kernel, %kv, %rotations, %weight, %window_kv)

A neighbour joins when nobody else needs what it hands over.
"""

from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    NodePass,
    all_arguments,
    is_call,
    replace_by_trace,
    why_not_cuda,
)


class RopeQuant(NodePass):
    """Serves CUDA. What has no RoPE in it is left to inlining, which fuses it well."""

    name = "rope_quant"
    targets = (torch.ops.csa2.apply_rope.default,)

    def why_not(self, node: Any) -> str | None:
        return why_not_cuda(node, FLOAT_DTYPES)

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        from csa2_compiled.passes.kernels.rope_quantize import rope_quantize

        ops = torch.ops.csa2
        x, rotations, inverse = all_arguments(node)
        served, last = [node.target.name()], node
        weight: Any = None
        format_name: Any = None
        eps = 0.0
        if is_call(x, ops.rms_norm.default) and len(x.users) == 1:
            served.insert(0, x.target.name())
            x, weight, eps = all_arguments(x)
        user: Any = next(iter(node.users))
        if len(node.users) == 1 and is_call(user, ops.quantize_dequantize.default):
            served.append(user.target.name())
            last, format_name = user, all_arguments(user)[1]

        def body(x: Tensor, rotations: Tensor, weight: Tensor | None) -> Tensor:
            return rope_quantize(x, rotations, inverse=inverse, format_name=format_name, norm_weight=weight, eps=eps)

        replace_by_trace(graph, last, body, (x, rotations, weight))
        return served
