"""Every pass fires where it should, and what it puts in computes what the named ops compute."""

import pytest
import torch
from golden_files import relative_error, selection_overlap

from csa2_compiled import AttentionLayout, CSA2Attention, CSA2Cache, CSA2Config, CSA2State, compile_model

# Layers of the tiny config: window, full r=2, reuse r=2, full r=1 + candidates, reuse r=1, reindex r=1.
SOURCES = {0: (), 2: (), 3: (2,), 5: (), 6: (5,), 7: (5,)}
QUERIES = {0: 0, 2: 1, 3: 0, 5: 1, 6: 0, 7: 1}  # layers that score and select
TOKENS = 300


def run(layer_idx, dtype, passes, cached=False, batch=2, mask=False):
    """Output of one layer, eager and compiled, and the compiled model."""
    cfg = CSA2Config.tiny()
    torch.manual_seed(layer_idx)
    torch.compiler.reset()
    layers = {i: CSA2Attention(cfg, i, dtype=dtype, device="cuda").eval() for i in (*SOURCES[layer_idx], layer_idx)}
    x = torch.randn(batch, TOKENS, cfg.hidden_size, device="cuda", dtype=dtype)
    attention_mask = None
    if mask:
        attention_mask = torch.ones(batch, TOKENS, dtype=torch.int64, device="cuda")
        attention_mask[1, TOKENS // 2 :] = 0
    with torch.no_grad():
        compiled = compile_model(layers[layer_idx], passes=passes, dynamic=False)
        outputs = []
        for call in (layers[layer_idx], compiled):
            state, cache, now = CSA2State(), None, x
            if cached:
                cache = CSA2Cache(cfg, batch, TOKENS + 1, dtype=dtype, device="cuda")
                past = CSA2State()
                for layer in layers.values():
                    past = layer(x, past, cache=cache).state
                cache.advance(TOKENS)
                now = x[:, :1]
            for i in SOURCES[layer_idx]:
                state = layers[i](now, state, attention_mask, cache=cache).state
            outputs.append(call(now, state, attention_mask, cache=cache))
    return *outputs, compiled


def fired(compiled):
    return {report.name: dict(report.fired) for report in compiled.manager.totals()}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("layer_idx", SOURCES)
def test_all_passes(layer_idx, cached):
    expected, got, compiled = run(layer_idx, torch.bfloat16, "all", cached, batch=1 if cached else 2)
    agree = torch.ones(expected.hidden_states.shape[:2], dtype=torch.bool, device="cuda")
    if QUERIES[layer_idx]:
        overlap = selection_overlap(got.state.topk_indices, expected.state.topk_indices)
        assert overlap.mean() >= 0.99
        agree = (overlap == 1).cuda()
    assert relative_error(got.hidden_states[agree], expected.hidden_states[agree]) <= 1e-2
    counts = fired(compiled)
    assert counts["kv_gather"]["flex_attention"] == 1
    assert counts["kv_gather"]["csa2::apply_rope"] == 2
    assert counts["index_scores"] == ({"csa2::index_scores": 1} if QUERIES[layer_idx] else {})
    assert counts["select_topk"].get("csa2::select_topk", 0) == QUERIES[layer_idx]
    assert counts["select_topk"].get("csa2::candidate_blocks", 0) == (layer_idx == 5)
    # The window key; on full layers the compressed and the index key; on index sources the index query.
    quantized = 1 + (2 if layer_idx in (2, 5) else 0) + QUERIES[layer_idx]
    assert counts["rope_quant"]["csa2::quantize_dequantize"] == quantized
    assert (counts["gemv"] != {}) == cached
    assert set(counts["inline"]) <= {"csa2::rms_norm"}


@pytest.mark.parametrize("passes", ["select_topk", "index_scores", "kv_gather", "rope_quant"])
@pytest.mark.parametrize("layer_idx", [5, 7])
def test_one_pass_alone(layer_idx, passes):
    expected, got, compiled = run(layer_idx, torch.float32, (passes, "inline"))
    overlap = selection_overlap(got.state.topk_indices, expected.state.topk_indices)
    assert overlap.mean() >= 0.99
    agree = (overlap == 1).cuda()
    # float32: a quantized value may lie in the next bin, which moves its queries' outputs.
    assert relative_error(got.hidden_states[agree], expected.hidden_states[agree]) <= 5e-3
    assert sum(fired(compiled)[passes].values()) >= 1


def test_padded_rows():
    expected, got, _ = run(5, torch.bfloat16, "all", mask=True)
    real = slice(None, TOKENS // 2)
    assert not got.hidden_states[1, TOKENS // 2 :].any()
    overlap = selection_overlap(got.state.topk_indices, expected.state.topk_indices)
    agree = (overlap == 1).cuda()[1, real]
    left, right = got.hidden_states[1, real][agree], expected.hidden_states[1, real][agree]
    assert relative_error(left, right) <= 1e-2


def test_window_and_compressed_keys_have_the_eager_bits():
    expected, got, _ = run(5, torch.bfloat16, "all")
    for name in ("compressed_kv", "index_keys"):
        differ = (getattr(got.state, name) != getattr(expected.state, name)).float().mean()
        assert differ <= 1e-3, name  # the norm's sum runs in another order


def test_another_score_mod_is_left_to_flex_attention(monkeypatch):
    from csa2_compiled import masks

    original = masks.generate_sink_score

    def with_bias(*arguments, **options):
        sink = original(*arguments, **options)
        return lambda score, b, h, i, j: sink(score + 0.5, b, h, i, j)

    monkeypatch.setattr(masks, "generate_sink_score", with_bias)
    torch.compiler.reset()
    layer = CSA2Attention(CSA2Config.tiny(), 0, dtype=torch.bfloat16, device="cuda").eval()
    layer.layout = AttentionLayout.SLOTS
    x = torch.randn(1, 64, layer.cfg.hidden_size, device="cuda", dtype=torch.bfloat16)
    compiled = compile_model(layer, dynamic=False)
    with torch.no_grad():
        compiled(x, CSA2State())
    assert "kv_gather" in compiled.explain()
    assert "the score mod is not that of the sink alone" in compiled.explain()
