"""The benchmark scripts: they run on CPU, count what they say they count, and draw what they wrote."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import attention
import attention_parts
import chart
import flops
import layer as layer_benchmark
import pytest
import timing
import torch
import typer
from torch import Tensor

from csa2_compiled import CSA2Config, CSA2State

CPU = torch.device("cpu")
TOKENS = 41  # more than the window, not whole groups
CFG = replace(CSA2Config.tiny(), sliding_window=16, index_topk=8, candidate_topk_blocks=3, max_position_embeddings=64)
SOURCES = {0: (), 2: (), 3: (2,), 5: (), 7: (5,), 6: (5,)}


@pytest.fixture
def inputs() -> attention_parts.Inputs:
    return attention_parts.make_inputs(CFG, TOKENS, torch.float32, CPU)


def setup(**changes) -> layer_benchmark.Setup:
    return layer_benchmark.Setup(**{"cfg": CFG, "dtype": torch.float32, "device": CPU, "pass_sets": (), **changes})


@pytest.mark.parametrize("layer_idx", SOURCES)
@torch.no_grad()
def test_layer_flops_equal_a_count_query_by_query(layer_idx: int):
    state = CSA2State()
    for source in (*SOURCES[layer_idx], layer_idx):
        layer = setup().make_layer(source)
        state = layer(setup().make_input(TOKENS), state).state
    read = state.of_ratio(layer.ratio)
    slots = pairs = 0
    for query in range(TOKENS):
        slots += sum(1 for key in range(TOKENS) if query - CFG.sliding_window < key <= query)
        if read is not None:
            slots += sum(1 for index in read.topk_indices[0, query].tolist() if index >= 0)
            # A group is visible once its last token is.
            pairs += sum(1 for group in range(TOKENS // layer.ratio) if (group + 1) * layer.ratio - 1 <= query)
    counted = layer_benchmark.layer_flops(layer, TOKENS, state)
    assert counted["attention"] == slots * CFG.num_attention_heads * 2 * (2 * CFG.head_dim)
    selects = hasattr(layer, "indexer")
    assert counted["index_scores"] == (pairs * CFG.index_n_heads * 2 * CFG.index_head_dim if selects else 0)
    hidden, width = CFG.hidden_size, CFG.num_attention_heads * CFG.head_dim
    per_token = hidden * CFG.q_lora_rank + CFG.q_lora_rank * width + hidden * CFG.head_dim
    per_token += width * CFG.o_lora_rank + CFG.o_groups * CFG.o_lora_rank * hidden
    per_group = 0
    if selects:
        per_token += CFG.q_lora_rank * CFG.index_n_heads * CFG.index_head_dim + hidden * CFG.index_n_heads
    if hasattr(layer, "compressor"):
        per_token += hidden * CFG.head_dim * (1 if layer.ratio == 1 else 2)  # values, and gates of groups
        per_group = CFG.head_dim * CFG.index_head_dim
    groups = TOKENS // layer.ratio if layer.ratio else 0
    assert counted["projections"] == 2 * (TOKENS * per_token + groups * per_group)


def test_layer_benchmark_writes_rows_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "layer.json"
    layer_benchmark.main(
        seq_len="24 40",
        passes="inline",
        layers="window,reuse r=1",
        repeats=1,
        skip_eager_above=0,
        time_limit=1e-9,
        output=path,
    )
    result = json.loads(path.read_text())
    assert [(row["tokens"], row["layer"]) for row in result["rows"]] == [
        (tokens, name) for tokens in (24, 40) for name in ("window", "reuse r=1")
    ]
    for row in result["rows"]:
        assert row["milliseconds"] == {"eager": None, "inline": None}
        assert "--time-limit" in row["reasons"]["eager"]
        assert row["projections_ms"] > 0
    capsys.readouterr()
    layer_benchmark.main(show=path)
    assert "--time-limit" in capsys.readouterr().out


def test_layer_benchmark_skips_long_eager_runs_and_survives_exhausted_memory(monkeypatch: pytest.MonkeyPatch):
    short = setup(pass_sets=("inline", "all"), skip_eager_above=32)
    assert short.why_not("eager", 32) is None
    for variant in ("eager", "inline"):
        assert "above 32 tokens" in (short.why_not(variant, 33) or "")
    assert short.why_not("all", 33) is None

    row, state = layer_benchmark.measure(setup(repeats=1), "full", 5, TOKENS, CSA2State())
    assert row.milliseconds["eager"] is not None
    assert row.tflops["eager"] == pytest.approx(sum(row.flops.values()) / row.milliseconds["eager"] / 1e9)
    assert state is not None

    def exhaust(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has none")

    monkeypatch.setattr("csa2_compiled.attention.CSA2Attention.forward", exhaust)
    row, state = layer_benchmark.measure(setup(repeats=1), "full", 5, TOKENS, CSA2State())
    assert row.milliseconds == {"eager": None}
    assert row.reasons == {"eager": "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB"}
    row, _ = layer_benchmark.measure(setup(repeats=1), "reuse", 6, TOKENS, state)
    assert row.reasons == {"eager": "its source layer did not run"}


@pytest.mark.parametrize("name", ["h200-layer-4096.json", "cpu-layer-512.json"])
def test_layer_benchmark_shows_older_results(name: str, capsys: pytest.CaptureFixture[str]):
    path = timing.REPOSITORY / "benchmarks" / "results" / name
    layer_benchmark.main(show=path)
    assert "reuse r=1" in capsys.readouterr().out


def test_attention_benchmark_runs_on_cpu_with_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "some_peer.py").write_text(
        "import torch\n"
        "def attend(q, kv_all, indices, sink, scale):\n"
        "    keys = kv_all[indices.clamp(min=0).long()]\n"
        "    logits = torch.einsum('shd,skd->shk', q, keys) * scale\n"
        "    logits = logits.masked_fill((indices < 0)[:, None], float('-inf'))\n"
        "    sinks = sink[None, :, None].expand(len(q), -1, 1)\n"
        "    return torch.cat([sinks, logits], -1).softmax(-1)[..., 1:] @ keys\n"
        "def fail(*inputs):\n"
        "    raise RuntimeError('not today')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    path = tmp_path / "attention.json"
    peers = ["some_peer:attend", "some_peer:fail", "nowhere_at_all:attend"]
    attention.main(seq_len="80", repeats=1, peer=peers, output=path)
    result = json.loads(path.read_text())
    rows = {(row["part"], row["variant"]): row for row in result["rows"]}
    parts = ("CORE", "TURNED_CORE", "SCORES", "SELECTION", "BOTH", "CANDIDATES")
    for part in (getattr(attention_parts, name) for name in parts):
        row = rows[part, "eager"]
        assert row["ms"] > 0
        assert row["error"] is None or row["error"] < 1e-6
        assert row["agreement"] in (None, 1.0)
        assert (row["error"] is None) != (row["agreement"] is None)
    core = rows[attention_parts.CORE, "eager"]
    assert core["tflops_filled"] < core["tflops"]
    assert rows[attention_parts.CORE, "some_peer:attend"]["error"] < 1e-6
    assert rows[attention_parts.CORE, "some_peer:fail"]["reason"] == "RuntimeError: not today"
    assert "ModuleNotFoundError" in rows[attention_parts.CORE, "nowhere_at_all:attend"]["reason"]
    written = capsys.readouterr().out
    attention.main(show=path)
    assert "RuntimeError: not today" in capsys.readouterr().out
    assert "written to" in written


def test_flash_mla_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    (tmp_path / "flash_mla.py").write_text("def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512): ...\n")
    peers = attention.load_peers([], with_flash_mla=True)
    assert peers == {attention.FLASH_MLA: "ImportError: flash_mla_sparse_fwd takes no attn_sink"}
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)


def test_judges_see_a_wrong_result(inputs: attention_parts.Inputs):
    parts = {part.name: part for part in attention_parts.make_parts(inputs, with_kernels=False)}
    for name in (attention_parts.CORE, attention_parts.TURNED_CORE, attention_parts.SCORES):
        right = parts[name].eager()
        assert parts[name].judge(right * 1.01) == pytest.approx(0.01, rel=1e-3)
    picks = inputs.topk_indices.clone()
    last = picks[0, -1]
    last[0] = next(position for position in range(TOKENS) if position not in last.tolist())
    lost = 1 / CFG.index_topk / TOKENS
    assert parts[attention_parts.SELECTION].judge(picks) == pytest.approx(1 - lost, abs=1e-6)
    marks = parts[attention_parts.CANDIDATES].eager()
    assert parts[attention_parts.CANDIDATES].judge(~marks) == 0


def test_plain_scores_in_pieces_are_the_scores(inputs: attention_parts.Inputs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_parts, "_QUERIES_AT_ONCE", 7)
    indexer = inputs.index_q, inputs.index_k, inputs.weights, inputs.start, inputs.stop
    assert torch.equal(attention_parts.plain_scores(*indexer), inputs.scores)


def test_counts_of_the_core_are_of_all_and_of_filled_slots(inputs: attention_parts.Inputs):
    every, of_filled = inputs.flops
    per_slot = 4 * CFG.num_attention_heads * CFG.head_dim
    assert every == per_slot * TOKENS * (CFG.sliding_window + CFG.index_topk)
    assert of_filled == per_slot * attention.filled(inputs)
    assert flops.visible_pairs(TOKENS, 1) == int((inputs.scores > float("-inf")).sum())


def test_waiting_cases_change_one_thing(inputs: attention_parts.Inputs):
    cases = attention.waiting_inputs(inputs)
    counts = {name: attention.filled(changed) for name, changed in cases.items()}
    full = counts.pop("as selected")
    assert counts.pop("every slot names one row") == counts.pop("newest positions selected") == full
    assert all(full / 2 <= count < full * 0.6 for count in counts.values())
    newest = cases["newest positions selected"].topk_indices[0]
    for query, picks in enumerate(newest.tolist()):
        seen = [pick for pick in picks if pick >= 0]
        assert seen == list(range(query + 1 - len(seen), query + 1))
    half = cases["second half of the slots empty"].topk_indices[0]
    assert half[-1].tolist() == [*inputs.topk_indices[0, -1, :4].tolist(), -1, -1, -1, -1]


def test_runs_are_interleaved_and_called_in_a_row():
    calls: list[str] = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = timing.medians(functions, CPU, repeats=2, warmup=1, calls=2, ahead=True)
    assert calls == ["a", "b", *["a", "a", "b", "b"] * 2]
    assert set(times) == {"a", "b"}


def layer_results(tokens: int = 4096) -> dict:
    row = {"layer": "window", "tokens": tokens, "projections_ms": 1.0}
    return {
        "title": "one layer",
        "device": "some GPU",
        "torch": "2",
        "rows": [row | {"milliseconds": {"eager": 9.0, "inline": None, "all": 3.0}}],
    }


def test_charts_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "h200-layer.json").write_text(json.dumps(layer_results()))
    chart.main(results=tmp_path, images=tmp_path / "images")
    assert (tmp_path / "images" / "layers.png").stat().st_size > 0
    assert "no decode.png" in capsys.readouterr().out
    row = {"layer": "window", "batch": 1, "context": 4096, "eager_ms": None, "compiled_ms": 0.1, "floor_ms": 0.05}
    decoded = {"title": "one step", "rows": [row, row | {"layer": "reuse", "eager_ms": 3.0}, row | {"batch": 8}]}
    (tmp_path / "h200-decode.json").write_text(json.dumps(decoded))
    chart.main(results=tmp_path, images=tmp_path / "images")
    assert (tmp_path / "images" / "decode.png").stat().st_size > 0


def test_charts_say_what_is_missing(tmp_path: Path):
    with pytest.raises(typer.BadParameter, match=r"h200-layer\.json is missing; python benchmarks/layer\.py"):
        chart.main(results=tmp_path, images=tmp_path)
    (tmp_path / "h200-layer.json").write_text(json.dumps(layer_results(tokens=16)))
    with pytest.raises(typer.BadParameter, match=r"no layer at 4096 tokens, only at \[16\]"):
        chart.main(results=tmp_path, images=tmp_path)


def test_bars_have_the_values_and_a_word_for_what_did_not_run():
    axes = chart.draw_layers(layer_results(), 4096).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [9.0, 0.0, 3.0, 1.0]
    assert [text.get_text() for text in axes.texts] == ["9", "not run", "3", "1"]


def peer_shapes(q: Tensor, kv_all: Tensor, indices: Tensor, sink: Tensor, scale: float) -> Tensor:
    assert q.shape == (TOKENS, CFG.num_attention_heads, CFG.head_dim)
    assert kv_all.shape == (2 * TOKENS, CFG.head_dim)
    assert (indices.shape, indices.dtype) == ((TOKENS, CFG.sliding_window + CFG.index_topk), torch.int32)
    assert -1 <= indices.min() <= indices.max() < len(kv_all)
    assert (sink.shape, sink.dtype, scale) == ((CFG.num_attention_heads,), torch.float32, CFG.head_dim**-0.5)
    return q


def test_peers_get_the_documented_shapes(inputs: attention_parts.Inputs):
    assert attention.peer_call(peer_shapes, inputs)().shape == inputs.q.shape


@pytest.mark.parametrize(("name", "problem"), [("h200-decode.json", "another benchmark"), ("none.json", "no result")])
def test_results_of_others_are_refused(name: str, problem: str):
    path = timing.REPOSITORY / "benchmarks" / "results" / name
    with pytest.raises(typer.BadParameter, match=problem):
        layer_benchmark.main(show=path)


def test_where_a_result_comes_from_is_shown(capsys: pytest.CaptureFixture[str]):
    layer_benchmark.main(show=timing.REPOSITORY / "benchmarks" / "results" / "h200-layer.json")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("device NVIDIA H200")
    assert second.startswith("python benchmarks/layer.py")
