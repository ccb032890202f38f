"""The indexer's distillation loss: against a direct formula, slopes, chunk sizes, and a training run.

Measured with torch 2.13.0 on CPU: float64 loss against the formula 3e-15 relative; losses of other chunk sizes against
one chunk 3e-15, their gradients 4e-16.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_files import relative_error
from layer_runs import CONFIGS, DOCUMENTS, make_inputs, make_layers, packed_ids, padding_mask, run_layers
from torch import Tensor
from training_runs import CONFIG, OpCounter, make_batch, make_model

from csa2_compiled import CSA2Attention, CSA2Cache, CSA2InputError, CSA2State, ops
from csa2_compiled.checkpointing import checkpoint_block
from csa2_compiled.distillation import DistillationLosses, distillation_loss, enable_distillation
from csa2_compiled.tokens import lay_out_tokens

STAGES = ("dense", "sparse")
SOURCES = {1: "full, ratio 2", 3: "full, ratio 1, candidates", 4: "reindex"}  # of CONFIGS["released"]
TOKENS = 48


def arguments_of(arrangement: str) -> dict[str, Tensor]:
    if arrangement == "padded":
        return {"attention_mask": padding_mask(TOKENS, (TOKENS, 21))}
    if arrangement == "packed":
        return {"document_ids": packed_ids(DOCUMENTS["released"])}
    return {}


def run(layers: list[CSA2Attention], arrangement: str, stage: Any, chunk_size: int = 128) -> dict[int, Tensor]:
    """The loss of every index source on its own input."""
    inputs = make_inputs(layers[0].cfg, TOKENS)
    arguments = arguments_of(arrangement)
    with torch.no_grad():
        outputs = run_layers(layers, inputs, **arguments)
    tokens = lay_out_tokens(TOKENS, inputs[0].device, **arguments)
    return {i: distillation_loss(layers[i], inputs[i], outputs[i].state, tokens, stage, chunk_size) for i in SOURCES}


def formula(layer: CSA2Attention, x: Tensor, state: CSA2State, arguments: dict[str, Tensor], stage: str) -> Tensor:
    """The definition, query by query; only projections, norms, rotations and quantization are the layer's."""
    cfg, ratio, (batch, num_tokens, _) = layer.cfg, layer.ratio, x.shape
    publication = state.of_ratio(ratio)
    assert publication is not None
    rotations = layer.rotary(lay_out_tokens(num_tokens, x.device, **arguments).positions)
    q_latent = layer.q_norm(layer.wq_a(x))
    q = ops.apply_rope(layer.wq_b(q_latent).unflatten(-1, (cfg.num_attention_heads, -1)), rotations, False)
    window_kv = layer.window_kv(x, rotations)
    index_q = layer.indexer.wq_b(q_latent).unflatten(-1, (cfg.index_n_heads, -1))
    index_q = ops.quantize_dequantize(ops.apply_rope(index_q, rotations, False), "mxfp4")
    weights = layer.indexer.weights_proj(x) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    documents = arguments.get("document_ids", arguments.get("attention_mask", torch.ones(batch, num_tokens)))
    losses = []
    for b in range(batch):
        ids = documents[b].tolist()
        for s in range(num_tokens):
            if ids[s] == 0:
                continue
            first = ids.index(ids[s])
            visible = list(range(first // ratio, first // ratio + (s - first + 1) // ratio))
            if stage == "sparse":
                visible = [t for t in publication.topk_indices[b, s].tolist() if t >= 0]
            if not visible:
                continue
            recent = window_kv[b, max(first, s - cfg.sliding_window + 1) : s + 1]
            compressed = publication.compressed_kv[b, visible]
            logits = q[b, s] @ torch.cat([compressed, recent]).T / math.sqrt(cfg.head_dim)
            shares = torch.cat([logits, layer.attn_sink.double()[:, None]], 1).softmax(1)
            p = shares[:, : len(visible)].sum(0)
            p = p / p.sum()
            scores = ((index_q[b, s] @ publication.index_keys[b, visible].T).relu() * weights[b, s, :, None]).sum(0)
            losses.append((p * (p.log() - scores.softmax(0).log())).sum())
    return torch.stack(losses).mean()


@pytest.fixture(scope="module")
def layers() -> list[CSA2Attention]:
    layers = [layer.double() for layer in make_layers(CONFIGS["released"])]
    for layer in layers:
        layer.requires_grad_(True)  # the attention's too, to see that it gets no gradient
    return layers


@pytest.fixture
def _no_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "quantize_dequantize", lambda x, format_name: x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
def test_values_equal_the_formula(layers: list[CSA2Attention], arrangement: str, stage: str) -> None:
    inputs, arguments = make_inputs(layers[0].cfg, TOKENS), arguments_of(arrangement)
    with torch.no_grad():
        outputs = run_layers(layers, inputs, **arguments)
        got = run(layers, arrangement, stage)
        for i, loss in got.items():
            expected = formula(layers[i], inputs[i], outputs[i].state, arguments, stage)
            assert expected > 1e-3, i
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arrangement", ["plain", "packed"])
def test_chunk_size_changes_nothing(layers: list[CSA2Attention], arrangement: str, stage: str) -> None:
    parameters = [p for i in SOURCES for p in layers[i].indexer.parameters()]

    def result(chunk_size: int) -> tuple[dict[int, Tensor], tuple[Tensor | None, ...]]:
        losses = run(layers, arrangement, stage, chunk_size)
        return losses, torch.autograd.grad(sum(losses.values()), parameters)

    losses, gradients = result(TOKENS)
    for chunk_size in (3, 16, 1000):
        other_losses, other_gradients = result(chunk_size)
        for i, loss in losses.items():
            torch.testing.assert_close(other_losses[i], loss, rtol=1e-13, atol=0)
        for a, b in zip(other_gradients, gradients, strict=True):
            assert relative_error(a, b) <= 1e-13


@pytest.mark.usefixtures("_no_quantization")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
def test_gradients_are_the_slopes(layers: list[CSA2Attention], arrangement: str, stage: str) -> None:
    """Central differences along a random direction of each parameter; picks and keys of other layers stay."""
    inputs, arguments = make_inputs(layers[0].cfg, TOKENS), arguments_of(arrangement)
    with torch.no_grad():
        outputs = run_layers(layers, inputs, **arguments)
    tokens = lay_out_tokens(TOKENS, inputs[0].device, **arguments)
    generator = torch.Generator().manual_seed(3)
    for i in SOURCES:

        def loss(i: int = i) -> Tensor:
            return distillation_loss(layers[i], inputs[i], outputs[i].state, tokens, stage, 16)

        for name, parameter in layers[i].indexer.named_parameters():
            (gradient,) = torch.autograd.grad(loss(), parameter)
            assert (gradient != 0).any(), name
            direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            step, original = 1e-6, parameter.detach().clone()
            with torch.no_grad():
                parameter.copy_(original + step * direction)
                above = loss()
                parameter.copy_(original - step * direction)
                below = loss()
                parameter.copy_(original)
            slope = (above - below) / (2 * step)
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_indexer_has_gradients(stage: Any) -> None:
    model, (ids, arguments) = make_model(), make_batch("packed")
    enable_distillation(model)
    losses = DistillationLosses(stage, chunk_size=8)
    model(ids, run_block=losses.run_block, **arguments)
    assert sorted(losses.by_layer) == [1, 3, 4]
    losses.total().backward()
    for name, parameter in model.named_parameters():
        if "indexer" in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert (parameter.grad != 0).any(), name
        else:
            assert parameter.grad is None, name
    enable_distillation(model, False)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "indexer" in name)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_change_no_bit(stage: Any) -> None:
    model, (ids, arguments) = make_model(), make_batch("padded")
    enable_distillation(model)
    results = []
    for inner in (None, checkpoint_block):
        model.zero_grad()
        losses = DistillationLosses(stage, inner=inner)
        logits = model(ids, run_block=losses.run_block, **arguments)
        (logits.square().mean() + losses.total()).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_of_queries_times_positions_is_made_or_saved(stage: Any) -> None:
    """S = T = 96 and chunks of 4, so that B * S * T is far beyond every other size."""
    model, tokens = make_model(), 96
    enable_distillation(model)
    layer, x = model.layers[3].attn, torch.randn(1, tokens, CONFIG.hidden_size)
    with torch.no_grad():
        state = layer(x).state
    saved, made = [], []

    class Sizes(OpCounter):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(r.untyped_storage().nbytes() // r.element_size() for r in (result,) if isinstance(r, Tensor))
            return result

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    weights = max(p.numel() for p in layer.parameters())
    activations = tokens * max(layer.wq_b.out_features, layer.indexer.wq_b.out_features, CONFIG.hidden_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = distillation_loss(layer, x, state, lay_out_tokens(tokens, x.device), stage, 4)
        assert max(saved) <= activations
    saved.clear()
    with Sizes():
        loss = distillation_loss(layer, x, state, lay_out_tokens(tokens, x.device), stage, 4)
        loss.backward()
    table = layer.rotary.table.numel()
    gathered = 4 * (CONFIG.sliding_window + CONFIG.index_topk) * CONFIG.head_dim
    heads = 4 * tokens * max(CONFIG.num_attention_heads, CONFIG.index_n_heads)
    assert max(made) <= max(weights, activations, table, gathered, heads)


@pytest.mark.parametrize("stage", STAGES)
def test_queries_that_see_nothing_add_nothing(layers: list[CSA2Attention], stage: Any) -> None:
    layer, x = layers[1], make_inputs(layers[0].cfg, 7)[0]
    for mask in (padding_mask(7, (7, 1)), padding_mask(7, (1, 1)), padding_mask(7, (1, 0))):
        tokens = lay_out_tokens(7, x.device, mask)
        with torch.no_grad():
            state = layer(x, attention_mask=mask).state
            loss = distillation_loss(layer, x, state, tokens, stage)
            if mask[0].sum() == 7:
                alone = distillation_loss(layer, x[:1], layer(x[:1]).state, lay_out_tokens(7, x.device), stage)
                torch.testing.assert_close(loss, alone, rtol=1e-13, atol=0)
            else:
                assert loss == 0
        gradients = torch.autograd.grad(
            distillation_loss(layer, x, state, tokens, stage), list(layer.indexer.parameters())
        )
        assert all(gradient.isfinite().all() for gradient in gradients)
    short = x[:, :1]  # T = 0
    with torch.no_grad():
        state = layer(short).state
    loss = distillation_loss(layer, short, state, lay_out_tokens(1, x.device), stage)
    loss.backward()
    assert loss == 0


def recall(layer: CSA2Attention, x: Tensor) -> float:
    """The share of the dense attention's own top K that the layer selects, over queries that have to choose."""
    with torch.no_grad():
        output = layer(x)
        publication = output.state.of_ratio(layer.ratio)
        assert publication is not None
        rotations = layer.rotary(torch.arange(x.shape[1]).unsqueeze(0))
        q = layer.wq_b(layer.q_norm(layer.wq_a(x))).unflatten(-1, (layer.cfg.num_attention_heads, -1))
        logits = torch.einsum("bshd,btd->bsht", ops.apply_rope(q, rotations, False), publication.compressed_kv)
        logits = logits * layer.cfg.head_dim**-0.5
        visible = torch.arange(logits.shape[-1]) < ((torch.arange(x.shape[1]) + 1) // layer.ratio).unsqueeze(1)
        attention = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num().sum(2)
        best = attention.topk(publication.topk_indices.shape[-1]).indices
        chooses = (torch.arange(x.shape[1]) + 1) // layer.ratio > best.shape[-1]
        found = (best.unsqueeze(-1) == publication.topk_indices.unsqueeze(-2)).any(-1)[:, chooses]
    return found.double().mean().item()


@pytest.mark.parametrize("stage", STAGES)
def test_training_lowers_the_loss_and_finds_what_the_attention_wants(stage: Any) -> None:
    torch.manual_seed(0)
    layer = make_model().layers[1].attn
    layer.requires_grad_(False)
    enable_distillation(layer)
    x = torch.randn(2, 64, CONFIG.hidden_size)
    tokens = lay_out_tokens(64, x.device)
    optimizer = torch.optim.SGD(layer.indexer.parameters(), lr=LEARNING_RATE)
    losses, before = [], recall(layer, x)
    for _ in range(50):
        optimizer.zero_grad()
        loss = distillation_loss(layer, x, layer(x).state, tokens, stage)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = recall(layer, x)
    print(f"{stage}: loss {losses[0]:.3f} to {losses[-1]:.3f}, recall {before:.2f} to {after:.2f}")
    assert losses[-1] < 0.7 * losses[0]
    assert after > before + 0.1


LEARNING_RATE = 0.5


def test_bfloat16_is_float32_but_for_rounding() -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, (ids, _) = make_model(dtype), make_batch()
        collected = DistillationLosses()
        with torch.no_grad():
            model(ids, run_block=collected.run_block)
        assert collected.total().dtype == torch.float32
        losses[dtype] = collected.total().item()
    assert math.isclose(losses[torch.float32], losses[torch.bfloat16], rel_tol=0.05)


def test_errors_name_the_argument() -> None:
    model, (ids, _) = make_model(), make_batch()
    with pytest.raises(CSA2InputError, match="stage is 'warm'"):
        DistillationLosses("warm")  # type: ignore[arg-type]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(CSA2InputError, match="chunk_size is"):
            DistillationLosses(chunk_size=bad)  # type: ignore[arg-type]
    with pytest.raises(CSA2InputError, match="enable_distillation"):
        model(ids, run_block=DistillationLosses().run_block)
    with pytest.raises(CSA2InputError, match="no index source ran"):
        DistillationLosses().total()
    cache = CSA2Cache(CONFIG, batch_size=2, max_seq_len=64, dtype=torch.float32)
    with pytest.raises(CSA2InputError, match="cache"):
        model(ids, cache, run_block=DistillationLosses().run_block)
    enable_distillation(model)
    x = torch.randn(1, 8, CONFIG.hidden_size)
    tokens = lay_out_tokens(8, x.device)
    with pytest.raises(CSA2InputError, match="layer 0 is a window layer"):
        distillation_loss(model.layers[0].attn, x, CSA2State(), tokens)
    with pytest.raises(CSA2InputError, match="no publication of compress ratio 2"):
        distillation_loss(model.layers[1].attn, x, CSA2State(), tokens)


def test_the_snippets_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
    assert "2:" in capsys.readouterr().out


def test_it_stands_beside_a_cross_entropy() -> None:
    model, (ids, _) = make_model(), make_batch()
    enable_distillation(model)
    losses = DistillationLosses("sparse")
    logits = model(ids, run_block=losses.run_block)
    assert torch.equal(logits, model(ids))
    (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + losses.total()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
