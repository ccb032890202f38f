"""Which products of a few rows the matrix-vector pass puts together, and that the graph computes the same afterwards.

The kernels are replaced by plain products, and the device is not looked at, so that graphs can run on a CPU.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from csa2_compiled.passes import Gemv, PassReport, gemv
from csa2_compiled.passes.inductor import trace_body
from csa2_compiled.passes.rewrite import is_call

aten = torch.ops.aten
SEVERAL_ROWS = "more than one row, which a matrix product serves"
FEW_ROWS = "csa2_compiled.passes.kernels.few_rows"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of each launch that the pass puts in: x and the weights."""
    seen: list[Any] = []
    module: Any = ModuleType(FEW_ROWS)

    def few_rows_products(x: Tensor, weights: list[Tensor], shared_memory: int) -> tuple[Tensor, ...]:
        seen.append((tuple(x.shape), [tuple(weight.shape) for weight in weights]))
        return tuple((x.float().unsqueeze(1) * weight).sum(-1).to(weight.dtype) for weight in weights)

    def grouped_few_rows_product(x: Tensor, weight: Tensor, shared_memory: int) -> Tensor:
        seen.append((tuple(x.shape), [tuple(weight.shape)]))
        return (x.float().transpose(0, 1).unsqueeze(2) * weight).sum(-1).to(weight.dtype)

    module.few_rows_products, module.grouped_few_rows_product = few_rows_products, grouped_few_rows_product
    monkeypatch.setitem(sys.modules, FEW_ROWS, module)
    monkeypatch.setattr(gemv, "why_not_cuda", lambda node, dtypes: None)
    monkeypatch.setattr(gemv, "shared_memory_per_block", lambda device: 227 << 10)
    return seen


def strides(tensor: Tensor) -> list[int]:
    """Those of dimensions of more than one element; the others mean nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


class WithStrides(fx.Interpreter):
    """Runs a graph and checks that its values have the strides that it says."""

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.op == "call_function" and isinstance(value, Tensor):
            assert value.shape == node.meta["val"].shape
            assert strides(value) == strides(node.meta["val"]), node
        return value


def trace(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    mode = FakeTensorMode()
    with mode:
        return trace_body(function, [mode.from_tensor(tensor) for tensor in inputs])


def rewrite(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.Graph, PassReport]:
    """The graph of a function after the pass, and the pass's report; checks that it computes the same as before."""
    graph = trace(function, *inputs)
    report = Gemv().run(graph)
    graph.lint()
    got = WithStrides(fx.GraphModule({}, graph)).run(*inputs)
    torch.testing.assert_close(got, function(*inputs), atol=1e-2, rtol=1e-2)
    return graph, report


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


def test_products_of_the_same_rows_are_one_launch(launches: list[Any]) -> None:
    def layer(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        latent = torch.nn.functional.linear(x, a)
        again = torch.nn.functional.linear(latent, d)  # other rows
        return again, torch.nn.functional.linear(x, b), torch.nn.functional.linear(x, c) + 1

    weights = [randn(n, 32) for n in (32, 16, 8, 24)]
    _, report = rewrite(layer, randn(4, 1, 32), *weights)
    assert launches == [((4, 32), [(32, 32), (16, 32), (8, 32)])]
    assert report.fired == {"aten::mm": 3}
    assert report.declined == {("aten::mm", SEVERAL_ROWS): 1}


def test_no_more_weights_than_a_launch_takes(launches: list[Any]) -> None:
    weights = [randn(n, 32) for n in (8, 16, 24, 32, 40, 48)]
    _, report = rewrite(lambda x, *ws: tuple(x @ w.t() for w in ws), randn(3, 32), *weights)
    assert launches == [((3, 32), [(8, 32), (16, 32), (24, 32), (32, 32)]), ((3, 32), [(40, 32), (48, 32)])]
    assert report.fired == {"aten::mm": 6}


def test_a_weight_that_fills_the_device_is_left_alone(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "_MOST_JOINT_OUTPUTS", 16)
    weights = [randn(n, 32) for n in (16, 24, 8)]
    rewrite(lambda x, *ws: tuple(x @ w.t() for w in ws), randn(3, 32), *weights)
    assert launches == [((3, 32), [(16, 32), (8, 32)])]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, a, b: (x @ a.t(), x.view(2, 64) @ b.t()), [(4, 32), (8, 32), (8, 64)]),
        (lambda x, a, b: (x @ a[:, :32].t(), x.view(2, 64) @ b.t()), [(4, 32), (8, 64), (8, 64)]),
        (lambda x, a, b: (x @ a.t(), x[:2] @ b.t()), [(4, 32), (8, 32), (8, 32)]),
        (lambda x, a, b: (x @ a.t(), x @ (b + 1).t()), [(4, 32), (8, 32), (8, 32)]),
        (lambda x, a, b: (x @ a.t(), x.float() @ b.float().t()), [(4, 32), (8, 32), (8, 32)]),
    ],
    ids=["other channels", "other channels of one stride", "other rows", "a weight that is computed", "another dtype"],
)
def test_what_one_launch_cannot_hold(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], launches: list[Any]
) -> None:
    _, report = rewrite(function, *(randn(*shape) for shape in shapes))
    assert all(len(weights) == 1 for _, weights in launches)  # of a float32 weight
    assert report.fired.total() == len(launches)


def test_a_weight_that_is_computed_before_all_products_stays_apart(launches: list[Any]) -> None:
    def layer(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        made = (b + 1).t()
        return x @ a.t(), x @ made

    rewrite(layer, randn(4, 32), randn(8, 32), randn(8, 32))
    assert not launches


def test_weights_of_other_strides_stay_apart(launches: list[Any]) -> None:
    rewrite(lambda x, a, b: (x @ a.t(), x @ b.t()), randn(4, 32), randn(8, 32), randn(8, 64)[:, :32])
    assert not launches


def test_float32_weights_of_the_same_rows(launches: list[Any]) -> None:
    def pooled(x: Tensor, values: Tensor, gates: Tensor) -> Tensor:
        wide = x.float()
        return torch.cat([torch.nn.functional.linear(wide, weight) for weight in (values, gates)], dim=-1)

    weights = [randn(8, 32, dtype=torch.float32), randn(8, 32, dtype=torch.float32)]
    _, report = rewrite(pooled, randn(4, 1, 32), *weights)
    assert launches == [((4, 32), [(8, 32), (8, 32)])]
    assert report.fired == {"aten::mm": 2}


def test_rows_of_another_shape_before_their_cast_are_declined(launches: list[Any]) -> None:
    _, report = rewrite(lambda x, w: x.float().view(4, 32) @ w.t(), randn(2, 64), randn(8, 32, dtype=torch.float32))
    assert not launches
    assert report.declined == {("aten::mm", SEVERAL_ROWS): 1}


@pytest.mark.parametrize(("rows", "outputs", "channels"), [(4, 8, 0), (4, 0, 32)])
def test_empty_products_are_declined(rows: int, outputs: int, channels: int, launches: list[Any]) -> None:
    rewrite(lambda x, a, b: (x @ a.t(), x @ b.t()), randn(rows, channels), *[randn(outputs, channels)] * 2)
    rewrite(lambda x, w: torch.bmm(x, w.mT) + 1, randn(2, rows, channels), randn(2, outputs, channels))
    assert not launches


def grouped_projection(x: Tensor, weight: Tensor) -> Tensor:
    """As the attention's output projection: x [B, S, G, K], weight [G, N, K] -> [B, S, G N]."""
    return torch.einsum("bsgd,grd->bsgr", x, weight).flatten(2) + 1


@pytest.mark.parametrize("batch", [(3, 1), (1, 3), (2, 2)])
def test_the_copy_after_a_grouped_product_goes(batch: tuple[int, int], launches: list[Any]) -> None:
    inputs = randn(*batch, 2, 32), randn(2, 16, 32)
    assert any(is_call(node, aten.clone.default) for node in trace(grouped_projection, *inputs).nodes)
    graph, report = rewrite(grouped_projection, *inputs)
    rows = batch[0] * batch[1]
    assert launches == [((2, rows, 32), [(2, 16, 32)])]
    assert report.fired == {"aten::bmm": 1}
    assert not any(is_call(node, aten.clone.default) for node in graph.nodes)


def test_grouped_products_with_computed_weights_are_declined(launches: list[Any]) -> None:
    _, report = rewrite(lambda x, w: torch.bmm(x, (w + 1).mT), randn(2, 3, 32), randn(2, 16, 32))
    assert not launches
    assert report.declined == {("aten::bmm", SEVERAL_ROWS): 1}


def test_a_grouped_product_that_is_read_as_it_is_keeps_its_order(launches: list[Any]) -> None:
    graph, _ = rewrite(lambda x, w: (torch.bmm(x, w.mT), x + 1), randn(2, 3, 32), randn(2, 16, 32))
    product = next(iter(reversed(graph.nodes))).args[0][0]
    assert product.meta["val"].is_contiguous()
    assert launches == [((2, 3, 32), [(2, 16, 32)])]


def test_sixteen_bit_rows_that_do_not_begin_at_whole_vectors_are_declined(launches: list[Any]) -> None:
    _, report = rewrite(lambda x, a, b: (x @ a.t(), x @ b.t()), randn(3, 24), randn(8, 24), randn(16, 24))
    assert not launches
    assert report.declined == {("aten::mm", SEVERAL_ROWS): 2}


def test_weights_of_two_dtypes_stay_apart(launches: list[Any]) -> None:
    weights = randn(8, 32), randn(8, 32, dtype=torch.float32)
    rewrite(lambda x, a, b: (x @ a.t(), x.float() @ b.t()), randn(4, 32), *weights)
    assert launches == [((4, 32), [(8, 32)])]  # of the float32 weight


def test_a_view_of_a_weight_that_stands_behind_the_first_product_stays_there(launches: list[Any]) -> None:
    rewrite(lambda x, a, b: (x @ a.t(), x @ b.view(8, 32).t()), randn(4, 32), randn(8, 32), randn(2, 4, 32))
    assert not launches


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (2, 1, 0)])
def test_a_copy_into_another_order_stays(order: tuple[int, ...], launches: list[Any]) -> None:
    rewrite(lambda x, w: torch.bmm(x, w.mT).permute(order).contiguous() + 1, randn(2, 3, 32), randn(2, 16, 32))
    assert len(launches) == 1


def test_a_view_that_the_other_order_has_not_becomes_a_copy(launches: list[Any]) -> None:
    rewrite(lambda x, w: aten.view(torch.bmm(x, w.mT), [-1, 16]).clone() + 1, randn(2, 3, 32), randn(2, 16, 32))
    assert len(launches) == 1


def test_a_grouped_product_with_two_readers_keeps_its_order(launches: list[Any]) -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = torch.bmm(x, w.mT)
        return product.transpose(0, 1).contiguous() + 1, product.exp()

    rewrite(both, randn(2, 3, 32), randn(2, 16, 32))
    assert len(launches) == 1


def test_grouped_products_of_float32_weights_are_declined(launches: list[Any]) -> None:
    rewrite(lambda x, w: torch.bmm(x.float(), w.mT), randn(2, 3, 32), randn(2, 16, 32, dtype=torch.float32))
    assert not launches


def test_strided_rows_of_a_float32_weight_are_declined(launches: list[Any]) -> None:
    weight = randn(8, 32, dtype=torch.float32)
    rewrite(lambda x, a: x.t().float().contiguous() @ a.t(), randn(32, 4), weight)
    rewrite(lambda x, a: x[:, ::2].float() @ a.t(), randn(4, 64), weight)
    assert not launches


def test_weights_with_strided_channels_are_declined(launches: list[Any]) -> None:
    rewrite(lambda x, a, b: (x @ a, x @ b), randn(4, 32), randn(32, 16), randn(32, 16))
    rewrite(lambda x, w: torch.bmm(x, w), randn(2, 4, 32), randn(2, 32, 16))
    assert not launches


def test_a_cpu_is_declined() -> None:
    report = Gemv().run(trace(lambda x, a, b: (x @ a.t(), x @ b.t()), randn(4, 32), randn(8, 32), randn(8, 32)))
    assert not report.fired


def test_sizes_that_are_unknown_are_declined() -> None:
    graph = make_fx(lambda x, w: x @ w.t(), tracing_mode="symbolic")(randn(3, 32), randn(8, 32)).graph
    (node,) = (node for node in graph.nodes if is_call(node, aten.mm.default))
    assert Gemv().why_not(node) == SEVERAL_ROWS
    assert gemv._few_rows(node) is None
