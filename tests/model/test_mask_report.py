"""`mask_report`: what it says a query looked at is what the layer really did."""

import json
from dataclasses import replace

import pytest
import torch
from golden_files import FILES, GOLDEN, load_golden
from safetensors.torch import save_file

from csa2_compiled import (
    AttentionLayout,
    CSA2Cache,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2State,
    SavedState,
    ops,
    run_report,
)
from csa2_compiled.mask_report import read_inputs, report_inputs, report_text, score_histogram, selection_overlap
from csa2_compiled.masks.view_data import EMPTY, FULL, PARTIAL, SELECTED, SINK, WINDOW, filled
from csa2_compiled.run_report import BadArgumentError, Origin, Text
from csa2_compiled.state_report import check_whole, report_state, shown_layers

TEXT = Text("text", "Every query attends to a short window, and to what it selects — é.\n".encode() * 2, False)


@pytest.fixture(scope="module")
def recorded():
    """The golden schedule with every role: file, model, and the report of row 1."""
    golden = load_golden("released_schedule_mini")
    tokens = golden.inputs()[0].shape[1]
    report = report_inputs(read_inputs(golden.path), range(golden.cfg.num_hidden_layers), range(tokens), row=1)
    return golden, golden.model(AttentionLayout.PLAIN), report


@pytest.mark.parametrize("name", FILES)
def test_every_golden_file_can_be_recorded(name):
    source = read_inputs(GOLDEN / f"{name}.safetensors")
    tokens = source.inputs[0].shape[1]
    report = report_inputs(source, range(source.cfg.num_hidden_layers), range(tokens))
    for view in report.layers:
        torch.testing.assert_close(view.mass.sum(-1), torch.ones(view.mass.shape[:2]))
        assert (view.window[:, 0] == torch.arange(tokens)).all()


def test_selection_and_candidates_are_the_released_ones(recorded):
    golden, _, report = recorded
    for view in report.layers:
        if view.ratio == 0:
            assert view.selected is view.allowed is view.visible is view.scores is None
            continue
        by = view.lineage.selected_by
        assert torch.equal(view.selected, golden.tensors[f"prefill.{by}.topk_indices"][1])
        positions, query = view.allowed.shape[1], torch.arange(len(report.tokens)).unsqueeze(-1)
        visible = torch.arange(positions) < (query + 1) // view.ratio
        assert torch.equal(view.visible, visible.sum(-1).int())
        if view.lineage.within is not None:
            visible &= golden.tensors[f"prefill.{view.lineage.within}.candidates"][1]
        assert torch.equal(view.allowed, visible)


def test_windows_are_the_newest_tokens(recorded):
    golden, _, report = recorded
    window = golden.cfg.sliding_window
    for view in report.layers:
        for query in report.queries:
            assert filled(view.window[query]) == list(range(max(0, query + 1 - window), query + 1))


def test_lineage_names_the_sources(recorded):
    golden, _, report = recorded
    for view in report.layers:
        role = golden.cfg.role(view.layer).value
        assert view.role == role
        if role == "window":
            assert view.lineage.selected_by is None
            continue
        assert view.lineage.kv_from == golden.cfg.kv_source(view.layer)
        assert view.lineage.selected_by == golden.cfg.index_source(view.layer)
        assert (view.scores is not None) == (role in ("full", "reindex"))
    reindex = next(view for view in report.layers if view.role == "reindex")
    assert reindex.lineage.compared_with == reindex.lineage.kv_from


def direct_probabilities(golden, model, layer, row):
    """Softmax over all keys, every query, in float64: [H, S, 1 + S + T], the sink first."""
    attn, x = model.layers[layer].attn, golden.inputs()[layer][row : row + 1]
    state = CSA2State()
    for i in range(layer + 1):
        state = model.layers[i].attn(golden.inputs()[i][row : row + 1], state).state
    rotations = attn.rotary(torch.arange(x.shape[1]).unsqueeze(0))
    cfg, tokens = golden.cfg, x.shape[1]
    q = attn.wq_b(attn.q_norm(attn.wq_a(x))).unflatten(-1, (cfg.num_attention_heads, cfg.head_dim))
    q = ops.apply_rope(q, rotations, False)[0].double().transpose(0, 1)
    keys = attn.window_kv(x, rotations)[0].double()
    query, token = torch.arange(tokens).unsqueeze(-1), torch.arange(tokens)
    seen = (token <= query) & (query - token < cfg.sliding_window)
    read = state.of_ratio(attn.ratio)
    if attn.ratio:
        keys = torch.cat([keys, read.compressed_kv[0].double()])
        picked = torch.zeros(tokens, read.compressed_kv.shape[1], dtype=torch.bool)
        for i, row_of_picks in enumerate(read.topk_indices[0].tolist()):
            picked[i, [t for t in row_of_picks if t >= 0]] = True
        seen = torch.cat([seen, picked], dim=1)
    logits = (q @ keys.T * cfg.head_dim**-0.5).masked_fill(~seen, float("-inf"))
    sink = attn.attn_sink.double().view(-1, 1, 1).expand(-1, tokens, 1)
    return torch.cat([sink, logits], dim=-1).softmax(-1)


@torch.no_grad()
def test_attention_mass_is_that_of_a_direct_softmax(recorded):
    golden, model, report = recorded
    tokens = len(report.tokens)
    for view in report.layers:
        probabilities = direct_probabilities(golden, model, view.layer, row=1)
        assert view.mass.dtype == torch.float32
        parts = {SINK: probabilities[..., 0], WINDOW: probabilities[..., 1 : 1 + tokens].sum(-1)}
        parts[SELECTED] = probabilities[..., 1 + tokens :].sum(-1)
        for part, expected in parts.items():
            torch.testing.assert_close(view.mass[..., part].double(), expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(view.head_mass(None), view.mass.mean(0))
        assert torch.equal(view.head_mass(2), view.mass[2])


def brute_force_blocks(visible: torch.Tensor, query_block: int, key_block: int) -> torch.Tensor:
    """EMPTY, PARTIAL or FULL of each block of a bool [queries, keys]."""
    rows = [part.split(key_block, dim=1) for part in visible.split(query_block)]
    return torch.tensor([[FULL if b.all() else PARTIAL if b.any() else EMPTY for b in row] for row in rows])


@pytest.mark.parametrize("num_tokens", [1, 130, 300])
def test_block_counts_equal_brute_force(num_tokens):
    torch.manual_seed(0)
    model = run_report.make_model(replace(CSA2Config.tiny(), sliding_window=20), 0, "cpu")
    data = bytes(torch.randint(256, (num_tokens,)).tolist())
    report = report_text(model, Text("random", data, False), Origin(None, None, 0), (0, 3, 7), range(num_tokens))
    for view in report.layers:
        dense, slots = view.blocks
        query = torch.arange(num_tokens).unsqueeze(-1)
        token = torch.arange(num_tokens)
        seen, causal = (token <= query) & (query - token < 20), token <= query
        if view.ratio:
            picked = torch.zeros_like(view.allowed)
            for row, picks in zip(picked, view.selected.tolist(), strict=True):
                row[[t for t in picks if t >= 0]] = True
            seen = torch.cat([seen, picked], dim=1)
            positions = torch.arange(picked.shape[1])
            causal = torch.cat([causal, positions < (query + 1) // view.ratio], dim=1)
        sink = torch.ones(num_tokens, 1, dtype=torch.bool)
        expected = brute_force_blocks(torch.cat([seen, sink], dim=1), 128, 128)
        assert torch.equal(dense.kinds.long(), expected)
        assert dense.causal == (brute_force_blocks(torch.cat([causal, sink], dim=1), 128, 128) != EMPTY).sum()
        counts = [dense.count(kind) for kind in (EMPTY, PARTIAL, FULL)]
        assert sum(counts) == expected.numel()
        assert dense.saved == pytest.approx(counts[0] / expected.numel())
        selected = [] if view.selected is None else [view.selected >= 0]
        in_slots = torch.cat([sink, view.window >= 0, *selected], dim=1)
        assert torch.equal(slots.kinds.long(), brute_force_blocks(in_slots, 1, 64))


def test_queries_and_layers_can_be_chosen(recorded):
    golden, _, whole = recorded
    part = report_inputs(read_inputs(golden.path), (3, 7), range(40, 50), row=1)
    assert [view.layer for view in part.layers] == [3, 7]
    assert (part.first_query, part.num_queries) == (40, 10)
    for view in part.layers:
        full = whole.layers[view.layer]
        for name in ("window", "selected", "allowed", "visible"):
            assert torch.equal(getattr(view, name), getattr(full, name)[40:50]), name
        torch.testing.assert_close(view.mass, full.mass[:, 40:50])
        assert [(b.count(FULL), b.visited) for b in view.blocks] == [(b.count(FULL), b.visited) for b in full.blocks]


def test_text_is_what_the_model_selected():
    model = run_report.make_model(CSA2Config.tiny(), 3, "cpu")
    num_tokens = len(TEXT.data)
    states = []

    def run_block(block, *inputs):
        output = block(*inputs)
        states.append(output.state)
        return output

    with torch.no_grad():
        model(torch.tensor([list(TEXT.data)]), run_block=run_block)
    report = report_text(model, TEXT, Origin(None, None, 3), range(9), range(num_tokens))
    for view, state in zip(report.layers, states, strict=True):
        if view.ratio:
            published = state.of_ratio(view.ratio)
            assert torch.equal(view.selected, published.topk_indices[0])
            if view.lineage.within is not None:
                assert (view.allowed <= published.candidates[0]).all()
                assert (published.candidates[0] & (torch.arange(num_tokens) < view.visible.unsqueeze(-1))).equal(
                    view.allowed
                )
    assert report.text_of(report.layers[2], 3) == TEXT.data.decode()[6:8]
    assert "".join(report.tokens).replace("·", "") == TEXT.data.decode()
    assert len(report.tokens) == num_tokens


def saved_states(cfg, batch, **options):
    """A model and the state after each of its layers."""
    torch.manual_seed(2)
    model, states = CSA2ForCausalLM(cfg).eval(), []

    def run_block(block, *inputs):
        output = block(*inputs)
        states.append(output.state)
        return output

    with torch.no_grad():
        model(batch, run_block=run_block, **options)
    return model, [SavedState(state, cfg, layer) for layer, state in enumerate(states)]


# The second has candidates, a KV source after them, and a reindex layer of its keys.
@pytest.mark.parametrize("changes", [{}, {"kv_source_layer_ids": (2, 5, 6), "index_source_layer_ids": (2, 5, 6, 7)}])
@pytest.mark.parametrize("num_tokens", [1, 90])
def test_a_state_shows_what_the_run_showed(changes, num_tokens):
    cfg = replace(CSA2Config.tiny(), sliding_window=20, **changes)
    data = bytes(torch.randint(256, (num_tokens,)).tolist())
    model, states = saved_states(cfg, torch.tensor([[0] * num_tokens, list(data)]))
    text, queries = Text("text", data, False), range(num_tokens // 2, num_tokens)
    ran = report_text(model, text, Origin(None, None, 2), range(9), queries)
    for saved in states[2:]:
        check_whole(saved, row=1)
        report = report_state(saved, "state", text, shown_layers(saved), queries, row=1)
        assert (report.tokens, report.queries, report.bytes_text) == (ran.tokens, ran.queries, True)
        assert "attention mass" in report.absent
        for view in report.layers:
            of_run = ran.layers[view.layer]
            assert view.mass is view.scores is None
            assert view.name == of_run.name
            for name in ("window", "selected", "allowed", "visible"):
                one, other = getattr(view, name), getattr(of_run, name)
                assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other)), name
            for name in ("kv_from", "selected_by", "within"):
                assert getattr(view.lineage, name) == getattr(of_run.lineage, name)
            assert all(torch.equal(a.kinds, b.kinds) for a, b in zip(view.blocks, of_run.blocks, strict=True))


def test_a_state_shows_the_layers_whose_selection_it_still_holds():
    _, states = saved_states(CSA2Config.tiny(), torch.zeros(1, 8, dtype=torch.int64))
    shown = [shown_layers(saved) for saved in states]
    assert shown[:7] == [tuple(range(i + 1)) for i in range(7)]
    assert shown[7:] == [(0, 1, 2, 3, 4, 7), (0, 1, 2, 3, 4, 7, 8)]
    without_text = report_state(states[4], "state", None, (4,), range(8))
    assert without_text.tokens == tuple(map(str, range(8)))
    assert not without_text.bytes_text


def test_states_whose_tokens_stand_elsewhere_are_refused():
    cfg, ids = CSA2Config.tiny(), torch.randint(256, (2, 12))
    mask, documents = torch.ones(2, 12, dtype=torch.int64), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:], documents[1, 4:] = 0, 2
    cache = CSA2Cache(cfg, 2, 24)
    CSA2ForCausalLM(cfg).eval()(ids[:, :5], cache)
    refused = "row 1 has not the selection of one whole sequence in ratio"
    for options in ({"attention_mask": mask}, {"document_ids": documents}):
        for saved in saved_states(cfg, ids, **options)[1][2:]:
            check_whole(saved, row=0)
            with pytest.raises(BadArgumentError, match=refused):
                check_whole(saved, row=1)
    for saved in saved_states(cfg, ids, cache=cache)[1][2:]:
        with pytest.raises(BadArgumentError, match=refused):
            check_whole(saved, row=1)


def test_scores_have_the_selection_above_the_threshold(recorded):
    _, _, report = recorded
    for view in (view for view in report.layers if view.scores is not None):
        scores = view.scores
        choices = view.allowed.sum(-1)
        assert torch.equal(scores.counts.sum(-1), choices)
        some = choices > 0
        assert torch.equal(~scores.threshold.isnan(), some)
        assert (scores.low[some] <= scores.threshold[some]).all()
        assert (scores.threshold[some] <= scores.high[some]).all()
        chosen_all = some & ((view.selected >= 0).sum(-1) == choices)
        assert torch.equal(scores.threshold[chosen_all], scores.low[chosen_all])


def test_histogram_by_hand():
    scores = torch.tensor([[0.0, 1.0, 2.0, 4.0], [float("-inf")] * 4, [3.0, 3.0, float("-inf"), float("-inf")]])
    allowed = scores > float("-inf")
    selected = torch.tensor([[2, 3], [-1, -1], [0, -1]], dtype=torch.int32)
    result = score_histogram(scores, allowed, selected, bins=4)
    assert result.counts.tolist() == [[1, 1, 1, 1], [0] * 4, [2, 0, 0, 0]]
    assert result.threshold[[0, 2]].tolist() == [2.0, 3.0]
    assert (result.low[0].item(), result.high[0].item()) == (0.0, 4.0)
    assert all(value[1].isnan() for value in (result.low, result.high, result.threshold))


def test_overlap_counts_only_queries_that_choose():
    allowed = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    now = torch.tensor([[0, 1], [2, 3], [0, 1]])
    before = torch.tensor([[1, 2], [2, 3], [0, 1]])
    shared, chance = selection_overlap(now, before, allowed)
    assert shared == pytest.approx((0.5 + 1) / 2)
    assert chance == pytest.approx(0.5)
    assert selection_overlap(now[2:], before[2:], allowed[2:]) == (None, None)
    nothing = torch.full((1, 2), -1)
    assert selection_overlap(now[:1], nothing, allowed[:1]) == (0.0, 0.0)


def test_inputs_that_are_none_are_refused(tmp_path):
    (tmp_path / "text").write_text("no safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "bare.safetensors")
    args = load_golden("short_sequence").cfg.to_dict()
    save_file({"x": torch.zeros(1)}, tmp_path / "empty.safetensors", metadata={"args": json.dumps(args)})
    for name, words in (("text", "cannot be read"), ("bare.safetensors", "metadata"), ("none", "cannot be read")):
        with pytest.raises(BadArgumentError, match=words):
            read_inputs(tmp_path / name)
    with pytest.raises(BadArgumentError, match=r"prefill\.0\.input"):
        read_inputs(tmp_path / "empty.safetensors")
