"""The model that comes with the package, through the doors that users take; no test depends on its exact weights."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from csa2_compiled import CSA2ForCausalLM, LayerRole, QualityReport, evaluate, load_demo_model
from csa2_compiled.cli import app
from csa2_compiled.model_files import DEMO_FOLDER, WEIGHTS_NAME

# What Python says about its strings' methods. It comes from C sources, which the model was not trained on.
METHODS = (f"str.{name}\n\n{inspect.getdoc(getattr(str, name))}" for name in dir(str) if not name.startswith("_"))
TEXT = "\n\n".join(METHODS).encode()[:1000]


@pytest.fixture(scope="module")
def model() -> CSA2ForCausalLM:
    return load_demo_model()


@pytest.fixture(scope="module")
def report(model: CSA2ForCausalLM) -> QualityReport:
    return evaluate(model, [TEXT], len(TEXT), attends=["sparse", "window"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(argument) for argument in arguments])


def test_it_is_small_and_has_every_role(model: CSA2ForCausalLM) -> None:
    assert (DEMO_FOLDER / WEIGHTS_NAME).stat().st_size <= 12_000_000
    assert not model.training
    assert model.embed.weight.dtype == torch.bfloat16
    assert set(model.cfg.layer_roles) == set(LayerRole)
    assert set(model.cfg.compress_ratios) == {0, 1, 2}
    assert model.cfg.candidate_source_layer_id >= 0


def test_it_has_learnt_to_read_documentation(report: QualityReport) -> None:
    bits = report.bits_per_byte
    assert bits["sparse"] < 4.0  # a uniform guess has 8
    assert bits["sparse"] < bits["window"] - 0.05


def test_its_indexers_find_more_than_chance(model: CSA2ForCausalLM, report: QualityReport) -> None:
    assert [layer.layer for layer in report.layers] == list(model.cfg.index_source_layer_ids)
    for layer in report.layers:
        assert layer.recall is not None
        assert layer.random is not None
        assert layer.recall > 1.5 * layer.random


def test_generate_takes_it(model: CSA2ForCausalLM) -> None:
    prompt = 'The "select" statement is used to'
    result = invoke("generate", "--eager", "--prompt", prompt, "--max-new-tokens", 40, "--temperature", 0)
    assert result.exit_code == 0, result.output
    written = result.stdout.encode()
    assert len(written) > 20
    letters = sum(byte in b"abcdefghijklmnopqrstuvwxyz \n" for byte in written)
    assert letters > 0.7 * len(written)  # a sixth, if bytes were drawn at random


def test_evaluate_takes_it(model: CSA2ForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT[:150])
    result = invoke("evaluate", "--text", tmp_path / "text.txt", "--seq-len", 150, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    expected = evaluate(model, [TEXT[:150]], 150).to_dict()
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(expected))


def test_masks_take_it(model: CSA2ForCausalLM, text: Path, tmp_path: Path) -> None:
    usual = ("masks", "--text", text, "--seq-len", 200, "--layers", "1,3,5", "--queries", "150:")
    views = []
    for more in ((), ("--model", DEMO_FOLDER)):
        result = invoke(*usual, *more, "--json", tmp_path / "data.json")
        assert result.exit_code == 0, result.output
        views.append(json.loads((tmp_path / "data.json").read_text(encoding="utf-8")))
    assert views[0]["origin"] == {"model": "the shipped demo model"}
    assert views[0]["layers"] == views[1]["layers"]
    assert [layer["role"] for layer in views[0]["layers"]] == ["full", "full", "reindex"]
