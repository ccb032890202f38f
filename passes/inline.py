"""The inlining pass: every named op that is left becomes its plain body.

before::

    %kv = call_function csa2.quantize_dequantize(%x, "fp8")

after::

    %amax = call_function aten.amax(%groups, [-1], True)
    ...
    %kv = call_function prims.convert_element_type(%view, torch.bfloat16)

Inductor then fuses the body like any tensor code. The body is traced under the node's own fake mode and
with Inductor's decompositions, without which its lowering fails.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, fx

from csa2_compiled.passes.inductor import fake_mode_of, trace_body
from csa2_compiled.passes.manager import CompilerPass, PassReport


class InlineNamedOps(CompilerPass):
    """Puts the body of each named op in place of its node.

    bodies: the named ops and their bodies; where a device has a body of its own (same numbers, other
    operations) `device_bodies` gives it by (op, device type).
    """

    name = "inline"

    def __init__(
        self,
        bodies: Mapping[torch._ops.OpOverload, Callable[..., Tensor]],
        device_bodies: Mapping[tuple[torch._ops.OpOverload, str], Callable[..., Tensor]],
    ) -> None:
        self.bodies, self.device_bodies = bodies, device_bodies

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in self.bodies:
                self._inline(graph, node)
                report.fire(node.target.name())
        return report

    def _inline(self, graph: fx.Graph, node: fx.Node) -> None:
        arguments = _all_arguments(node)
        is_input = [isinstance(argument, fx.Node) for argument in arguments]
        value = node.meta["val"]
        target = cast(torch._ops.OpOverload, node.target)
        body = self.device_bodies.get((target, value.device.type), self.bodies[target])

        def with_constants(*inputs: Tensor) -> Tensor:
            given = iter(inputs)
            return body(*(next(given) if i else a for i, a in zip(is_input, arguments, strict=True)))

        inputs = [argument for argument in arguments if isinstance(argument, fx.Node)]
        with fake_mode_of(value):
            traced = trace_body(with_constants, [argument.meta["val"] for argument in inputs])
        remaining, copies = iter(inputs), {}
        with graph.inserting_before(node):
            for inner in traced.nodes:
                if inner.op == "placeholder":
                    copies[inner] = next(remaining)
                elif inner.op == "output":
                    node.replace_all_uses_with(copies[inner.args[0]])
                else:
                    copies[inner] = graph.node_copy(inner, copies.__getitem__)
        graph.erase_node(node)


def _all_arguments(node: fx.Node) -> list[object]:
    """A node's arguments in schema order, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    return [
        node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(schema)
    ]
