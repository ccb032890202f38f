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

from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import all_arguments, is_call, replace_by_trace, why_not_cuda

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RopeQuant(CompilerPass):
    """Serves CUDA. What has no RoPE in it is left to inlining, which fuses it well."""

    name = "rope_quant"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.csa2.apply_rope.default:
                reason = why_not_cuda(node, _DTYPES)
                if reason is None:
                    for name in self._rewrite(graph, node):
                        report.fire(name)
                else:
                    report.decline(node.target.name(), reason)
        return report

    def _rewrite(self, graph: fx.Graph, rope: Any) -> list[str]:
        from csa2_compiled.passes.kernels.rope_quantize import rope_quantize

        ops = torch.ops.csa2
        x, rotations, inverse = all_arguments(rope)
        served, last = [rope.target.name()], rope
        weight: Any = None
        format_name: Any = None
        eps = 0.0
        if is_call(x, ops.rms_norm.default) and len(x.users) == 1:
            served.insert(0, x.target.name())
            x, weight, eps = all_arguments(x)
        user: Any = next(iter(rope.users))
        if len(rope.users) == 1 and is_call(user, ops.quantize_dequantize.default):
            served.append(user.target.name())
            last, format_name = user, all_arguments(user)[1]

        def body(x: Tensor, rotations: Tensor, weight: Tensor | None) -> Tensor:
            return rope_quantize(x, rotations, inverse=inverse, format_name=format_name, norm_weight=weight, eps=eps)

        replace_by_trace(graph, last, body, (x, rotations, weight))
        return served
