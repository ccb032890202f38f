"""The kernel passes where their kernels cannot run: what they decline and why, and what the attention pass recognizes.

Graphs are captured as the pass manager gets them, by a pass that stops the compilation there. Devices are looked at
by way of fake tensors, so that nothing here needs CUDA or Triton.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cached_runs import make_config, make_model
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from csa2_compiled import CompiledModel, CSA2Cache, CSA2State, compile_model, masks, ops
from csa2_compiled.passes import (
    Attend,
    CompilerPass,
    Gemv,
    IndexScores,
    InlineNamedOps,
    KVGather,
    PassReport,
    RopeQuant,
    SelectTopk,
    attend,
    gemv,
    kv_gather,
)
from csa2_compiled.passes.inductor import without_autograd_cache
from csa2_compiled.passes.rewrite import (
    all_arguments,
    erase_unused,
    example_of,
    has_symbols,
    is_call,
    replace_by_trace,
    why_not_cuda,
)

aten, csa2 = torch.ops.aten, torch.ops.csa2
FLEX = torch.ops.higher_order.flex_attention

# Window, full with candidates, reuse, reindex within them.
CONFIG = make_config(
    (0, 1, 1, 1), (1,), (1, 3), candidate_source_layer_id=1, candidate_topk_blocks=3, candidate_block_size=2
)
WINDOW, FULL, REUSE, REINDEX = range(4)
TOKENS = 20
NO_CACHE = {"fx_graph_cache": False}
KERNEL_PASSES: tuple[CompilerPass, ...] = (
    SelectTopk(),
    IndexScores(),
    KVGather(),
    Attend(),
    RopeQuant(),
    Gemv(),
)
NOT_CUDA = "the kernel is for CUDA, not cpu"
MANY_ROWS = "more than one row, which a matrix product serves"
# What each pass finds in the candidate source and why it leaves it.
DECLINED = {
    "select_topk": {("csa2::select_topk", NOT_CUDA): 1, ("csa2::candidate_blocks", NOT_CUDA): 1},
    "index_scores": {("csa2::index_scores", NOT_CUDA): 1},
    "kv_gather": {("flex_attention", NOT_CUDA): 1},
    "attend": {},  # nothing trains
    # Of q, the output, the window key, the compressed key, the index key and the index query.
    "rope_quant": {("csa2::apply_rope", NOT_CUDA): 6},
    # The eight projections, and the grouped one.
    "gemv": {("aten::mm", MANY_ROWS): 8, ("aten::bmm", MANY_ROWS): 1},
}


class CapturedError(Exception):
    """The graph is there; nothing more needs compiling."""


class Recorder(CompilerPass):
    """Keeps the first graph that calls FlexAttention and stops the compilation."""

    name = "recorder"
    graph: fx.Graph

    def run(self, graph: fx.Graph) -> PassReport:
        if any(is_call(node, FLEX) for node in graph.nodes):
            self.graph = graph
            raise CapturedError
        return PassReport(self.name)


def compiled_layer(layer_idx: int, passes: str, layout: str, cached: bool = False) -> tuple[CompiledModel, Any, Any]:
    """A compiled layer, and the arguments of a call: 20 tokens, or one after 20 that a cache holds."""
    torch._dynamo.reset()
    model = make_model(CONFIG, torch.float32)
    layers = [block.attn for block in model.layers]
    x, state = torch.randn(1, TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0)), CSA2State()
    past = CSA2Cache(CONFIG, 1, 2 * TOKENS) if cached else None
    with torch.no_grad():
        if past is not None:
            for layer in layers:
                state = layer(x, state, cache=past).state
            past.advance(TOKENS)
            x, state = x[:, :1], CSA2State()
        for layer in layers[:layer_idx]:
            state = layer(x, state, cache=past).state
    layers[layer_idx].layout = layout
    compiled = compile_model(layers[layer_idx], passes=passes, dynamic=False, options=NO_CACHE)
    return compiled, (x, state), {"cache": past}


def capture(layer_idx: int, layout: str = "slots", cached: bool = False) -> fx.Graph:
    """The graph of a call as the passes get it."""
    compiled, arguments, options = compiled_layer(layer_idx, "none", layout, cached)
    recorder = Recorder()
    compiled.manager.passes = (recorder,)
    with torch.no_grad(), without_autograd_cache(), pytest.raises(Exception, match=CapturedError.__name__):
        compiled(*arguments, **options)
    return recorder.graph


graph_of = cache(capture)  # for tests that leave it as it is


def flex_of(graph: fx.Graph) -> Any:
    (flex,) = (node for node in graph.nodes if is_call(node, FLEX))
    return flex


def match(graph: fx.Graph) -> kv_gather._Match:
    return kv_gather._match(graph, flex_of(graph))


def why_not(graph: fx.Graph) -> str:
    with pytest.raises(kv_gather._NoMatchError) as caught:
        match(graph)
    return str(caught.value)


def shape(node: Any) -> list[int]:
    return list(example_of(node).shape)


def trace(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


# Declining.


@pytest.mark.parametrize("compiler_pass", KERNEL_PASSES, ids=lambda p: p.name)
def test_kernel_passes_decline_on_cpu_and_leave_the_graph(compiler_pass: CompilerPass) -> None:
    graph = graph_of(FULL)
    before = str(graph)
    report = compiler_pass.run(graph)
    assert report.name == compiler_pass.name
    assert not report.fired
    assert dict(report.declined) == DECLINED[compiler_pass.name]
    assert str(graph) == before


def test_gemv_would_serve_one_token_but_for_the_device() -> None:
    report = Gemv().run(graph_of(FULL, cached=True))
    assert dict(report.declined) == {("aten::mm", NOT_CUDA): 8, ("aten::bmm", NOT_CUDA): 1}


@pytest.fixture(scope="module")
def compiled_with_all() -> tuple[CompiledModel, Any]:
    compiled, arguments, _ = compiled_layer(FULL, "all", "slots")
    with torch.no_grad(), without_autograd_cache():
        return compiled, compiled(*arguments)


@pytest.mark.slow
def test_compiled_on_cpu_every_kernel_pass_declines(compiled_with_all: tuple[CompiledModel, Any]) -> None:
    compiled, _ = compiled_with_all
    *kernels, inline = compiled.manager.totals()
    assert [report.name for report in kernels] == list(DECLINED)
    assert not any(report.fired for report in kernels)
    assert {report.name: dict(report.declined) for report in kernels} == DECLINED
    assert not inline.declined
    assert inline.fired == Counter(
        {
            "csa2::rms_norm": 4,
            "csa2::apply_rope": 6,
            "csa2::quantize_dequantize": 4,
            "csa2::index_scores": 1,
            "csa2::select_topk": 1,
            "csa2::candidate_blocks": 1,
            "csa2::gather_kv": 2,
        }
    )
    assert f"  declined 6 x csa2::apply_rope: {NOT_CUDA}" in compiled.explain().splitlines()
    assert "kv_gather: rewrote nothing" in compiled.explain().splitlines()


@pytest.mark.slow
def test_declining_changes_no_number(compiled_with_all: tuple[CompiledModel, Any]) -> None:
    _, got = compiled_with_all
    compiled, arguments, _ = compiled_layer(FULL, "inline", "slots")
    with torch.no_grad(), without_autograd_cache():
        expected = compiled(*arguments)
    assert torch.equal(got.hidden_states, expected.hidden_states)
    for name in ("compressed_kv", "index_keys", "topk_indices", "candidates"):
        assert torch.equal(getattr(got.state, name), getattr(expected.state, name)), name


def trace_on_cuda(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    """The graph of a function of fake CUDA tensors."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(s, dtype=dtype, device="cuda") for s in shapes)).graph


def only_call(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = (node for node in graph.nodes if is_call(node, target))
    return node


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "reason"),
    [
        (lambda x, w: x @ w.t(), ((1, 64), (32, 64)), torch.bfloat16, None),
        (lambda x, w: x @ w.t(), ((1, 64), (32, 64)), torch.float32, None),
        (lambda x, w: x @ w.t(), ((1, 64), (32, 64)), torch.float64, "the kernel does not take torch.float64"),
        (lambda x, w: x @ w.t(), ((2, 64), (32, 64)), torch.bfloat16, MANY_ROWS),
        (lambda x, w: x @ w, ((1, 64), (64, 32)), torch.bfloat16, "the weight's input channels are not adjacent"),
        (lambda x, w: x.t() @ w.t(), ((64, 1), (32, 64)), torch.bfloat16, None),
        (lambda x: x @ x, ((3, 3),), torch.bfloat16, MANY_ROWS),
        (lambda x, w: torch.bmm(x, w.mT), ((4, 1, 64), (4, 32, 64)), torch.bfloat16, None),
        (lambda x, w: torch.bmm(x, w.mT), ((4, 65, 64), (4, 32, 64)), torch.bfloat16, MANY_ROWS),
    ],
)
def test_what_gemv_serves(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, reason: str | None
) -> None:
    graph = trace_on_cuda(function, *shapes, dtype=dtype)
    target = aten.bmm.default if len(shapes[0]) == 3 else aten.mm.default
    found = Gemv().why_not(only_call(graph, target))
    assert found == reason if reason is None else str(found).startswith(reason)


def pooled_projection(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.ops.prims.convert_element_type.default(x, torch.float32)
    return wide.view(-1, x.shape[-1]) @ weight.float().t()


@pytest.mark.parametrize(
    ("rows", "dtype", "served"),
    [(1, torch.bfloat16, False), (2, torch.bfloat16, True), (64, torch.bfloat16, True), (65, torch.bfloat16, False),
     (2, torch.float16, False)],
)  # fmt: skip
def test_gemv_serves_a_few_rows_of_a_float32_weight(rows: int, dtype: torch.dtype, served: bool) -> None:
    graph = trace_on_cuda(pooled_projection, (rows, 1, 32), (8, 32), dtype=dtype)
    assert (gemv._few_rows(only_call(graph, aten.mm.default)) is not None) is served


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (32, torch.bfloat16, None),
        (24, torch.bfloat16, "index_head_dim is 24, not a multiple of 16"),
        (32, torch.float64, "the kernel does not take torch.float64"),
    ],
)
def test_what_index_scores_serves(dim: int, dtype: torch.dtype, reason: str | None) -> None:
    graph = trace_on_cuda(
        lambda q, k, w, bound: ops.index_scores(q, k, w, bound.int(), bound.int()),
        *((1, 5, 2, dim), (1, 7, dim), (1, 5, 2), (1, 5)),
        dtype=dtype,
    )
    assert IndexScores().why_not(only_call(graph, csa2.index_scores.default)) == reason


def test_other_dtypes_are_declined_on_cuda() -> None:
    graph = trace_on_cuda(lambda x, r: ops.apply_rope(x, r, False), (1, 5, 32), (1, 5, 8, 2), dtype=torch.float64)
    assert dict(RopeQuant().run(graph).declined) == {("csa2::apply_rope", "the kernel does not take torch.float64"): 1}
    graph = trace_on_cuda(lambda scores: ops.select_topk(scores, None, 4), (1, 5, 9), dtype=torch.float64)
    assert dict(SelectTopk().run(graph).declined) == {
        ("csa2::select_topk", "the kernel does not take torch.float64"): 1
    }
    graph = trace_on_cuda(lambda q: q + 1, (1, 5, 2, 32), dtype=torch.float64)
    with pytest.raises(kv_gather._NoMatchError, match=r"the kernel does not take torch\.float64"):
        kv_gather._check_device(SimpleNamespace(args=[only_call(graph, aten.add.Tensor)]))


@pytest.mark.parametrize(("heads", "dim"), [(129, 64), (64, 513)])
def test_more_heads_or_channels_than_the_kernel_takes(heads: int, dim: int) -> None:
    graph = trace_on_cuda(lambda q: q + 1, (1, 5, heads, dim))
    q = only_call(graph, aten.add.Tensor)
    with pytest.raises(kv_gather._NoMatchError, match=f"{heads} heads of {dim} channels; the kernel takes up to 128"):
        kv_gather._check_tiles(kv_gather._Match(q, heads, dim, None, [], q))


# Training.


def training_step(q: Tensor, sink: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients, as the forward and the backward graph have them."""
    out, logsumexp = ops.attend(q, sink, *sources)
    return out, *ops.attend_backward(out * 2, out, logsumexp, q, sink, *sources)


def training_inputs(sources: int, heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 5, heads, dim, generator=generator).to(dtype), torch.randn(heads, generator=generator)]
    for rows, slots in ((5, 3), (7, 4))[:sources]:
        given.append(torch.randn(2, rows, dim, generator=generator).to(dtype))
        given.append(torch.randint(-1, rows, (2, 5, slots), generator=generator, dtype=torch.int32))
    return given


def trace_training_on_cuda(sources: int = 2, **options: Any) -> fx.Graph:
    inputs = training_inputs(sources, **options)
    with FakeTensorMode():
        return make_fx(training_step)(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs)).graph


@pytest.mark.parametrize("sources", [1, 2])
def test_attend_declines_on_cpu_and_inlining_takes_both_ops(sources: int) -> None:
    inputs = training_inputs(sources)
    module = trace(training_step, *inputs)
    before = str(module.graph)
    report = Attend().run(module.graph)
    assert not report.fired
    assert dict(report.declined) == {("csa2::attend", NOT_CUDA): 1, ("csa2::attend_backward", NOT_CUDA): 1}
    assert str(module.graph) == before
    assert dict(InlineNamedOps(ops.BODIES, {}).run(module.graph).fired) == {
        "csa2::attend": 1,
        "csa2::attend_backward": 1,
    }
    module.graph.lint()
    assert not {csa2.attend.default, csa2.attend_backward.default, getitem} & set(targets(module.graph))
    module.recompile()
    for got, expected in zip(module(*inputs), training_step(*inputs), strict=True):
        torch.testing.assert_close(got, expected)


def need_triton() -> None:
    if pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("Triton's interpreter runs kernels and traces no launch")


def why_training_is_left(monkeypatch: pytest.MonkeyPatch, memory: int = 227 << 10, **options: Any) -> set[str]:
    need_triton()
    monkeypatch.setattr(attend, "shared_memory_per_block", lambda device: memory)
    report = Attend().run(trace_training_on_cuda(**options))
    assert not report.fired
    return {reason for _, reason in report.declined}


def test_what_attend_leaves_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = why_training_is_left(monkeypatch, dtype=torch.float64)
    assert reasons == {"the kernel does not take torch.float64"}
    for heads, dim in ((129, 64), (64, 513)):
        reasons = why_training_is_left(monkeypatch, heads=heads, dim=dim)
        assert reasons == {f"{heads} heads of {dim} channels; the kernel takes up to 128 of 512"}
    reasons = why_training_is_left(monkeypatch, memory=4096, dim=512, dtype=torch.bfloat16)
    assert len(reasons) == 2
    assert all(reason.startswith("no tiles of") for reason in reasons)


def test_attend_leaves_unknown_sizes() -> None:
    graph = trace(training_step, *training_inputs(2), mode="symbolic").graph
    found = [attend.why_not_sizes(only_call(graph, target)) for target in Attend.targets]
    assert found == ["a size is not known while compiling"] * 2


def test_gemv_launches_for_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    monkeypatch.setattr(gemv, "shared_memory_per_block", lambda device: 227 << 10)
    graph = trace_on_cuda(lambda x, a, b: (x @ a.t(), x @ b.t()), (3, 128), (40, 128), (8, 128))
    assert dict(Gemv().run(graph).fired) == {"aten::mm": 2}
    graph.lint()
    assert targets(graph).count(triton_kernel_wrapper_mutation) == 1 + 1  # the products, the sums of shares
    assert [(shape(r), example_of(r).is_contiguous()) for r in output_of(graph)] == [([3, 40], True), ([3, 8], True)]


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (128, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attend_fires_on_cuda(
    heads: int, dim: int, sources: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_triton()
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    monkeypatch.setattr(attend, "shared_memory_per_block", lambda device: 227 << 10)
    graph = trace_training_on_cuda(sources, heads=heads, dim=dim, dtype=dtype)
    results = [(example_of(r).shape, example_of(r).dtype) for r in output_of(graph) if r is not None]
    assert dict(Attend().run(graph).fired) == {"csa2::attend": 1, "csa2::attend_backward": 1}
    graph.lint()
    assert targets(graph).count(triton_kernel_wrapper_mutation) == 1 + 3
    assert not {csa2.attend.default, csa2.attend_backward.default} & set(targets(graph))
    assert [(example_of(r).shape, example_of(r).dtype) for r in output_of(graph)] == results


def output_of(graph: fx.Graph) -> Any:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return output.args[0]


# What the attention pass recognizes.


@pytest.mark.parametrize(
    ("layer_idx", "cached"), [(WINDOW, False), (FULL, False), (REUSE, False), (REINDEX, False), (FULL, True)]
)
def test_the_slots_layout_is_recognized(layer_idx: int, cached: bool) -> None:
    graph = graph_of(layer_idx, cached=cached)
    found = match(graph)
    tokens, heads, dim = (1 if cached else TOKENS), CONFIG.num_attention_heads, CONFIG.head_dim
    assert (found.rotate_q, found.rotate_output) == (True, True)
    assert shape(found.rotations) == [1, tokens, CONFIG.qk_rope_head_dim // 2, 2]
    assert shape(found.q) == shape(found.last) == [1, tokens, heads, dim]
    assert (found.heads, found.dim) == (heads, dim)
    (rope,) = found.q.users
    assert all_arguments(rope) == [found.q, found.rotations, False]
    assert all_arguments(found.last)[1:] == [found.rotations, True]
    assert shape(found.sink) == [heads]
    assert found.sink.op == "placeholder"
    # The slots without the sink's.
    slots = [CONFIG.sliding_window, CONFIG.index_topk][: 1 if layer_idx == WINDOW else 2]
    assert [shape(indices) for _, indices in found.sources] == [[1, tokens, count] for count in slots]
    for rows, indices in found.sources:
        assert example_of(indices).dtype is torch.int32
        assert shape(rows)[::2] == [1, dim]
    if layer_idx in (FULL, REINDEX):
        assert is_call(found.sources[1][1], csa2.select_topk.default)


def test_the_dense_layout_is_not() -> None:
    assert why_not(graph_of(FULL, layout="dense")).startswith("the keys are not gathered slots: the layout is dense")


def test_another_score_mod_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    original = masks.generate_sink_score

    def with_bias(*arguments: Any, **options: Any) -> Any:
        sink = original(*arguments, **options)
        return lambda score, b, h, i, j: sink(score + 0.5, b, h, i, j)

    monkeypatch.setattr(masks, "generate_sink_score", with_bias)
    assert why_not(capture(WINDOW)) == "the score mod is not that of the sink alone"


def test_another_mask_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "generate_slot_mask", lambda filled: lambda b, h, i, j: filled[b, j] & (j < 5))
    assert why_not(capture(WINDOW)) == "the mask mod is not that of the filled slots alone"


def mod_graph(mod: Callable[..., Any], captured: Tensor, *score: Tensor) -> fx.Graph:
    """The graph of a score mod, or of a mask mod where no score is given; what it captures is its last input."""
    indices = [torch.tensor(0) for _ in range(4)]
    with TransformGetItemToIndex():  # as FlexAttention does, so that tensors can be indices
        return trace(lambda *inputs: mod(inputs[-1])(*inputs[:-1]), *score, *indices, captured).graph


SCORE_MODS: dict[str, Callable[..., Any]] = {
    "a bias": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, sink[i], s + 0.5),
    "a factor": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, sink[i], s * 2),
    "a soft cap": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, sink[i], 20 * torch.tanh(s / 20)),
    "another sink": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, sink[i] + 1, s),
    "a sink at another key": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key + 1, sink[i], s),
    "a sink by head": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, sink[h], s),
    "a sink added": lambda sink, key: lambda s, b, h, i, j: torch.where(j == key, s + sink[i], s),
    "no sink": lambda sink, key: lambda s, b, h, i, j: s,
    "the rest replaced": lambda sink, key: lambda s, b, h, i, j: torch.where(j != key, sink[i], s),
}


@pytest.mark.parametrize("name", [None, *SCORE_MODS])
def test_score_mods_are_told_apart(name: str | None) -> None:
    def mod(sink: Tensor) -> Any:
        return masks.generate_sink_score(sink, 0, heads_are_rows=True) if name is None else SCORE_MODS[name](sink, 0)

    graph = mod_graph(mod, torch.ones(2), torch.tensor(1.0))
    assert kv_gather._is_sink_score(graph, (None,)) == (name is None)
    assert not kv_gather._is_sink_score(graph, (None, None))


MASK_MODS: dict[str, Callable[[Tensor], Any]] = {
    "fewer slots": lambda filled: lambda b, h, i, j: filled[b, j] & (j < 5),
    "more slots": lambda filled: lambda b, h, i, j: filled[b, j] | (j == 3),
    "empty slots": lambda filled: lambda b, h, i, j: ~filled[b, j],
    "the first row's slots": lambda filled: lambda b, h, i, j: filled[b * 0, j],
    "every slot": lambda filled: lambda b, h, i, j: j >= 0,
}


@pytest.mark.parametrize("name", [None, *MASK_MODS])
def test_masks_are_told_apart(name: str | None) -> None:
    graph = graph_of(FULL)
    buffers, slots = flex_of(graph).args[8], [indices for _, indices in match(graph).sources]
    mod = masks.generate_slot_mask if name is None else MASK_MODS[name]
    mask = mod_graph(mod, torch.ones(2, 4, dtype=torch.bool))
    assert kv_gather._is_slot_mask(mask, buffers, slots) == (name is None)
    assert not kv_gather._is_slot_mask(mask, buffers, slots[::-1])


@contextmanager
def arguments_of(node: Any, *arguments: Any) -> Iterator[None]:
    """Within it the node has those arguments."""
    before, node.args = node.args, arguments
    try:
        yield
    finally:
        node.args = before


@contextmanager
def another_user(node: Any, target: Any, *arguments: Any) -> Iterator[None]:
    """Within it another node has use for this one."""
    graph = node.graph
    with graph.inserting_after(node):
        user = graph.call_function(target, (node, *arguments))
    try:
        yield
    finally:
        graph.erase_node(user)


def test_other_calls_are_not() -> None:
    graph = graph_of(FULL)
    flex = flex_of(graph)
    q, keys, values, *mods, scale, options, score_buffers, mask_buffers = flex.args
    with arguments_of(flex, q, keys, values, *mods, 2 * scale, options, score_buffers, mask_buffers):
        assert why_not(graph) == f"the scale is {2 * scale}, not 1 / sqrt(head_dim)"
    with arguments_of(flex, q, keys, q, *mods, scale, options, score_buffers, mask_buffers):
        assert why_not(graph) == "keys and values are not the same tensor"
    with another_user(flex, getitem, 1):
        assert why_not(graph) == "more than the output is used"
    match(graph)


def test_other_keys_are_not() -> None:
    graph = graph_of(FULL)
    joined = kv_gather._behind_views(flex_of(graph).args[1])
    window, selected = joined.args[0]
    with arguments_of(joined, [window, selected], 1):
        assert why_not(graph) == "the keys are not gathered slots"
    with arguments_of(joined, [window, selected, selected], 2):
        assert why_not(graph) == "the keys come from 3 sources; the kernel takes two"
    with arguments_of(joined, [window, window.args[0]], 2):
        assert why_not(graph).startswith("the keys are not gathered slots: the layout is dense")
    with arguments_of(joined, [selected, window], 2):
        assert why_not(graph) == "the mask mod is not that of the filled slots alone"
    match(graph)


def test_slots_filled_by_another_rule_are_not() -> None:
    graph = graph_of(FULL)
    filled = kv_gather._behind_views(flex_of(graph).args[8][0])
    assert is_call(filled, aten.index_put.default)
    test, places, *rest = filled.args
    visible, zero = test.args
    for changed in (arguments_of(test, visible, 1), arguments_of(filled, test, [None, places[2], None], *rest)):
        with changed:
            assert why_not(graph) == "the mask mod is not that of the filled slots alone"
    assert zero == 0
    match(graph)


def test_rotations_that_others_need_stay() -> None:
    graph = graph_of(FULL)
    found = match(graph)
    (rope,) = found.q.users
    with another_user(rope, aten.neg.default):
        kept = match(graph)
    assert (kept.q, kept.rotate_q, kept.rotate_output, kept.last) == (rope, False, True, found.last)
    turned_back = found.last.args[0]
    with another_user(turned_back, aten.neg.default):
        kept = match(graph)
    assert (kept.rotate_q, kept.rotate_output) == (True, False)
    (output,) = flex_of(graph).users
    assert kept.last is output


def test_rotations_of_another_kind_stay() -> None:
    graph = graph_of(FULL)
    found = match(graph)
    (rope,) = found.q.users
    x, rotations, _ = found.last.args
    other = next(node for node in graph.nodes if is_call(node, csa2.apply_rope.default) and node.args[1] != rotations)
    for arguments in ((x, rotations, False), (x, other.args[1], True)):
        with arguments_of(found.last, *arguments):
            kept = match(graph)
            assert (kept.rotate_q, kept.rotate_output) == (True, False)
    with arguments_of(rope, found.q, rotations, True):
        kept = match(graph)
    assert (kept.q, kept.rotate_q, kept.rotate_output) == (rope, False, True)


# What passes share.


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_node_is_replaced_by_traced_code() -> None:
    module = trace(lambda x, w: ops.rms_norm(x.exp(), w, 1e-6) + w.neg(), torch.ones(3, 8), torch.ones(8))
    graph = module.graph
    node = only_call(graph, csa2.rms_norm.default)
    x, weight, _ = node.args
    # The body takes what the pass gives it, in any order, constants among it.
    result = replace_by_trace(graph, node, lambda w, none, x, factor: x * factor + w, (weight, None, x.args[0], 3.0))
    graph.lint()
    assert targets(graph) == [aten.mul.Tensor, aten.add.Tensor, aten.neg.default, aten.add.Tensor]  # exp is gone too
    assert example_of(result).shape == (3, 8)
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")
    module.recompile()
    given_x, given_weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(module(given_x, given_weight), given_x * 3 + given_weight - given_weight)


def test_inputs_that_others_need_stay() -> None:
    module = trace(lambda x, w: (ops.rms_norm(x.exp(), w, 1e-6), x.exp() * 2), torch.ones(3, 8), torch.ones(8))
    graph = module.graph
    node = only_call(graph, csa2.rms_norm.default)
    exp = node.args[0]
    double = only_call(graph, aten.mul.Tensor)
    double.args = (exp, 2)
    replace_by_trace(graph, node, lambda w: w.sin(), (node.args[1],))
    graph.lint()
    assert exp in graph.nodes
    assert aten.sin.default in targets(graph)


def test_a_body_may_give_an_input_back() -> None:
    module = trace(lambda x: ops.quantize_dequantize(x.exp(), "fp8") + 1, torch.ones(2, 32))
    node = only_call(module.graph, csa2.quantize_dequantize.default)
    exp = node.args[0]
    assert replace_by_trace(module.graph, node, lambda x, name: x, node.args) is exp
    assert targets(module.graph) == [aten.exp.default, aten.add.Tensor]


def test_bodies_are_decomposed_to_what_inductor_lowers() -> None:
    module = trace(lambda x: ops.quantize_dequantize(x, "fp8"), torch.ones(2, 32))
    node = only_call(module.graph, csa2.quantize_dequantize.default)
    replace_by_trace(module.graph, node, lambda x: torch.nn.functional.silu(x), node.args[:1])
    assert aten.silu.default not in targets(module.graph)
    assert aten.exp.default in targets(module.graph)


def test_symbolic_sizes_go_through_a_replacement() -> None:
    module = trace(lambda x, w: ops.rms_norm(x, w, 1e-6), torch.ones(3, 8), torch.ones(8), mode="symbolic")
    node = only_call(module.graph, csa2.rms_norm.default)
    result = replace_by_trace(module.graph, node, ops.rms_norm_body, node.args)
    assert has_symbols(result)
    module.recompile()
    for rows in (3, 5):
        x, weight = torch.randn(rows, 8), torch.randn(8)
        torch.testing.assert_close(module(x, weight), ops.rms_norm(x, weight, 1e-6))


def test_only_what_is_unused_is_erased() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x.exp()
        return kept.sin(), kept.cos() * kept.cos()

    graph = trace(function, torch.ones(3)).graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    sin, product = output.args[0]
    erase_unused(graph, product)  # it is used
    assert product in graph.nodes
    output.args = ((sin,),)
    erase_unused(graph, product)
    assert targets(graph) == [aten.exp.default, aten.sin.default]
    output.args = ((),)
    erase_unused(graph, sin)
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]
    graph.lint()


def test_arguments_come_in_schema_order_with_defaults() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    own_buffer = csa2.own_buffer.default
    assert all_arguments(graph.call_function(own_buffer, (x,))) == [x, 0]
    assert all_arguments(graph.call_function(own_buffer, (x, 2))) == [x, 2]
    assert all_arguments(graph.call_function(own_buffer, (x,), {"copy": 1})) == [x, 1]
    select = graph.call_function(csa2.select_topk.default, (x,), {"k": 4, "candidates": y})
    assert all_arguments(select) == [x, y, 4]
    assert all_arguments(graph.call_function(csa2.select_topk.default, (x, None, 4))) == [x, None, 4]


def test_symbols_are_found_in_any_node() -> None:
    fixed, free = (
        only_call(trace(lambda x: x + 1, torch.ones(3, 8), mode=mode).graph, aten.add.Tensor)
        for mode in ("fake", "symbolic")
    )
    assert not has_symbols(fixed)
    assert has_symbols(free)
    assert has_symbols(fixed, free)
    assert not has_symbols()


def test_calls_are_told_from_other_arguments() -> None:
    graph = trace(lambda x: x + 1, torch.ones(3)).graph
    add = only_call(graph, aten.add.Tensor)
    assert is_call(add, aten.add.Tensor)
    assert not is_call(add, aten.mul.Tensor)
    assert not any(is_call(other, aten.add.Tensor) for other in (None, 1, add.args[0], [add]))


def test_why_a_kernel_for_cuda_cannot_serve() -> None:
    add = only_call(trace(lambda x: x + 1, torch.ones(3)).graph, aten.add.Tensor)
    assert why_not_cuda(add, (torch.float32,)) == NOT_CUDA
    add = only_call(trace_on_cuda(lambda x: x + 1, (3,)), aten.add.Tensor)
    assert why_not_cuda(add, (torch.bfloat16,)) is None
    assert why_not_cuda(add, (torch.float32, torch.float16)) == "the kernel does not take torch.bfloat16"


def test_graphs_from_a_cache_find_the_opaque_op():
    # Such a graph calls the op in a process in which no pass has run.
    code = "import torch, csa2_compiled.compiled; torch.ops.csa2.hopper_attention.default"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_opaque_op_has_shapes_without_a_device():
    with FakeTensorMode():
        q = torch.empty(2, 3, 64, 512, dtype=torch.bfloat16, device="cuda")
        kv, indices = torch.empty(2, 9, 512, device="cuda"), torch.empty(2, 3, 8, dtype=torch.int32, device="cuda")
        out, logsumexp = csa2.hopper_attention(
            q, torch.empty(64, device="cuda"), kv, indices, None, None, None, True, True
        )
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (logsumexp.shape, logsumexp.dtype) == ((2, 3, 64), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "tokens", "reason"),
    [
        (torch.float32, 64, 512, 4096, "does not take torch.float32"),
        (torch.bfloat16, 32, 512, 4096, "32 heads of 512 channels"),
        (torch.bfloat16, 64, 256, 4096, "64 heads of 256 channels"),
        (torch.bfloat16, 64, 512, 8, "fewer than 64 tokens"),
    ],
)
def test_what_the_hopper_kernel_leaves_is_said(dtype, heads, dim, tokens, reason):
    assert reason in kv_gather.why_not_hopper(torch.empty(0, dtype=dtype), heads, dim, tokens)
