"""What passes share: putting traced code in place of a node, and reading a graph around it."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.inductor import argument_names_and_defaults, fake_mode_of, is_erased, trace_body
from csa2_compiled.passes.manager import CompilerPass, PassReport

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that kernels take


class NodePass(CompilerPass):
    """A pass that looks at the calls of certain targets one by one, and rewrites or declines each."""

    targets: tuple[torch._ops.OpOverload, ...]

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in self.targets:
                reason = self.why_not(node)
                if reason is None:
                    for name in self.rewrite(graph, node):
                        report.fire(name)
                else:
                    report.decline(node.target.name(), reason)
        return report

    @abstractmethod
    def why_not(self, node: Any) -> str | None:
        """Why a node is left as it is; None when it can be rewritten."""

    @abstractmethod
    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        """Rewrite a node; returns the names of the ops that went with it."""


def replace_by_trace(graph: fx.Graph, node: fx.Node, body: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Trace ``body(*arguments)``, where nodes stand for their values, in place of `node`; returns its result's node.

    The body is traced under the node's own fake mode and with Inductor's decompositions, without which its lowering
    fails. `node` goes, with everything that only it needed. Where `node` has several results the body returns a tuple
    of them, and a tuple of nodes is returned.
    """
    is_input = [isinstance(argument, fx.Node) for argument in arguments]
    inputs = [argument for argument in arguments if isinstance(argument, fx.Node)]

    def with_constants(*values: Tensor) -> Any:
        given = iter(values)
        return body(*(next(given) if i else a for i, a in zip(is_input, arguments, strict=True)))

    with fake_mode_of(first_value(node)):
        traced = trace_body(with_constants, [example_of(argument) for argument in inputs])
    remaining, copies = iter(inputs), {}
    with graph.inserting_before(node):
        for inner in traced.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(remaining)
            elif inner.op == "output":
                result = fx.map_arg(inner.args[0], copies.__getitem__)
            else:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            assert is_call(item, getitem)
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    erase_unused(graph, node)
    return result


def example_of(node: fx.Node) -> Any:
    """The example value that a node stands for."""
    return node.meta["val"]


def first_value(node: fx.Node) -> Any:
    """The example value that a node stands for, the first of them where there are several."""
    value = example_of(node)
    return value[0] if isinstance(value, tuple | list) else value


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing uses, and then what only it needed."""
    waiting = [node]
    while waiting:
        unused = waiting.pop()
        if unused.users or unused.op in ("placeholder", "output") or is_erased(unused):
            continue
        inputs = unused.all_input_nodes
        graph.erase_node(unused)
        waiting += inputs


def is_call(node: Any, target: Any) -> bool:
    """Whether an argument is a node that calls `target`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def all_arguments(node: fx.Node) -> list[Any]:
    """A node's arguments in schema order, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return [
        node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
        for i, (name, default) in enumerate(argument_names_and_defaults(node.target))
    ]


def why_not_cuda(node: fx.Node, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why a kernel for CUDA and these dtypes cannot make `node`'s value; None when it can."""
    value = first_value(node)
    if value.device.type != "cuda":
        return f"the kernel is for CUDA, not {value.device.type}"
    first = node.all_input_nodes[0]
    dtype = example_of(first).dtype
    if dtype not in dtypes:
        return f"the kernel does not take {dtype}"
    return None


def has_symbols(*nodes: fx.Node) -> bool:
    """Whether any of these values has a size that is not known while compiling."""
    return any(not isinstance(size, int) for node in nodes for size in example_of(node).shape)
