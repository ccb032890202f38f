"""The `csa2` command: what it prints, what it refuses and how, and the data behind it."""

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from csa2_compiled import AttentionLayout, CSA2Attention, CSA2Config, doctor, ops, run_report
from csa2_compiled import cli as cli_module
from csa2_compiled.checkpoint import save_attention
from csa2_compiled.cli import app
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.model_files import DEMO_FOLDER
from csa2_compiled.passes import PassReport

TEXT = "Every query attends to a short window and to a selection of the whole past.\n" * 4
NUM_BYTES, WINDOW, TOPK = 48, 16, 8


def small_config() -> CSA2Config:
    """Five narrow layers of four kinds, so that the last one shares a graph."""
    return replace(
        CSA2Config.tiny(),
        hidden_size=64,
        num_hidden_layers=5,
        compress_ratios=(0, 1, 1, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=1,
        index_topk=TOPK,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        sliding_window=WINDOW,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, a config and attention weights (seed 1), in one folder."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "[red]text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    small_config().to_json(folder / "config.json")
    save_attention(run_report.make_model(small_config(), 1, "cpu"), folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def finished_run(folder):
    """The one real run: its output and its JSON report."""
    arguments = ["run", "--text", folder / "[red]text.txt", "--config", folder / "config.json"]
    arguments += ["--weights", folder / "weights.safetensors"]
    arguments += ["--seq-len", NUM_BYTES, "--json", folder / "report.json"]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "report.json").read_text())


def invoke(*arguments: object):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(a) for a in arguments])


@pytest.mark.slow
def test_run_reports_every_layer(finished_run):
    _, report = finished_run
    layers = report["layers"]
    assert [layer["role"] for layer in layers] == ["window", "full", "reindex", "reuse", "reuse"]
    assert [layer["ratio"] for layer in layers] == [0, 1, 1, 1, 1]
    assert all(layer["relative_error"] < 1e-5 for layer in layers)
    assert all(layer["compiled_ms"] > 0 and layer["eager_ms"] > 0 for layer in layers)
    assert [layer["same_selection"] for layer in layers] == [None, 1.0, 1.0, None, None]
    assert layers[0]["selected"] is None
    assert layers[0]["visible"] is None
    selected = sum(min(p + 1, TOPK) for p in range(NUM_BYTES)) / NUM_BYTES
    for layer in layers[1:]:
        assert layer["visible"] == (NUM_BYTES + 1) / 2
        assert layer["selected"] == pytest.approx(selected)


@pytest.mark.slow
def test_run_compiles_each_kind_once(finished_run):
    _, report = finished_run
    shared = [layer["compile_seconds"] is None for layer in report["layers"]]
    assert shared == [False, False, False, False, True]
    assert (report["kinds"], report["graphs"]) == (4, 4)
    assert report["compile_seconds"] == sum(layer["compile_seconds"] or 0 for layer in report["layers"])


@pytest.mark.slow
def test_run_is_live_without_caches(finished_run):
    _, report = finished_run
    assert report["caches"] is False
    assert not any(layer["from_cache"] for layer in report["layers"])
    *kernels, inline = report["passes"]
    assert inline["name"] == "inline"
    assert all(not summary["fired"] for summary in kernels)  # they are for CUDA, and say so
    assert any("CUDA" in declined["reason"] for summary in kernels for declined in summary["declined"])
    # One a full layer, one a reindex layer; one gather a kind of block would only do in the slots layout.
    assert inline["fired"]["csa2::select_topk"] == 2
    assert inline["fired"]["csa2::candidate_blocks"] == 1
    slots = sum(layer["layout"] == "slots" and layer["compile_seconds"] is not None for layer in report["layers"])
    assert inline["fired"].get("csa2::gather_kv", 0) == slots


@pytest.mark.slow
def test_run_prints_the_table(finished_run, folder):
    result, report = finished_run
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"[red]text.txt: the first {NUM_BYTES} bytes")
    assert str(folder / "weights.safetensors") in " ".join(lines[:3])  # a long path goes to a line of its own
    rows = [line.split() for line in lines if line[:3].strip().isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[4][-1] == "shared"
    assert "4 compilations for 5 layers of 4 kinds" in result.stdout
    assert f"{report['bits_per_byte']:.2f} bits per byte" in result.stdout
    assert 7.5 < report["bits_per_byte"] < 8.5
    assert "compiling reindex, ratio 1, selects within candidates" in result.stderr


REFUSED = {
    "no file": ("--text", ["--text", "{folder}/none.txt"]),
    "folder": ("--text", ["--text", "{folder}"]),
    "empty": ("--text", ["--text", "{folder}/empty"]),
    "no tokens": ("--seq-len", ["--seq-len", "0"]),
    "too long": ("--seq-len", ["--seq-len", "513"]),
    "no config": ("--config", ["--config", "{folder}/none.json"]),
    "config is a folder": ("--config", ["--config", "{folder}"]),
    "config is no JSON": ("--config", ["--config", "{folder}/text.txt"]),
    "bad config": ("--config", ["--config", "{folder}/odd.json"]),
    "narrow vocabulary": ("--config", ["--config", "{folder}/narrow.json"]),
    "no weights": ("--weights", ["--weights", "{folder}/none.safetensors"]),
    "no safetensors": ("--weights", ["--weights", "{folder}/text.txt"]),
    "other weights": ("--weights", ["--config", "{folder}/wide.json", "--weights", "{folder}/weights.safetensors"]),
    "unknown pass": ("--passes", ["--passes", "inline,fuse_all"]),
    "no pass name": ("--passes", ["--passes", ""]),
    "negative seed": ("--seed", ["--seed", "-1"]),
    "model beside a config": ("--model", ["--model", "{folder}"]),
    "seed beside a model": ("--seed", ["--model", "{folder}", "--seed", "0"]),
    "JSON to a folder": ("--json", ["--json", "{folder}"]),
    "JSON to nowhere": ("--json", ["--json", "{folder}/none/report.json"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_run_refuses_in_one_line(folder, case):
    (folder / "empty").touch()
    values = small_config().to_dict()
    (folder / "odd.json").write_text(json.dumps(values | {"head_dim": 65}))
    (folder / "narrow.json").write_text(json.dumps(values | {"vocab_size": 255}))
    (folder / "wide.json").write_text(json.dumps(values | {"hidden_size": 96}))
    argument, given = REFUSED[case]
    usual = ["--text", folder / "text.txt", "--config", folder / "config.json"]
    result = invoke("run", *usual, *(value.format(folder=folder) for value in given))
    assert_refused(result, "run", argument)


@pytest.mark.parametrize("command", ["run", "explain"])
def test_cuda_without_cuda_is_refused(folder, monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = ["--text", folder / "text.txt"] if command == "run" else []
    assert_refused(invoke(command, *text, "--device", "cuda"), command, "--device")


def test_explain_refuses_a_length_beyond_the_config(folder):
    result = invoke("explain", "--config", folder / "config.json", "--seq-len", "513")
    assert_refused(result, "explain", "--seq-len")


@pytest.mark.parametrize("arguments", [["run"], ["run", "--text", "x", "--seq-len", "many"], ["fly"]])
def test_misspelled_commands_exit_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def assert_refused(result, command: str, argument: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"csa2 {command}: {argument}: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_a_machine_without_compiler_is_named(folder, monkeypatch):
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: None)
    result = invoke("run", "--text", folder / "text.txt")
    assert result.exit_code == 1
    assert "no C++ compiler" in result.stderr
    assert result.stderr.count("\n") == 1


def test_text_is_cut_to_length(folder):
    path = folder / "text.txt"
    text = run_report.read_text(path, 10)
    assert (text.name, text.data, text.truncated) == ("text.txt", TEXT.encode()[:10], True)
    whole = run_report.read_text(path, len(TEXT))
    assert (whole.data, whole.truncated) == (TEXT.encode(), False)
    assert run_report.read_text(path, 10**6).data == TEXT.encode()


def test_model_comes_from_seed_and_weights(folder):
    cfg, weights = small_config(), folder / "weights.safetensors"
    plain, again = (run_report.make_model(cfg, 0, "cpu") for _ in range(2))
    other, loaded = run_report.make_model(cfg, 1, "cpu"), run_report.make_model(cfg, 0, "cpu", weights)
    assert torch.equal(plain.layers[1].attn.wkv.weight, again.layers[1].attn.wkv.weight)
    assert torch.equal(loaded.layers[1].attn.wkv.weight, other.layers[1].attn.wkv.weight)
    assert torch.equal(loaded.embed.weight, plain.embed.weight)


def test_bits_of_a_uniform_guess():
    input_ids = torch.randint(256, (1, 7))
    assert run_report.bits_per_byte(torch.zeros(1, 7, 256), input_ids) == pytest.approx(8)
    assert run_report.bits_per_byte(torch.zeros(1, 1, 256), input_ids[:, :1]) is None


@pytest.mark.parametrize("num_tokens", [16, 64, 256])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_compiled_layout_is_what_a_compiled_call_takes(monkeypatch, num_tokens, layer_idx):
    cfg = replace(small_config(), sliding_window=96, index_topk=128, candidate_topk_blocks=64)
    attn = CSA2Attention(cfg, layer_idx)
    asked = attn.compiled_layout(num_tokens)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q = torch.zeros(1, num_tokens, cfg.num_attention_heads, cfg.head_dim)
    assert asked == attn.choose_layout(q, num_tokens if layer_idx else 0)
    attn.layout = AttentionLayout.DENSE
    assert attn.compiled_layout(num_tokens).reason == "requested"


def test_census_counts_named_ops():
    def graph_of(x: torch.Tensor) -> torch.Tensor:
        normed = ops.rms_norm(x, torch.ones(32), 1e-6)
        return ops.quantize_dequantize(ops.quantize_dequantize(normed, "fp8"), "nvfp4") + 1

    graph = make_fx(graph_of)(torch.randn(2, 32)).graph
    before = len(graph.nodes)
    report = run_report.NamedOpCensus().run(graph)
    assert report.fired == Counter({"csa2::quantize_dequantize": 2, "csa2::rms_norm": 1})
    assert len(graph.nodes) == before


class EagerStandIn(CompiledModel):
    """Runs blocks eagerly; the passes' reports are made up: a rewrite a block and one refusal."""

    def run_block(self, block, *args, **kwargs):
        census, inline = PassReport("census"), PassReport("inline")
        census.fire("csa2::rms_norm")
        inline.fire("csa2::rms_norm")
        inline.decline("csa2::gather_kv", "needs [B, S] on cuda")
        reports = {"census": census, "inline": inline}
        self.manager.reports.append(tuple(reports.get(name, PassReport(name)) for name in self.manager.names))
        return block(*args, **kwargs)


@pytest.fixture
def no_compiler(monkeypatch):
    def compile_for_report(model, passes, caches=False):
        compiled = run_report.compile_model(model, passes=passes, regional=True)
        return EagerStandIn(model, compiled.manager, True)

    monkeypatch.setattr(run_report, "compile_for_report", compile_for_report)


@pytest.mark.usefixtures("no_compiler")
def test_explain_prints_every_kind(folder):
    result = invoke("explain", "--config", folder / "config.json", "--seq-len", "48")
    assert result.exit_code == 0, result.output
    assert "4 kinds of block, compiled for 48 tokens" in result.stdout
    for kind in ("window", "full, ratio 1, publishes candidates", "reindex, ratio 1, selects within candidates"):
        assert result.stdout.count(f"\n{kind}\n") == 1
    assert result.stdout.count("rewrote 1 x rms_norm") == 4
    assert result.stdout.count("declined 1 x gather_kv: needs [B, S] on cuda") == 4
    assert "3, 4" in result.stdout


def test_explain_reports_the_costs_that_decided(folder):
    model = run_report.make_model(small_config(), 0, "cpu")
    compiled = run_report.compile_model(model, regional=True)
    report = run_report.report_explain(EagerStandIn(model, compiled.manager, True), 48)
    assert [kind.layers for kind in report.kinds] == [(0,), (1,), (2,), (3, 4)]
    for kind in report.kinds:
        assert kind.ops_before == {"csa2::rms_norm": 1}
        for pairs in (kind.dense_pairs, kind.slots_pairs):
            assert f"{pairs:.0f}" in kind.layout_reason


@pytest.mark.usefixtures("no_compiler")
def test_run_accepts_a_short_text(folder, tmp_path):
    (tmp_path / "one").write_bytes(b"\xff")
    result = invoke("run", "--text", tmp_path / "one", "--config", folder / "config.json", "--cache")
    assert result.exit_code == 0, result.output
    assert "one: all 1 bytes" in result.stdout
    assert "a single byte has no next one" in result.stdout
    assert "Graph caches were on" in result.stdout


@pytest.mark.usefixtures("no_compiler")
def test_run_takes_a_whole_model(folder, tmp_path):
    usual = ["run", "--text", folder / "text.txt", "--seq-len", "100", "--cache", "--json", tmp_path / "report.json"]
    result = invoke(*usual, "--model", DEMO_FOLDER)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["origin"], report["dtype"], len(report["layers"])) == (str(DEMO_FOLDER), "float32", 8)
    assert report["bits_per_byte"] < 6  # a uniform guess has 8
    assert f"model {DEMO_FOLDER}" in " ".join(result.stdout.split())
    assert "random" not in result.stdout
    assert_refused(invoke(*usual, "--model", tmp_path), "run", "--model")


def test_table_fits_100_columns():
    layer = run_report.LayerReport(
        index=38,
        kind="full, ratio 2",
        role="reindex",
        ratio=2,
        layout="slots",
        layout_reason="704 pairs a query against 262400 in dense",
        selected=512.0,
        visible=262144.5,
        relative_error=1.23e-3,
        same_selection=0.5,
        compiled_ms=1234.5,
        eager_ms=12345.67,
        compile_seconds=None,
        from_cache=False,
    )
    environment = run_report.Environment("2.13.0", "3.11.7", "CPU", 2)
    origin = run_report.Origin(None, None, 0)
    declined = (run_report.Declined("csa2::gather_kv", "on CPU", 3),)
    report = run_report.RunReport(
        text="text.txt",
        num_bytes=524289,
        text_truncated=True,
        origin=origin,
        environment=environment,
        dtype="float32",
        caches=False,
        kinds=1,
        graphs=1,
        compile_seconds=12.3,
        layers=(layer,),
        passes=(run_report.PassSummary("kv_gather", {}, declined),),
        bits_per_byte=8.1,
        uniform_bits=8.0,
    )
    file = io.StringIO()
    cli_module._print_run(Console(file=file, width=100), report)
    printed = file.getvalue()
    for whole in ("512.0 / 262144.5", "1.2e-03", "1234.50", "12345.67", "shared", "reindex"):
        assert whole in printed
    assert "Layer 38 selects other positions compiled than eager for 50.00 % of queries." in printed
    assert "Pass kv_gather: rewrote nothing\n  declined 3 x gather_kv: on CPU" in printed


@pytest.fixture
def nothing_compiles(monkeypatch):
    """doctor without its seconds of compiling; returns where the outcome can be set."""
    outcome: dict[str, Exception | None] = {"cpu": None, "cuda": None}

    def compile_on(device: str) -> None:
        if outcome[device] is not None:
            raise outcome[device]

    monkeypatch.setattr(doctor, "_compile_on", compile_on)
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return outcome


def test_doctor_prints_json(nothing_compiles):
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["core_works"] is True
    assert report["torch"] == torch.__version__
    features = {feature["name"]: feature for feature in report["features"]}
    assert features["eager"]["works"]
    assert features["compile on CUDA"]["works"] is False
    assert features["FlexAttention backward, CPU"]["works"] is False
    assert "gradients take the plain layout" in features["FlexAttention backward, CPU"]["detail"]
    assert features["safetensors with E8M0 scales"]["works"]


def test_doctor_names_what_broke(nothing_compiles):
    nothing_compiles["cpu"] = RuntimeError("ld: cannot find -lgomp\nmore")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "RuntimeError: ld: cannot find -lgomp" in result.stdout
    assert "do not both work here" in result.stdout
    assert "Traceback" not in result.output


def test_doctor_without_compiler(nothing_compiles, monkeypatch):
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: None)
    report = doctor.examine()
    assert report.cpp_compiler is None
    assert not report.core_works
    assert "CXX" in next(f.detail for f in report.features if f.name == doctor.COMPILE_ON_CPU)


def test_doctor_on_an_unknown_torch(nothing_compiles, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert invoke("doctor").exit_code == 1
    assert not doctor.torch_is_known("2.10.1")
    assert doctor.torch_is_known("2.13.0+cpu")


def test_tiles_follow_the_shared_memory():
    hopper = {choice.head_dim: choice.tiles for choice in doctor.choose_tiles(227 * 1024)}
    assert (hopper[64].block_m, hopper[64].block_n, hopper[64].num_stages) == (128, 64, 2)
    assert hopper[512].shared_bytes <= 227 * 1024
    (none,) = doctor.choose_tiles(16 * 1024, (512,))
    assert none.tiles is None
    assert "head_dim 512" in none.reason


def test_doctor_prints_cuda_devices(nothing_compiles, monkeypatch):
    tiles = doctor.choose_tiles(48 * 1024)
    device = doctor.CudaDevice("Some GPU", "9.0", 49152, 49152, tiles)
    monkeypatch.setattr(doctor, "_cuda_devices", lambda: (device,))
    printed = invoke("doctor").stdout
    assert "Some GPU, capability 9.0, 49152 bytes of shared memory a block" in printed
    assert f"{tiles[0].tiles.shared_bytes} of 49152 bytes" in printed


@pytest.mark.parametrize(
    ("capability", "system", "works"),
    [("AVX2", "linux", True), ("AVX512", "linux", True), ("DEFAULT", "linux", False), ("AVX2", "darwin", False)],
)
def test_flex_on_cpu_needs_avx2(capability, system, works):
    assert (doctor.flex_on_cpu_obstacle(capability, system) is None) is works


def test_help_names_every_option():
    printed = invoke("run", "--help").stdout
    for option in ("--text", "--config", "--weights", "--device", "--passes", "--seq-len", "--seed", "--json"):
        assert option in printed
    assert "--no-cache" in printed
    assert all(command in invoke("--help").stdout for command in ("run", "explain", "doctor"))
