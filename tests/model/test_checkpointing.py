"""Activation checkpointing: the selection is replayed, and gradients are those without checkpoints, bit for bit."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from golden_files import relative_error
from torch import Tensor, fx
from training_runs import CONFIG, OpCounter, assert_same_bits, gradients, loss_of, make_batch, make_model

from csa2_compiled import (
    CSA2Attention,
    CSA2Cache,
    CSA2InputError,
    CSA2Output,
    CSA2State,
    compile_model,
)
from csa2_compiled.checkpointing import checkpoint_block
from csa2_compiled.selection import SelectionRecord

SOURCES, FULL = 3, 2
COMPILED = replace(
    CONFIG,
    num_hidden_layers=3,
    compress_ratios=(1, 1, 1),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0, 1),
    candidate_source_layer_id=0,
)
INDEXER_OPS = ("index_scores", "select_topk", "candidate_blocks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
def test_gradients_equal_those_without_checkpoints(arrangement: str, dtype: torch.dtype) -> None:
    model, (ids, arguments) = make_model(dtype), make_batch(arrangement)
    expected = gradients(model, ids, **arguments)
    assert_same_bits(gradients(model, ids, run_block=checkpoint_block, **arguments), expected)


def test_the_indexer_does_not_run_again() -> None:
    model, (ids, _) = make_model(), make_batch()
    with OpCounter() as forward:
        loss = loss_of(model(ids, run_block=checkpoint_block), ids)
    with OpCounter() as backward:
        loss.backward()
    assert {name: forward.calls[f"csa2.{name}"] for name in INDEXER_OPS} == {
        "index_scores": SOURCES,
        "select_topk": SOURCES,
        "candidate_blocks": 1,
    }
    for name in INDEXER_OPS:
        assert backward.calls[f"csa2.{name}"] == 0, name
    # Index keys and index queries, too: only window keys and compressed keys are quantized again.
    assert forward.calls["csa2.quantize_dequantize"] == len(model.layers) + FULL + FULL + SOURCES
    assert backward.calls["csa2.quantize_dequantize"] == len(model.layers) + FULL
    # And the rest does run again.
    assert backward.calls["csa2.gather_kv"] == forward.calls["csa2.gather_kv"] > 0


def test_recomputation_replays_the_record_and_does_not_select_anew() -> None:
    """Even when the indexer's weights have changed in between."""
    model, (ids, _) = make_model(), make_batch()
    expected = gradients(model, ids)
    model.zero_grad()
    loss = loss_of(model(ids, run_block=checkpoint_block), ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                parameter.neg_()
    loss.backward()
    assert_same_bits({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


def test_fewer_activations_are_saved() -> None:
    model, (ids, _) = make_model(), make_batch()

    def saved_elements(run_block: Any) -> int:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(ids, run_block=run_block)
        assert logits.requires_grad
        return sum(seen.values())

    assert saved_elements(checkpoint_block) < 0.1 * saved_elements(None)


def test_backward_twice() -> None:
    model, (ids, _) = make_model(), make_batch()
    for must_save in ((), (torch.ops.aten.mm.default,)):
        run_block = partial(checkpoint_block, must_save=must_save)
        loss = loss_of(model(ids, run_block=run_block), ids)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True):
            assert torch.equal(a, b)


def test_ops_that_must_be_saved() -> None:
    model, (ids, _) = make_model(), make_batch()
    expected = gradients(model, ids)
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.csa2.gather_kv.default)
    run_block = partial(checkpoint_block, must_save=products)
    assert_same_bits(gradients(model, ids, run_block=run_block), expected)

    def products_in_backward(run: Any) -> Counter[str]:
        loss = loss_of(model(ids, run_block=run), ids)
        with OpCounter() as backward:
            loss.backward()
        return backward.calls

    without, everything, saving = map(products_in_backward, (None, checkpoint_block, run_block))
    for name in ("aten.mm", "aten.bmm"):
        assert saving[name] == without[name] < everything[name], name
    assert saving["csa2.gather_kv"] == 0


@pytest.mark.parametrize("bad", [torch.ops.aten.mm, torch.mm, "aten.mm"])
def test_must_save_takes_overloads(bad: Any) -> None:
    model, (ids, _) = make_model(), make_batch()
    with pytest.raises(CSA2InputError, match="must_save holds"):
        model(ids, run_block=partial(checkpoint_block, must_save=[bad]))


def test_single_layers() -> None:
    model = make_model()
    layers = [block.attn for block in model.layers]
    x = torch.randn(2, 32, CONFIG.hidden_size, requires_grad=True)
    mask = make_batch("padded")[1]["attention_mask"]

    def run(checkpointed: bool) -> list[Tensor]:
        state, total = CSA2State(), torch.zeros(())
        for layer in layers:
            if checkpointed:
                output = checkpoint_block(layer, x, state, attention_mask=mask)
            else:
                output = layer(x, state, attention_mask=mask)
            state, total = output.state, total + output.hidden_states.square().sum()
        leaves = [x, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]
        return list(torch.autograd.grad(total, leaves))

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_without_gradients_or_with_a_cache_the_block_just_runs() -> None:
    model, (ids, _) = make_model(), make_batch()
    with torch.no_grad():
        assert torch.equal(model(ids, run_block=checkpoint_block), model(ids))
    caches = [CSA2Cache(CONFIG, batch_size=2, max_seq_len=64, dtype=torch.float32) for _ in range(2)]
    got = model(ids, caches[0], run_block=checkpoint_block)
    assert torch.equal(got, model(ids, caches[1]))
    assert caches[0].record.most == ids.shape[1]


def test_a_record_does_not_go_with_a_cache() -> None:
    layer = CSA2Attention(CONFIG, 1)
    cache = CSA2Cache(CONFIG, batch_size=1, max_seq_len=64, dtype=torch.float32)
    with pytest.raises(CSA2InputError, match="record"):
        layer(torch.randn(1, 4, CONFIG.hidden_size), cache=cache, record=SelectionRecord())


# -- compiled


def train_step_graphs(function: Any, *inputs: Any) -> tuple[Any, list[fx.GraphModule], list[fx.GraphModule]]:
    """The function's result under aot_eager's partitioner, and the forward and backward graphs it made."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forwards: list[fx.GraphModule] = []
    backwards: list[fx.GraphModule] = []

    def keep(graphs: list[fx.GraphModule]) -> Any:
        def compiler(graph: fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(forwards), bw_compiler=keep(backwards), partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    result.backward()
    return result, forwards, backwards


def ops_of(graphs: list[fx.GraphModule]) -> Counter[str]:
    return Counter(str(node.target).removesuffix(".default") for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize(
    "must_save",
    [
        pytest.param((), id="selections"),
        pytest.param((torch.ops.aten.bmm.default,), id="and products", marks=pytest.mark.slow),
    ],
)
def test_compiled_backward_graph_has_no_indexer(must_save: Any) -> None:
    model, (ids, _) = make_model(cfg=COMPILED), make_batch()
    expected = gradients(model, ids)
    model.zero_grad()
    run_block = partial(checkpoint_block, must_save=must_save) if must_save else checkpoint_block

    def step(ids: Tensor) -> Tensor:
        return loss_of(model(ids, run_block=run_block), ids)

    _, forwards, backwards = train_step_graphs(step, ids)
    forward, backward = ops_of(forwards), ops_of(backwards)
    for name in INDEXER_OPS:
        assert forward[f"csa2.{name}"] > 0, name
        assert backward[f"csa2.{name}"] == 0, name
    # What a checkpoint is for: the backward graph computes the blocks again, each window at least. (Gathers that two
    # blocks share are one in a graph of the whole model, and are kept.)
    assert backward["csa2.gather_kv"] >= len(model.layers)
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("regional", [False, True])
def test_inductor(regional: bool) -> None:
    """Gradients are as near to float64 as eager float32 ones.

    Worst relative errors measured (torch 2.13, CPU): eager 2.4e-6, one graph 2.7e-6, a region a block 3.8e-6.
    """
    torch._dynamo.reset()
    model, (ids, arguments) = make_model(cfg=COMPILED), make_batch("packed")
    exact = gradients(make_model(cfg=COMPILED).double(), ids, **arguments)
    eager = worst_error(gradients(model, ids, **arguments), exact)
    compiled = compile_model(model, regional=regional, dynamic=False, run_block=checkpoint_block)
    model.zero_grad()
    loss_of(compiled(ids, **arguments), ids).backward()
    got = worst_error({name: parameter.grad for name, parameter in model.named_parameters()}, exact)
    print(f"worst relative error of a gradient: compiled {got:.1e}, eager {eager:.1e}")
    assert got <= 3 * eager


def worst_error(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    errors = []
    for name, gradient in expected.items():
        other = got[name]
        assert (other is None) == (gradient is None), name
        if gradient is not None and other is not None:
            errors.append(relative_error(other, gradient))
    return max(errors)


def test_output_type() -> None:
    model = make_model()
    x = torch.randn(2, 8, CONFIG.hidden_size)
    assert isinstance(checkpoint_block(model.layers[0].attn, x), CSA2Output)
