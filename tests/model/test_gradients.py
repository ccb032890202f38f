"""Gradients of the layers, through the plain layout: slopes, straight-through, packing, precision, and the state.

Measured with torch 2.13.0 on CPU (relative Frobenius errors):

| comparison | error |
| --- | --- |
| float64, packed documents against each alone, worst parameter | 1.1e-15 |
| float64, straight-through against x + (quantized - x).detach() | 0 |
| bfloat16 against float64 of the same weights, worst parameter (values land in other FP4 and FP8 bins) | 0.076 |
| compiled against eager, float32, worst parameter | 5.2e-7 |
"""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from golden_files import relative_error
from layer_runs import (
    CONFIGS,
    DOCUMENTS,
    make_inputs,
    make_layers,
    packed_ids,
    padding_mask,
    run_layers,
)
from torch import Tensor
from training_runs import OpCounter, gradients, loss_of, make_batch, make_model

from csa2_compiled import CSA2Attention, CSA2Output, CSA2State, Publication, compile_model, ops, sparse_attention
from csa2_compiled.checkpointing import checkpoint_block
from csa2_compiled.model import CSA2Block
from csa2_compiled.quantization import quantize_dequantize_body
from csa2_compiled.selection import Selection
from csa2_compiled.tokens import lay_out_tokens

SAME = 1e-14  # float64: the same sums in another order
BFLOAT16 = 0.12
COMPILED = 2e-6


def arguments_of(arrangement: str, name: str = "released") -> dict[str, Tensor]:
    if arrangement == "padded":
        return {"attention_mask": padding_mask(48, (48, 21))}
    return {"document_ids": packed_ids(DOCUMENTS[name])} if arrangement == "packed" else {}


def make_double_layers(name: str = "released") -> list[CSA2Attention]:
    return [layer.double() for layer in make_layers(CONFIGS[name])]


def trained_parameters(layers: list[CSA2Attention]) -> dict[str, Tensor]:
    """All but the indexers'."""
    return {
        f"{layer.layer_idx}.{name}": parameter
        for layer in layers
        for name, parameter in layer.named_parameters()
        if "indexer" not in name
    }


def weighted(outputs: list[CSA2Output], seed: int = 2) -> Tensor:
    """A scalar of all outputs with random weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = [output.hidden_states for output in outputs]
    weights = [torch.randn(h.shape, generator=generator, dtype=torch.float64).to(h.dtype) for h in hidden]
    return torch.stack([(h * w).sum() for h, w in zip(hidden, weights, strict=True)]).sum()


@pytest.fixture
def _no_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "quantize_dequantize", lambda x, format_name: x)


# -- slopes


def picks_of(outputs: list[CSA2Output]) -> list[Tensor]:
    return [publication.topk_indices for output in outputs for publication in output.state.publications]


@pytest.mark.usefixtures("_no_quantization")  # whose straight-through gradient is not the slope of its steps
@pytest.mark.parametrize(
    ("name", "arrangement"),
    [("released", "plain"), ("released", "padded"), ("released", "packed"), ("ratio_4", "packed")],
)
def test_gradients_are_the_slopes(name: str, arrangement: str) -> None:
    """Central differences along a random direction of every parameter of every layer, and of every input."""
    layers, arguments = make_double_layers(name), arguments_of(arrangement, name)
    inputs = [x.requires_grad_() for x in make_inputs(CONFIGS[name], 48)]
    outputs = run_layers(layers, inputs, **arguments)
    picks = picks_of(outputs)
    weighted(outputs).backward()
    generator = torch.Generator().manual_seed(3)

    def moved(leaf: Tensor, by: Tensor) -> Tensor:
        original = leaf.clone()
        leaf.add_(by)
        outputs = run_layers(layers, inputs, **arguments)
        leaf.copy_(original)
        assert all(map(torch.equal, picks_of(outputs), picks))  # else there is no slope
        return weighted(outputs)

    leaves = trained_parameters(layers) | {f"x{i}": x for i, x in enumerate(inputs)}
    for leaf_name, leaf in leaves.items():
        direction, step = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), 1e-6
        with torch.no_grad():
            slope = (moved(leaf, step * direction) - moved(leaf, -step * direction)) / (2 * step)
        assert leaf.grad is not None, leaf_name
        got = (leaf.grad * direction).sum()
        torch.testing.assert_close(got, slope, rtol=1e-5, atol=1e-6, msg=lambda m, n=leaf_name: f"{n}: {m}")


def test_consumers_add_up_in_their_source() -> None:
    """Full r=1 (3) is read by itself, a reindex (4) and a reuse layer (5)."""
    layers, inputs = make_double_layers(), make_inputs(CONFIGS["released"], 48)
    sources = list(layers[3].compressor.parameters())
    outputs = run_layers(layers, inputs)
    parts = [
        torch.autograd.grad(outputs[i].hidden_states.square().sum(), sources, retain_graph=True) for i in (3, 4, 5)
    ]
    together = torch.autograd.grad(sum(outputs[i].hidden_states.square().sum() for i in (3, 4, 5)), sources)
    for whole, *shares in zip(together, *parts, strict=True):
        assert all((share != 0).any() for share in shares)
        assert relative_error(sum(shares), whole) <= SAME


def test_straight_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each boundary added a constant to its input."""
    layers, inputs = make_double_layers(), [x.requires_grad_() for x in make_inputs(CONFIGS["released"], 48)]
    leaves = [*trained_parameters(layers).values(), *inputs]

    def run() -> tuple[list[CSA2Output], tuple[Tensor, ...]]:
        outputs = run_layers(layers, inputs)
        return outputs, torch.autograd.grad(weighted(outputs), leaves)

    outputs, got = run()
    monkeypatch.setattr(
        ops, "quantize_dequantize", lambda x, name: x + (quantize_dequantize_body(x.detach(), name) - x.detach())
    )
    expected_outputs, expected = run()
    assert all(map(torch.equal, picks_of(outputs), picks_of(expected_outputs)))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= SAME


@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
def test_the_core_as_one_op_gives_the_same_gradients(arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`csa2::attend`, which serves CUDA, in every layer: by its own backward, and again with a checkpoint."""
    layers, inputs = make_double_layers(), [x.requires_grad_() for x in make_inputs(CONFIGS["released"], 48)]
    arguments = arguments_of(arrangement)
    leaves = [*trained_parameters(layers).values(), *inputs]

    def checkpointed() -> list[CSA2Output]:
        outputs: list[CSA2Output] = []
        for layer, x in zip(layers, inputs, strict=True):
            outputs.append(checkpoint_block(layer, x, outputs[-1].state if outputs else CSA2State(), **arguments))
        return outputs

    expected_outputs = run_layers(layers, inputs, **arguments)
    expected = torch.autograd.grad(weighted(expected_outputs), leaves)
    monkeypatch.setattr(sparse_attention, "_trains_on_cuda", lambda *tensors: torch.is_grad_enabled())
    with OpCounter() as counted:
        outputs = run_layers(layers, inputs, **arguments)
        got = torch.autograd.grad(weighted(outputs), leaves)
    assert counted.calls["csa2.attend"] == counted.calls["csa2.attend_backward"] == len(layers)
    assert counted.calls["csa2.gather_kv"] == 0
    for a, b in zip(outputs, expected_outputs, strict=True):
        assert torch.equal(a.hidden_states, b.hidden_states)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 10 * SAME
    for a, b in zip(torch.autograd.grad(weighted(checkpointed()), leaves), got, strict=True):
        assert torch.equal(a, b)


# -- padding and packing


@pytest.mark.parametrize("arrangement", ["padded", "packed"])
def test_padded_queries_give_no_gradient(arrangement: str) -> None:
    layers, inputs = make_double_layers(), [x.requires_grad_() for x in make_inputs(CONFIGS["released"], 48)]
    arguments = arguments_of(arrangement)
    (ids,) = arguments.values()
    outputs = run_layers(layers, inputs, **arguments)
    pads = torch.stack([output.hidden_states[ids == 0] for output in outputs])
    (pads * torch.randn(pads.shape, dtype=pads.dtype)).sum().backward()
    for name, leaf in (trained_parameters(layers) | {f"x{i}": x for i, x in enumerate(inputs)}).items():
        assert leaf.grad is None or (leaf.grad == 0).all(), name
    assert all(x.grad is not None for x in inputs)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_packed_gradients_are_the_sums_of_each_document_alone(name: str) -> None:
    layers, inputs = make_double_layers(name), [x.requires_grad_() for x in make_inputs(CONFIGS[name], 48)]
    parameters = trained_parameters(layers)
    leaves = [*parameters.values(), *inputs]

    def gradients_of(outputs: list[CSA2Output]) -> tuple[Tensor, ...]:
        loss = torch.stack([output.hidden_states.pow(3).sum() for output in outputs]).sum()
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    packed = gradients_of(run_layers(layers, inputs, document_ids=packed_ids(DOCUMENTS[name])))
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for row, first, length in DOCUMENTS[name]:
        alone = run_layers(layers, [x[row : row + 1, first : first + length] for x in inputs])
        for total, part in zip(sums, gradients_of(alone), strict=True):
            total += part
    for a, b in zip(packed, sums, strict=True):
        assert relative_error(a, b) <= SAME


# -- precision and compilers


def test_bfloat16_gradients() -> None:
    """Against float64 with the same weights, where every visible position is selected, so that no pick can differ."""
    cfg = replace(CONFIGS["released"], index_topk=48, candidate_topk_blocks=24)
    narrow = make_layers(cfg, torch.bfloat16)
    wide = [layer.double() for layer in make_layers(cfg, torch.bfloat16)]
    inputs = make_inputs(cfg, 48, dtype=torch.bfloat16)
    weighted(run_layers(narrow, inputs)).backward()
    weighted(run_layers(wide, [x.double() for x in inputs])).backward()
    expected = trained_parameters(wide)
    errors = {
        name: relative_error(parameter.grad, expected[name].grad)
        for name, parameter in trained_parameters(narrow).items()
    }
    worst = max(errors, key=lambda name: errors[name])
    print(f"worst bfloat16 gradient: {worst} {errors[worst]:.3f}")
    assert errors[worst] <= BFLOAT16


@pytest.mark.slow
@pytest.mark.parametrize("layer_idx", [1, 3, 4], ids=["full r=2", "full r=1", "reindex"])
def test_compiled_layers_have_eager_gradients(layer_idx: int) -> None:
    torch._dynamo.reset()
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg, torch.float32), make_inputs(cfg, 48, dtype=torch.float32)
    ids = packed_ids(DOCUMENTS["released"])
    layer, x = layers[layer_idx], inputs[layer_idx].requires_grad_()
    with torch.no_grad():
        before = run_layers(layers[:layer_idx], inputs[:layer_idx], document_ids=ids)[-1].state

    def step(function: Callable[..., CSA2Output]) -> dict[str, Tensor]:
        named = {"x": x} | trained_parameters([layer])
        output = function(x, before, document_ids=ids)
        names = [name for name in named if layer.ratio or "compressor" not in name]
        return dict(zip(names, torch.autograd.grad(weighted([output]), [named[n] for n in names]), strict=True))

    expected = step(layer)
    got = step(compile_model(layer, dynamic=False))
    errors = {name: relative_error(gradient, expected[name]) for name, gradient in got.items()}
    print(f"worst compiled gradient: {max(errors.values()):.1e}")
    assert max(errors.values()) <= COMPILED, errors


def test_aot_eager_layers_have_eager_gradients() -> None:
    torch._dynamo.reset()
    layer = make_layers(CONFIGS["released"], torch.float32)[3]
    x = make_inputs(CONFIGS["released"], 48, dtype=torch.float32)[0].requires_grad_()
    leaves = [x, *trained_parameters([layer]).values()]
    expected = torch.autograd.grad(weighted([layer(x)]), leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for a, b in zip(torch.autograd.grad(weighted([compiled(x)]), leaves), expected, strict=True):
        assert relative_error(a, b) <= COMPILED


# -- the state


@pytest.fixture
def frozen() -> list[tuple[object, str]]:
    layers, inputs = make_double_layers(), make_inputs(CONFIGS["released"], 12)
    output = run_layers(layers, inputs)[-1]
    publication = output.state.publications[0]
    return [
        (output, "state"),
        (output.state, "publications"),
        (publication, "compressed_kv"),
        (Selection(publication.index_keys, publication.topk_indices, None), "topk_indices"),
        (lay_out_tokens(12, inputs[0].device), "positions"),
    ]


def test_what_goes_from_layer_to_layer_is_frozen(frozen: list[tuple[object, str]]) -> None:
    for value, name in frozen:
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)
        with pytest.raises(FrozenInstanceError):
            delattr(value, name)
    state = CSA2State()
    publication = frozen[2][0]
    assert isinstance(publication, Publication)
    assert state.publish(publication) is not state
    assert state.publications == ()


def test_a_selection_modified_in_place_is_detected() -> None:
    """What a consumer's graph has saved of the state; autograd's version counters see it."""
    layers, inputs = make_double_layers(), make_inputs(CONFIGS["released"], 24)
    output = run_layers(layers, inputs)[-1]
    output.state.publications[0].topk_indices.clamp_(max=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.hidden_states.sum().backward()


@pytest.mark.parametrize("field", ["topk_indices", "compressed_kv"])
def test_a_state_modified_in_place_is_detected_with_checkpoints(field: str) -> None:
    model, (ids, _) = make_model(), make_batch()

    def run_block(block: CSA2Block, *inputs: object) -> CSA2Output:
        output = checkpoint_block(block, *inputs)
        if block.attn.layer_idx == 5:
            with torch.no_grad():
                getattr(output.state.publications[0], field).zero_()
        return output

    loss = loss_of(model(ids, run_block=run_block), ids)
    with pytest.raises(RuntimeError, match=r"modified in place|inplace operation"):
        loss.backward()


def test_a_frozen_indexer_has_no_gradient() -> None:
    model, (ids, _) = make_model(), make_batch()
    for name, gradient in gradients(model, ids).items():
        assert (gradient is None) == ("indexer" in name), name
