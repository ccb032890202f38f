"""The matrix-vector pass: a projection of one token, or of a few, reads its weight at the speed of the memory.

before::

    %projected = call_function aten.mm(%row, %transposed_weight)

after::

    %projected = call_function aten.empty([1, 1, 32768])
    call_function triton_kernel_wrapper_mutation(gemv_kernel, %row, %weight, ..., %projected)

Grouped projections (aten.bmm) are served likewise. Products and sums are float32, as cuBLAS has them, in
another order. Of 2 to 64 rows, three kinds are rewritten: grouped ones; those of rows that were bfloat16 with a
float32 weight (the pooled projections of ratio > 1), of which cuBLAS has no exact product; and 16-bit ones that share
their rows (one alone cuBLAS multiplies as fast). Products of the same rows become one launch, where the first of them
stands::

    %q_latent = call_function aten.mm(%rows, %transposed_wq_a)
    %kv = call_function aten.mm(%rows, %transposed_wkv)

    call_function triton_kernel_wrapper_mutation(few_rows_kernel, %rows, %wq_a, %wkv, ..., %q_latent, %kv)
"""

from collections import Counter
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.inductor import shared_memory_per_block
from csa2_compiled.passes.manager import PassReport
from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    NodePass,
    erase_unused,
    example_of,
    fake_mode_of,
    has_symbols,
    is_call,
    replace_by_trace,
    why_not_cuda,
)

aten = torch.ops.aten

_MOST_ROWS = 64  # with more the weights no longer cost most
_MOST_WEIGHTS = 4  # `few_rows.MOST_WEIGHTS`, which needs Triton
_MOST_JOINT_OUTPUTS = 8192  # a larger weight fills the device, in blocks that others would break up
_VIEWS = (aten.reshape.default, aten.view.default, aten.permute.default)


class Gemv(NodePass):
    """Serves CUDA, one row or a few, and weights whose input channels are adjacent in memory."""

    name = "gemv"
    targets = (aten.mm.default, aten.bmm.default)

    def run(self, graph: fx.Graph) -> PassReport:
        few = self._rewrite_few_rows(graph)
        report = super().run(graph)
        report.fired.update(few)
        return report

    def why_not(self, node: Any) -> str | None:
        rows = example_of(node.args[0]).shape[-2]
        if not isinstance(rows, int) or rows != 1:
            return "more than one row, which a matrix product serves"
        return _why_no_kernel(node)

    def rewrite(self, graph: fx.Graph, node: Any) -> list[str]:
        from csa2_compiled.passes.kernels.gemv import gemv

        shape = tuple(example_of(node).shape)

        def body(x: Tensor, transposed_weight: Tensor) -> Tensor:
            if x.dim() == 2:
                x, transposed_weight = x.unsqueeze(0), transposed_weight.unsqueeze(0)
            return gemv(x, transposed_weight.transpose(1, 2)).view(shape)

        replace_by_trace(graph, node, body, node.args)
        return [node.target.name()]

    def _rewrite_few_rows(self, graph: fx.Graph) -> Counter[str]:
        """Rewrite the products of several rows, those of the same rows together; returns how many of which op."""
        fired: Counter[str] = Counter()
        launches: list[list[Any]] = []
        open_launch: dict[Any, list[Any]] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in self.targets:
                continue
            rows = _few_rows(node)
            if rows is None or _why_no_kernel(node) is not None:
                continue
            if node.target is aten.bmm.default:
                if _is_input(node.args[1]):  # weights; keys that the graph computes may be many
                    _rewrite_groups(graph, node)
                    fired[node.target.name()] += 1
                continue
            x, weight = (example_of(argument) for argument in node.args)
            key = _without_views(rows), *x.shape, weight.dtype, weight.stride(1)
            joins = weight.shape[1] <= _MOST_JOINT_OUTPUTS
            launch = open_launch.get(key, []) if joins else []
            if launch and len(launch) < _MOST_WEIGHTS and _stands_before(node.args[1], launch[0]):
                launch.append(node)
                continue
            launches.append([node])
            if joins:
                open_launch[key] = launches[-1]
        for launch in launches:
            if len(launch) > 1 or example_of(launch[0].args[1]).dtype == torch.float32:
                fired[launch[0].target.name()] += len(launch)
                _rewrite_together(graph, launch)
        return fired


def _why_no_kernel(node: Any) -> str | None:
    x, weight = (example_of(argument) for argument in node.args)
    if weight.stride(-2) != 1 or x.stride(-1) != 1:
        return "the weight's input channels are not adjacent in memory"
    return why_not_cuda(node, FLOAT_DTYPES)


def _rewrite_together(graph: fx.Graph, nodes: list[Any]) -> None:
    """One launch, where the first of these products stands, for all of them: aten.mm of the same few rows."""
    from csa2_compiled.passes.kernels.few_rows import few_rows_products

    first, weights = nodes[0], [node.args[1] for node in nodes]
    rows, channels = example_of(first.args[0]).shape
    shared_memory = shared_memory_per_block(example_of(first).device)

    def body(x: Tensor, *transposed_weights: Tensor) -> tuple[Tensor, ...]:
        x = x.reshape(rows, channels)
        return few_rows_products(x, [weight.t() for weight in transposed_weights], shared_memory=shared_memory)

    # `replace_by_trace` takes a node, here one of all the products together.
    with graph.inserting_before(first):
        together = graph.call_function(body, (_few_rows(first), *weights))
        together.meta["val"] = tuple(example_of(node) for node in nodes)
        for i, node in enumerate(nodes):
            item = graph.call_function(getitem, (together, i))
            item.meta["val"] = example_of(node)
            node.replace_all_uses_with(item)
    for node in nodes:
        erase_unused(graph, node)
    replace_by_trace(graph, together, body, together.args)


def _rewrite_groups(graph: fx.Graph, node: fx.Node) -> None:
    """aten.bmm of a few rows [G, M, K], made in the order [M, G, N] where that spares the copy into it."""
    from csa2_compiled.passes.kernels.few_rows import grouped_few_rows_product

    found = _copy_behind_views(node)
    shared_memory = shared_memory_per_block(example_of(node).device)

    def body(x: Tensor, transposed_weight: Tensor) -> Tensor:
        product = grouped_few_rows_product(x, transposed_weight.transpose(1, 2), shared_memory=shared_memory)
        return product.transpose(0, 1).contiguous() if found is None else product.transpose(0, 1)

    replace_by_trace(graph, node, body, node.args)
    if found is not None:
        copy, views = found
        for view, value in views:
            view.meta["val"] = value
            if is_call(view, aten.view.default):
                view.target = aten.reshape.default
        copy.replace_all_uses_with(copy.all_input_nodes[0])
        graph.erase_node(copy)


def _few_rows(node: Any) -> Any:
    """The node of the rows, as they came, of a product of several that a kernel takes; else None."""
    if has_symbols(*node.args):
        return None
    x, weight = (example_of(argument) for argument in node.args)
    if not 1 < x.shape[-2] <= _MOST_ROWS or 0 in (x.numel(), weight.numel()):
        return None
    if weight.dtype != torch.float32:
        whole_vectors = weight.shape[-2] % 16 == 0  # where rows of a weight begin
        return node.args[0] if weight.dtype in (torch.bfloat16, torch.float16) and whole_vectors else None
    source = _without_views(node.args[0])
    if node.target is not aten.mm.default or not is_call(source, torch.ops.prims.convert_element_type.default):
        return None
    value = example_of(source.args[0])
    adjacent = value.stride(-1) == 1 and value.shape[-1] == x.shape[-1]  # also once it has the shape of x
    return source.args[0] if value.dtype == torch.bfloat16 and adjacent else None


def _without_views(node: Any) -> Any:
    while is_call(node, aten.reshape.default) or is_call(node, aten.view.default):
        node = node.args[0]
    return node


def _stands_before(weight: fx.Node, first: fx.Node) -> bool:
    """Whether a weight is an input of the graph; its transpose, where it stands behind `first`, is moved before it.

    Another value may not be there yet, even where its node is: a launch fills a buffer that is a node of its own.
    """
    transposed = is_call(weight, aten.permute.default) or is_call(weight, aten.t.default)
    source = weight.all_input_nodes[0] if transposed else weight
    if not _is_input(source) or not source < first:
        return False
    if not weight < first:
        first.prepend(weight)
    return True


def _is_input(node: fx.Node) -> bool:
    """Whether a value is an input of the graph, or a view of one."""
    while any(is_call(node, view) for view in (*_VIEWS, aten.unsqueeze.default)):
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def _copy_behind_views(node: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, Tensor]]] | None:
    """The copy that makes the value of a bmm contiguous, where one in the order [M, G, N] would be so at once.

    Also the views between them, and what these would stand for then.
    """
    groups, rows, outputs = example_of(node).shape
    views: list[tuple[fx.Node, Tensor]] = []
    with fake_mode_of(example_of(node)):
        value = example_of(node).new_empty(rows, groups, outputs).transpose(0, 1)
        while len(node.users) == 1:
            (node,) = node.users
            if is_call(node, aten.clone.default):
                goes = value.is_contiguous() and example_of(node).is_contiguous()
                return (node, views) if goes else None
            if is_call(node, aten.view.default):
                value = aten.reshape.default(value, *node.args[1:])  # which also takes the other order
            elif is_call(node, aten.reshape.default) or is_call(node, aten.permute.default):
                assert callable(node.target)
                value = node.target(value, *node.args[1:])
            else:
                return None
            views.append((node, value))
    return None
