"""The eager attention layer, all four roles, through its public call: against the oracle and against itself.

Measured with torch 2.13.0 on CPU over all cases here (relative Frobenius error, worst layer):

| comparison | output | keys | selections |
| --- | --- | --- | --- |
| float64, layer against oracle | 3.7e-16 | 0 | equal |
| float64, packed or padded against each document alone | 7.4e-16 | 0 | equal |
| float32, dense or slots against plain | 1.8e-7 | 0 | equal |
| float32 against float64, without quantization | 3.5e-7 | | |
"""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import torch.nn.functional as F
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
from oracle import Oracle, OracleResult
from torch import Tensor

from csa2_compiled import (
    AttentionLayout,
    CSA2Attention,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2Output,
    CSA2State,
    LayerRole,
    Publication,
    ops,
)

SAME = 1e-14  # float64: the same computation in another order or on other shapes
FLOAT32 = 1e-6  # between layouts, and from float64
FLEX_LAYOUTS = (AttentionLayout.DENSE, AttentionLayout.SLOTS)


def run_oracle(layers: list[CSA2Attention], inputs: list[Tensor], **arguments: Tensor) -> list[OracleResult]:
    cfg = layers[0].cfg
    yarn = cfg.rope_scaling
    args = {
        "norm_eps": cfg.rms_norm_eps,
        "compress_ratios": cfg.compress_ratios,
        "n_heads": cfg.num_attention_heads,
        "head_dim": cfg.head_dim,
        "rope_head_dim": cfg.qk_rope_head_dim,
        "rope_theta": cfg.rope_theta,
        "compress_rope_theta": cfg.compress_rope_theta,
        "original_seq_len": yarn.original_max_position_embeddings if yarn else 0,
        "rope_factor": yarn.factor if yarn else 1.0,
        "beta_fast": yarn.beta_fast if yarn else 32.0,
        "beta_slow": yarn.beta_slow if yarn else 1.0,
        "o_groups": cfg.o_groups,
        "o_lora_rank": cfg.o_lora_rank,
        "window_size": cfg.sliding_window,
        "kv_source_layers": cfg.kv_source_layer_ids,
        "index_source_layers": cfg.index_source_layer_ids,
        "index_n_heads": cfg.index_n_heads,
        "index_head_dim": cfg.index_head_dim,
        "index_topk": cfg.index_topk,
        "candidate_source_layer": cfg.candidate_source_layer_id,
        "candidate_topk_blocks": cfg.candidate_topk_blocks,
        "candidate_block_size": cfg.candidate_block_size,
    }
    weights = {
        f"layers.{layer.layer_idx}.attn.{name}": value for layer in layers for name, value in layer.state_dict().items()
    }
    with torch.no_grad():
        return Oracle(args, weights).stack(inputs, **arguments)


def publication_of(layer: CSA2Attention, output: CSA2Output) -> Publication:
    publication = output.state.of_ratio(layer.ratio)
    assert publication is not None
    return publication


def assert_equals_oracle(
    layers: list[CSA2Attention], outputs: list[CSA2Output], expected: list[OracleResult], real: Tensor
) -> None:
    """Outputs, keys, selections and candidates of every layer; real: bool [B, S], where tokens are."""
    for layer, output, oracle in zip(layers, outputs, expected, strict=True):
        where = f"layer {layer.layer_idx}"
        assert relative_error(output.hidden_states, oracle.output) <= SAME, where
        assert (output.hidden_states[~real] == 0).all(), where
        if layer.ratio == 0:
            continue
        got, wanted = publication_of(layer, output), oracle.state[layer.ratio]
        assert got.topk_indices.dtype == torch.int32
        assert torch.equal(got.topk_indices, wanted.topk_indices), where
        groups = real.shape[1] // layer.ratio
        whole = real[:, : groups * layer.ratio].unflatten(1, (groups, layer.ratio)).all(2)
        for name in ("compressed_kv", "index_keys"):
            # Groups with a pad are visible to nobody; what stands there does not matter.
            assert relative_error(getattr(got, name)[whole], getattr(wanted, name)[whole]) <= SAME, (where, name)
        if wanted.candidates is not None:
            assert got.candidates is not None
            # Beyond a document's last whole group a kept block may go on; nobody sees that.
            seen = expected[layer.cfg.candidate_source_layer_id].scores > -torch.inf
            seen = seen | real.all()
            assert torch.equal(got.candidates & seen, wanted.candidates & seen), where
        else:
            assert got.candidates is None, where


@pytest.fixture
def _no_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "quantize_dequantize", lambda x, format_name: x)


# -- plain rows


@pytest.mark.parametrize("tokens", [1, 2, 7, 41])  # S < r, T = 0; T < K; T > K with a ragged last group
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_equal_the_oracle(name: str, tokens: int) -> None:
    cfg = CONFIGS[name]
    layers, inputs = make_layers(cfg), make_inputs(cfg, tokens)
    outputs = run_layers(layers, inputs)
    expected = run_oracle(layers, inputs)
    assert_equals_oracle(layers, outputs, expected, torch.ones(2, tokens, dtype=torch.bool))
    for layer, output in zip(layers, outputs, strict=True):
        if layer.ratio:
            count = min(cfg.index_topk, tokens // layer.ratio)
            assert publication_of(layer, output).topk_indices.shape == (2, tokens, count)


def test_every_role_is_covered() -> None:
    assert set(CONFIGS["released"].layer_roles) == set(LayerRole)
    ratios = {ratio for cfg in CONFIGS.values() for ratio in cfg.compress_ratios}
    assert ratios == {0, 1, 2, 3, 4, 8}


def test_interleaved_ratios_read_their_own_source() -> None:
    cfg = CONFIGS["interleaved"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 24)
    outputs = run_layers(layers, inputs)
    full_2, full_1, reuse_2, reuse_1 = (output.state for output in outputs)
    assert [p.compress_ratio for p in full_1.publications] == [1, 2]
    for state in (reuse_2, reuse_1):
        assert state.of_ratio(2) is full_2.of_ratio(2)
        assert state.of_ratio(1) is full_1.of_ratio(1)
    for changed, reader, unmoved in ((0, 2, 3), (1, 3, 2)):
        moved = run_layers(layers, [x.flip(1) if i == changed else x for i, x in enumerate(inputs)])
        assert not torch.equal(moved[reader].hidden_states, outputs[reader].hidden_states)
        assert torch.equal(moved[unmoved].hidden_states, outputs[unmoved].hidden_states)


def test_rows_of_a_batch_do_not_mix() -> None:
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 20, batch=3)
    together = run_layers(layers, inputs)
    for row in range(3):
        alone = run_layers(layers, [x[row : row + 1] for x in inputs])
        for a, b in zip(together, alone, strict=True):
            assert relative_error(a.hidden_states[row], b.hidden_states[0]) <= SAME


def test_later_tokens_change_nothing() -> None:
    """Also where they finish the group that a token began."""
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 24)
    whole = run_layers(layers, inputs)
    for length in (1, 6, 7, 15):
        prefix = run_layers(layers, [x[:, :length] for x in inputs])
        for layer, a, b in zip(layers, prefix, whole, strict=True):
            assert relative_error(a.hidden_states, b.hidden_states[:, :length]) <= SAME, (layer.layer_idx, length)


# -- padding and packing


def assert_equals_alone(
    layers: list[CSA2Attention],
    outputs: list[CSA2Output],
    alone: list[CSA2Output],
    row: int,
    first: int,
) -> None:
    """One document, which starts at token `first` of a row, against the run of it alone."""
    for layer, output, single in zip(layers, outputs, alone, strict=True):
        length = single.hidden_states.shape[1]
        queries = slice(first, first + length)
        where = f"layer {layer.layer_idx}, row {row}, token {first}"
        assert relative_error(output.hidden_states[row, queries], single.hidden_states[0]) <= SAME, where
        if layer.ratio == 0:
            continue
        packed, own = publication_of(layer, output), publication_of(layer, single)
        offset, groups = first // layer.ratio, length // layer.ratio
        picks, own_picks = packed.topk_indices[row, queries], own.topk_indices[0]
        own_picks = torch.where(own_picks >= 0, own_picks + offset, -1)
        assert torch.equal(picks[:, : own_picks.shape[1]], own_picks), where
        assert (picks[:, own_picks.shape[1] :] == -1).all(), where
        for name in ("compressed_kv", "index_keys"):
            keys = getattr(packed, name)[row, offset : offset + groups]
            assert relative_error(keys, getattr(own, name)[0]) <= SAME, (where, name)
        if own.candidates is not None:
            assert packed.candidates is not None
            position = torch.arange(groups)
            visible = position < ((torch.arange(length) + 1) // layer.ratio).unsqueeze(1)
            blocks = packed.candidates[row, queries, offset : offset + groups]
            assert torch.equal(blocks & visible, own.candidates[0] & visible), where


@pytest.mark.parametrize("name", DOCUMENTS)
def test_packed_documents_equal_the_oracle_and_each_alone(name: str) -> None:
    cfg = CONFIGS[name]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 48)
    ids = packed_ids(DOCUMENTS[name])
    real = ids != 0
    outputs = run_layers(layers, inputs, document_ids=ids)
    assert_equals_oracle(layers, outputs, run_oracle(layers, inputs, document_ids=ids), real)
    for row, first, length in DOCUMENTS[name]:
        alone = run_layers(layers, [x[row : row + 1, first : first + length] for x in inputs])
        assert_equals_alone(layers, outputs, alone, row, first)
    # What stands at the pads, and a mask besides that says the same, change no bit.
    poisoned = run_layers(
        layers,
        [x.masked_fill(~real.unsqueeze(-1), torch.nan) for x in inputs],
        document_ids=ids,
        attention_mask=real,
    )
    for layer, a, b in zip(layers, outputs, poisoned, strict=True):
        assert torch.equal(a.hidden_states, b.hidden_states), layer.layer_idx


@pytest.mark.parametrize("lengths", [(33, 20), (1, 32), (8, 0)])
@pytest.mark.parametrize("name", CONFIGS)
def test_right_padding_equals_the_oracle_and_the_shorter_run(name: str, lengths: tuple[int, int]) -> None:
    cfg = CONFIGS[name]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 33)
    mask = padding_mask(33, lengths)
    outputs = run_layers(layers, inputs, attention_mask=mask)
    assert_equals_oracle(layers, outputs, run_oracle(layers, inputs, attention_mask=mask), mask != 0)
    for row, length in enumerate(lengths):
        if length:
            alone = run_layers(layers, [x[row : row + 1, :length] for x in inputs])
            assert_equals_alone(layers, outputs, alone, row, 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8], ids=str)
def test_mask_and_ids_of_other_dtypes(dtype: torch.dtype) -> None:
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 12)
    mask = padding_mask(12, (12, 7))
    expected = run_layers(layers, inputs, attention_mask=mask)
    for argument in ("attention_mask", "document_ids"):  # one document a row is what a mask says
        got = run_layers(layers, inputs, **{argument: mask.to(dtype)})
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.hidden_states, b.hidden_states), argument


@pytest.mark.parametrize("layout", AttentionLayout)
def test_padded_queries_give_zero(layout: AttentionLayout) -> None:
    """Also where pads hold NaN, which only the dense layout lets through to tokens: it multiplies them by 0."""
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg, torch.float32), make_inputs(cfg, 24, dtype=torch.float32)
    mask = padding_mask(24, (24, 5))
    for layer in layers:
        layer.layout = layout
    for pad in (0.0, torch.nan):
        filled = [x.masked_fill(mask.unsqueeze(-1) == 0, pad) for x in inputs]
        with torch.no_grad():
            outputs = run_layers(layers, filled, attention_mask=mask)
        for output in outputs:
            assert (output.hidden_states[mask == 0] == 0).all()
            if pad == 0 or layout is not AttentionLayout.DENSE:
                assert output.hidden_states.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_padded_tokens_get_no_gradient(packed: bool) -> None:
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 48)
    inputs = [x.requires_grad_() for x in inputs]
    if packed:
        ids = packed_ids(DOCUMENTS["released"])
        real, outputs = ids != 0, run_layers(layers, inputs, document_ids=ids)
    else:
        mask = padding_mask(48, (48, 21))
        real, outputs = mask != 0, run_layers(layers, inputs, attention_mask=mask)
    sum(output.hidden_states.square().sum() for output in outputs).backward()
    for x in inputs:
        assert x.grad is not None
        assert (x.grad[~real] == 0).all()
        assert (x.grad[real] != 0).any(-1).all()


# -- layouts and dtypes


@pytest.mark.parametrize("layout", FLEX_LAYOUTS)
@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["released", "ratio_4", "ratios_3_and_8"])
def test_layouts_agree(name: str, arrangement: str, layout: AttentionLayout) -> None:
    cfg = CONFIGS[name]
    layers, inputs = make_layers(cfg, torch.float32), make_inputs(cfg, 48, dtype=torch.float32)
    arguments: dict[str, Tensor] = {}
    if arrangement == "padded":
        arguments["attention_mask"] = padding_mask(48, (48, 19))
    elif arrangement == "packed":
        arguments["document_ids"] = packed_ids(DOCUMENTS[name])
    results = {}
    for choice in (AttentionLayout.PLAIN, layout):
        for layer in layers:
            layer.layout = choice
        with torch.no_grad():
            results[choice] = run_layers(layers, inputs, **arguments)
    for layer, plain, other in zip(layers, results[AttentionLayout.PLAIN], results[layout], strict=True):
        assert relative_error(other.hidden_states, plain.hidden_states) <= FLOAT32, layer.layer_idx
        if layer.ratio:
            a, b = publication_of(layer, plain), publication_of(layer, other)
            assert torch.equal(a.compressed_kv, b.compressed_kv)
            assert torch.equal(a.topk_indices, b.topk_indices)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("layout", FLEX_LAYOUTS)
def test_layouts_agree_before_the_first_group(layout: AttentionLayout, tokens: int) -> None:
    cfg = CONFIGS["ratio_4"]
    layers, inputs = make_layers(cfg, torch.float32), make_inputs(cfg, tokens, dtype=torch.float32)
    with torch.no_grad():
        plain = run_layers(layers, inputs)
        for layer in layers:
            layer.layout = layout
        other = run_layers(layers, inputs)
    for a, b in zip(plain, other, strict=True):
        assert relative_error(b.hidden_states, a.hidden_states) <= FLOAT32


@pytest.mark.usefixtures("_no_quantization")  # which turns roundings into steps
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_float64_but_for_rounding(name: str) -> None:
    cfg = CONFIGS[name]
    inputs = make_inputs(cfg, 24)
    narrow = run_layers(make_layers(cfg, torch.float32), [x.float() for x in inputs])
    for a, b in zip(narrow, run_layers(make_layers(cfg), inputs), strict=True):
        assert a.hidden_states.dtype == torch.float32
        assert relative_error(a.hidden_states, b.hidden_states) <= FLOAT32


@pytest.mark.parametrize("layout", AttentionLayout)
def test_bfloat16_layers_run(layout: AttentionLayout) -> None:
    cfg = CONFIGS["released"]
    layers = make_layers(cfg, torch.bfloat16)
    for layer in layers:
        layer.layout = layout
    inputs = make_inputs(cfg, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        outputs = run_layers(layers, inputs)
    for layer, output in zip(layers, outputs, strict=True):
        assert output.hidden_states.dtype == torch.bfloat16
        assert output.hidden_states.isfinite().all()
        if layer.ratio:
            published = publication_of(layer, output)
            assert published.compressed_kv.dtype == published.index_keys.dtype == torch.bfloat16
            assert published.topk_indices.dtype == torch.int32


# -- NaN


@pytest.mark.parametrize("layout", AttentionLayout)
def test_nan_spreads_without_an_error_and_not_backwards(layout: AttentionLayout) -> None:
    cfg, poisoned_token = CONFIGS["released"], 11
    layers, inputs = make_layers(cfg, torch.float32), make_inputs(cfg, 40, dtype=torch.float32)
    for layer in layers:
        layer.layout = layout
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        x[0, poisoned_token, 5] = torch.nan
    with torch.no_grad():
        clean, outputs = run_layers(layers, inputs), run_layers(layers, poisoned)
    for layer, output, expected in zip(layers, outputs, clean, strict=True):
        got, wanted = output.hidden_states, expected.hidden_states
        if layout is not AttentionLayout.DENSE:  # which multiplies NaN keys by a probability of 0
            assert torch.equal(got[0, :poisoned_token], wanted[0, :poisoned_token]), layer.layer_idx
        assert torch.equal(got[1], wanted[1]), layer.layer_idx
        window = slice(poisoned_token, poisoned_token + cfg.sliding_window)
        assert got[0, window].isnan().all(), layer.layer_idx
        if layer.ratio:
            # A NaN score is never selected.
            picks = publication_of(layer, output).topk_indices
            assert not (picks[0] == poisoned_token // layer.ratio).any(), layer.layer_idx


# -- names, dtypes, state, gradients


WINDOW_NAMES = [
    "attn_sink",
    "wq_a.weight",
    "q_norm.weight",
    "wq_b.weight",
    "wkv.weight",
    "kv_norm.weight",
    "wo_a.weight",
    "wo_b.weight",
]
REINDEX_NAMES = ["indexer.wq_b.weight", "indexer.weights_proj.weight"]
FULL_NAMES = [
    *REINDEX_NAMES,
    "indexer.wk.weight",
    "indexer.k_norm.weight",
    "compressor.wkv.weight",
    "compressor.norm.weight",
]
RELEASED_NAMES = {
    0: WINDOW_NAMES,  # window
    1: [*WINDOW_NAMES, *FULL_NAMES, "compressor.wgate.weight"],  # full, ratio 2
    2: WINDOW_NAMES,  # reuse
    3: [*WINDOW_NAMES, *FULL_NAMES],  # full, ratio 1
    4: [*WINDOW_NAMES, *REINDEX_NAMES],  # reindex
    5: WINDOW_NAMES,  # reuse
}
FLOAT32_NAMES = {
    "attn_sink",
    "q_norm.weight",
    "kv_norm.weight",
    "indexer.k_norm.weight",
    "compressor.norm.weight",
}
POOLING_NAMES = {"compressor.wkv.weight", "compressor.wgate.weight"}  # float32 where groups are pooled


@pytest.mark.parametrize("layer_idx", RELEASED_NAMES)
def test_released_names_and_dtypes(layer_idx: int) -> None:
    layer = CSA2Attention(CONFIGS["released"], layer_idx, torch.bfloat16)
    state_dict = layer.state_dict()
    assert sorted(state_dict) == sorted(RELEASED_NAMES[layer_idx])
    assert [name for name, _ in layer.named_parameters()] == list(state_dict)
    wide = FLOAT32_NAMES | (POOLING_NAMES if layer.ratio > 1 else set())
    for name, tensor in state_dict.items():
        assert tensor.dtype == (torch.float32 if name in wide else torch.bfloat16), name


def test_released_shapes_of_parameters() -> None:
    cfg = CSA2Config.v41_flash()
    layer = CSA2Attention(cfg, 2, torch.bfloat16, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "attn_sink": (64,),
        "wq_a.weight": (1280, 5120),
        "q_norm.weight": (1280,),
        "wq_b.weight": (64 * 512, 1280),
        "wkv.weight": (512, 5120),
        "kv_norm.weight": (512,),
        "wo_a.weight": (8 * 1024, 64 * 512 // 8),
        "wo_b.weight": (5120, 8 * 1024),
        "compressor.wkv.weight": (512, 5120),
        "compressor.wgate.weight": (512, 5120),
        "compressor.norm.weight": (512,),
        "indexer.wq_b.weight": (32 * 128, 1280),
        "indexer.weights_proj.weight": (32, 5120),
        "indexer.wk.weight": (128, 512),
        "indexer.k_norm.weight": (128,),
    }


def test_state_is_immutable() -> None:
    cfg = CONFIGS["released"]
    outputs = run_layers(make_layers(cfg), make_inputs(cfg, 12))
    state = outputs[-1].state
    for frozen, name in (
        (state, "publications"),
        (state.publications[0], "topk_indices"),
        (outputs[-1], "hidden_states"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, name, None)
    assert isinstance(state.publications, tuple)


def test_consumers_leave_a_sources_state_alone() -> None:
    cfg = CONFIGS["released"]
    layers, inputs = make_layers(cfg), make_inputs(cfg, 24)
    state = layers[3](inputs[3]).state
    (before,) = state.publications
    names = ("compressed_kv", "index_keys", "topk_indices", "candidates")
    values = {name: getattr(before, name).clone() for name in names}
    reindexed = layers[4](inputs[4], state).state
    assert layers[5](inputs[5], state).state is state  # reuse publishes nothing
    assert layers[0](inputs[0], state).state is state
    assert state.publications == (before,)
    for name in names:
        assert torch.equal(getattr(before, name), values[name]), name
    # A new selection, among the same keys and candidates.
    (after,) = reindexed.publications
    assert after.compressed_kv is before.compressed_kv
    assert after.index_keys is before.index_keys
    assert after.candidates is before.candidates
    assert not torch.equal(after.topk_indices, before.topk_indices)
    # A new source of the ratio replaces it; the properties speak of the latest.
    again = layers[3](inputs[4], reindexed).state
    assert len(again.publications) == 1
    assert again.compressed_kv is not before.compressed_kv
    assert (again.topk_indices, again.index_keys, again.candidates) == (
        again.publications[0].topk_indices,
        again.publications[0].index_keys,
        again.publications[0].candidates,
    )


def test_a_fresh_state_is_empty() -> None:
    state = CSA2State()
    assert state.of_ratio(1) is state.compressed_kv is state.index_keys is state.topk_indices is state.candidates
    assert state.compressed_kv is None


def test_a_training_step_reaches_every_parameter_but_the_indexers() -> None:
    cfg = replace(
        CONFIGS["released"],
        num_hidden_layers=4,
        compress_ratios=(0, 2, 2, 2),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 3),
        candidate_source_layer_id=-1,
    )
    assert set(cfg.layer_roles) == set(LayerRole)
    torch.manual_seed(0)
    model = CSA2ForCausalLM(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    input_ids = torch.randint(0, 256, (2, 32))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                assert parameter.grad is None, name
            elif name != "embed.weight":
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name
                assert (parameter.grad != 0).any(), name
        optimizer.step()
    assert losses[1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("indexer" in name), name
