"""The inlining pass: every named op that is left becomes its plain body.

before::

    %kv = call_function csa2.quantize_dequantize(%x, "fp8")

after::

    %amax = call_function aten.amax(%groups, [-1], True)
    ...
    %kv = call_function prims.convert_element_type(%view, torch.bfloat16)

Inductor then fuses the body like any tensor code.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import all_arguments, first_value, replace_by_trace


class InlineNamedOps(CompilerPass):
    """Puts the body of each named op in place of its node.

    bodies: the named ops and their bodies; where a device has a body of its own (same numbers, other
    operations) `device_bodies` gives it by (op, device type).
    """

    name = "inline"

    def __init__(
        self,
        bodies: Mapping[torch._ops.OpOverload, Callable[..., Any]],
        device_bodies: Mapping[tuple[torch._ops.OpOverload, str], Callable[..., Any]],
    ) -> None:
        self.bodies, self.device_bodies = bodies, device_bodies

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in self.bodies:
                target = cast(torch._ops.OpOverload, node.target)
                body = self.device_bodies.get((target, first_value(node).device.type), self.bodies[target])
                replace_by_trace(graph, node, body, all_arguments(node))
                report.fire(target.name())
        return report
