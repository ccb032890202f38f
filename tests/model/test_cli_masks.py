"""`csa2 masks`: what it writes, and what it refuses and how."""

import json
import os
from pathlib import Path

import pytest
import torch
from golden_files import GOLDEN
from typer.testing import CliRunner

from csa2_compiled import CSA2Attention, CSA2Config, cli_masks, run_report, save_model, save_state
from csa2_compiled.checkpoint import save_attention
from csa2_compiled.cli import app
from csa2_compiled.cli_masks import parse_layers, parse_queries
from csa2_compiled.masks import visualize
from csa2_compiled.run_report import BadArgumentError

TEXT = "Every query attends to a short window and to a selection of the whole past — all of it.\n"
NUM_BYTES = len(TEXT.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, the tiny config, attention weights and a model of seed 1, and states of two rows, the text the second."""
    folder = tmp_path_factory.mktemp("masks")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    CSA2Config.tiny().to_json(folder / "config.json")
    model = run_report.make_model(CSA2Config.tiny(), 1, "cpu")
    save_attention(model, folder / "weights.safetensors")
    save_model(model, folder / "model")

    def run_block(block, *inputs):
        output = block(*inputs)
        layer = block.attn.layer_idx
        save_state(output.state, folder / f"state{layer}", model.cfg, layer)
        return output

    with torch.no_grad():
        model(torch.tensor([[32] * NUM_BYTES, list(TEXT.encode())]), run_block=run_block)
    padded = torch.ones(2, NUM_BYTES, dtype=torch.int64)
    padded[1, 30:] = 0
    layer = CSA2Attention(model.cfg, 2)
    with torch.no_grad():
        state = layer(torch.randn(2, NUM_BYTES, model.cfg.hidden_size), attention_mask=padded).state
    save_state(state, folder / "padded", model.cfg, 2)
    (folder / "cut").write_bytes((folder / "state8").read_bytes()[:-1])
    return folder


def invoke(*arguments: object):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["masks", *map(str, arguments)])


def test_everything_at_once(folder, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    arguments = ["--text", folder / "text.txt", "--layers", "0,5-7", "--queries", "40:60", "--png", pictures]
    result = invoke(*arguments, "--html", tmp_path / "page.html", "--json", tmp_path / "data.json", "--ascii")
    assert result.exit_code == 0, result.output
    assert {path.stem for path in pictures.iterdir()} == set(visualize.FIGURES)
    values = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert [layer["layer"] for layer in values["layers"]] == [0, 5, 6, 7]
    assert [query["query"] for query in values["layers"][0]["queries"]] == list(range(40, 60))
    assert values["tokens"][:5] == list("Every")
    assert len(values["tokens"]) == NUM_BYTES
    assert "text.txt" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"text.txt, all {NUM_BYTES} bytes: query 59" in result.stdout
    assert "layer 5: reindex, ratio 1: reindexes the keys of layer 3 among the candidates of layer 3" in result.stdout
    written = [
        *(pictures / f"{name}.png" for name in visualize.FIGURES),
        tmp_path / "page.html",
        tmp_path / "data.json",
    ]
    assert result.stderr.splitlines() == [f"written: {path}" for path in written]


def test_without_an_output_it_prints(folder):
    result = invoke("--text", folder / "text.txt", "--seq-len", "20", "--layers", "2")
    assert result.exit_code == 0, result.output
    assert "text.txt, the first 20 bytes: query 19" in result.stdout
    assert "Every query attends" in result.stdout


def test_one_picture_is_the_map(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setitem(visualize.FIGURES, "map", lambda report, head: drawn.append(head) or visualize.draw_map(report))
    path = tmp_path / "map.png"
    result = invoke("--text", folder / "text.txt", "--layers", "5", "--queries", "50", "--head", "2", "--png", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert drawn == [2]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_window_layers_alone_have_no_scores_to_draw(folder, tmp_path):
    result = invoke("--text", folder / "text.txt", "--seed", "0", "--layers", "0,1", "--png", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.stem for path in tmp_path.iterdir()} == set(visualize.FIGURES) - {"scores"}


def test_weights_and_config_change_the_selection(folder, tmp_path):
    usual = ["--text", folder / "text.txt", "--layers", "2", "--queries", "80", "--config", folder / "config.json"]
    found = []
    for name, more in (("a", []), ("b", ["--weights", folder / "weights.safetensors"]), ("c", ["--seed", "1"])):
        assert invoke(*usual, *more, "--json", tmp_path / name).exit_code == 0
        found.append(json.loads((tmp_path / name).read_text(encoding="utf-8")))
    assert "attention from" in found[1]["origin"]["weights"]
    selections = [values["layers"][0]["queries"][0]["selected"] for values in found]
    assert selections[0] != selections[1]


def test_inputs_of_a_file_with_its_own_weights(tmp_path):
    arguments = ["--inputs", GOLDEN / "released_schedule_mini.safetensors", "--row", "1", "--layers", "7"]
    result = invoke(*arguments, "--queries", "76", "--json", tmp_path / "data.json")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert values["origin"]["row"] == "1"
    assert values["layers"][0]["lineage"]["selected_by"] == 7


def test_a_whole_model_from_a_directory(folder, tmp_path):
    usual = ["--text", folder / "text.txt", "--layers", "5"]
    for name, more in (("a", ["--model", folder / "model"]), ("b", ["--seed", "1"])):
        result = invoke(*usual, *more, "--json", tmp_path / name)
        assert result.exit_code == 0, result.output
    values, drawn = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in "ab")
    assert values["origin"] == {"model": str(folder / "model")}
    assert values["layers"] == drawn["layers"]


def test_a_state_shows_what_the_run_showed_in_all_outputs(folder, tmp_path):
    state = ["--state", folder / "state8", "--text", folder / "text.txt", "--row", "1"]
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    outputs = ["--png", pictures, "--html", tmp_path / "page.html", "--json", tmp_path / "state.json", "--ascii"]
    result = invoke(*state, *outputs)
    assert result.exit_code == 0, result.output
    assert {path.stem for path in pictures.iterdir()} == set(visualize.FIGURES) - {"mass", "scores"}
    text = ["--text", folder / "text.txt", "--model", folder / "model", "--layers", "0-4,7-8"]
    assert invoke(*text, "--json", tmp_path / "run.json").exit_code == 0
    values, ran = (json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("state", "run"))
    assert values["origin"] == {"state": "state8", "after layer": "8", "row": "1"}
    assert values["tokens"] == ran["tokens"]
    for layer, other in zip(values["layers"], ran["layers"], strict=True):
        for key in ("layer", "role", "ratio", "blocks", "position_text"):
            assert layer[key] == other[key]
        for query, of_run in zip(layer["queries"], other["queries"], strict=True):
            assert query == {**of_run, "mass": None, "scores": None}
    shown = " ".join(result.stdout.split())
    for output in (values["absent"], shown, (tmp_path / "page.html").read_text(encoding="utf-8")):
        assert "attention mass and index scores, because a saved state has neither queries nor weights" in output
    assert "state8 after layer 8, " in shown


def test_a_state_alone_numbers_its_tokens(folder):
    result = invoke("--state", folder / "state3", "--layers", "3", "--queries", "20")
    assert result.exit_code == 0, result.output
    assert "layer 3: reuse, ratio 2: reuses the selection of layer 2" in result.stdout
    assert " 17 18 19 20" in result.stdout


SCHEDULE = GOLDEN / "released_schedule_mini.safetensors"
REFUSED = {
    "no input": ("--text", []),
    "two inputs": ("--text", ["--text", "{folder}/text.txt", "--inputs", SCHEDULE]),
    "no file": ("--text", ["--text", "{folder}/none"]),
    "empty": ("--text", ["--text", "{folder}/empty"]),
    "length": ("--seq-len", ["--text", "{folder}/text.txt", "--seq-len", "0"]),
    "layers spelled": ("--layers", ["--text", "{folder}/text.txt", "--layers", "two"]),
    "layers outside": ("--layers", ["--text", "{folder}/text.txt", "--layers", "2-9"]),
    "layers backwards": ("--layers", ["--text", "{folder}/text.txt", "--layers", "5-2"]),
    "queries spelled": ("--queries", ["--text", "{folder}/text.txt", "--queries", "1-2"]),
    "queries outside": ("--queries", ["--text", "{folder}/text.txt", "--queries", "91"]),
    "no queries": ("--queries", ["--text", "{folder}/text.txt", "--queries", "7:7"]),
    "head": ("--head", ["--text", "{folder}/text.txt", "--head", "8"]),
    "head of the tiny config": ("--head", ["--text", "{folder}/text.txt", "--seed", "0", "--head", "4"]),
    "negative head": ("--head", ["--text", "{folder}/text.txt", "--head", "-1"]),
    "row of a text": ("--row", ["--text", "{folder}/text.txt", "--row", "1"]),
    "row": ("--row", ["--inputs", SCHEDULE, "--row", "2"]),
    "seed": ("--seed", ["--text", "{folder}/text.txt", "--seed", "-1"]),
    "config": ("--config", ["--text", "{folder}/text.txt", "--config", "{folder}/none"]),
    "config besides inputs": ("--config", ["--inputs", SCHEDULE, "--config", "{folder}/config.json"]),
    "weights": ("--weights", ["--text", "{folder}/text.txt", "--weights", "{folder}/text.txt"]),
    "weights besides inputs": ("--weights", ["--inputs", SCHEDULE, "--weights", "{folder}/weights.safetensors"]),
    "no inputs": ("--inputs", ["--inputs", "{folder}/none"]),
    "inputs that are weights": ("--inputs", ["--inputs", "{folder}/weights.safetensors"]),
    "model": ("--model", ["--text", "{folder}/text.txt", "--model", "{folder}/none"]),
    "model that is none": ("--model", ["--text", "{folder}/text.txt", "--model", "{folder}"]),
    "model besides inputs": ("--model", ["--inputs", SCHEDULE, "--model", "{folder}/model"]),
    "model without text": ("--text", ["--model", "{folder}/model"]),
    "length for the model": (
        "--seq-len",
        ["--text", "{folder}/text.txt", "--model", "{folder}/model", "--seq-len", "0"],
    ),
    "seed besides inputs": ("--seed", ["--inputs", SCHEDULE, "--seed", "0"]),
    "length besides inputs": ("--seq-len", ["--inputs", SCHEDULE, "--seq-len", "512"]),
    **{
        f"{name} besides model": (f"--{name}", ["--text", "{folder}/text.txt", "--model", "{folder}/model", *given])
        for name, given in {
            "config": ["--config", "{folder}/config.json"],
            "weights": ["--weights", "{folder}/weights.safetensors"],
            "seed": ["--seed", "0"],
        }.items()
    },
    **{
        f"{name} besides state": (f"--{name}", ["--state", "{folder}/state8", f"--{name}", value])
        for name, value in {
            "inputs": SCHEDULE,
            "model": "{folder}/model",
            "config": "{folder}/config.json",
            "weights": "{folder}/weights.safetensors",
            "seed": "0",
            "seq-len": "512",
            "head": "0",
        }.items()
    },
    "no state": ("--state", ["--state", "{folder}/none"]),
    "state that is cut off": ("--state", ["--state", "{folder}/cut"]),
    "state that is weights": ("--state", ["--state", "{folder}/weights.safetensors"]),
    "state without publications": ("--state", ["--state", "{folder}/state1"]),
    "state of padded rows": ("--state", ["--state", "{folder}/padded", "--row", "1"]),
    "row of a state": ("--row", ["--state", "{folder}/state8", "--row", "2"]),
    "layer after the state": ("--layers", ["--state", "{folder}/state3", "--layers", "4"]),
    "selection that was replaced": ("--layers", ["--state", "{folder}/state8", "--layers", "5"]),
    "layer that there is not": ("--layers", ["--state", "{folder}/state8", "--layers", "9"]),
    "query of a state": ("--queries", ["--state", "{folder}/state8", "--queries", "100"]),
    "text shorter than the state": ("--text", ["--state", "{folder}/state8", "--text", "{folder}/short.txt"]),
    "picture of another kind": ("--png", ["--text", "{folder}/text.txt", "--png", "{folder}/map.jpg"]),
    "picture to nowhere": ("--png", ["--text", "{folder}/text.txt", "--png", "{folder}/none/map.png"]),
    "page to a folder": ("--html", ["--text", "{folder}/text.txt", "--html", "{folder}"]),
    "data to nowhere": ("--json", ["--text", "{folder}/text.txt", "--json", "{folder}/none/data.json"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(folder, case):
    (folder / "empty").touch()
    (folder / "short.txt").write_text("short", encoding="utf-8")
    argument, given = REFUSED[case]
    result = invoke(*(str(value).format(folder=folder) for value in given))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"csa2 masks: {argument}: ")
    assert result.stderr.count("\n") == 1


def test_missing_matplotlib_is_named(folder, tmp_path, monkeypatch):
    def missing():
        raise visualize.VisualizationError("figures need matplotlib; pip install 'csa2-compiled[viz]' brings it")

    monkeypatch.setattr(cli_masks.visualize, "import_matplotlib", missing)
    result = invoke("--text", folder / "text.txt", "--png", tmp_path)
    assert result.exit_code == 1
    assert "csa2-compiled[viz]" in result.stderr
    assert not os.listdir(tmp_path)


def test_a_name_that_is_no_text(tmp_path):
    path = os.fsencode(tmp_path / "odd") + b"\xff.txt"
    Path(os.fsdecode(path)).write_text(TEXT, encoding="utf-8")
    more = ["--layers", "2", "--png", tmp_path, "--html", tmp_path / "page.html", "--json", tmp_path / "data.json"]
    result = invoke("--text", os.fsdecode(path), *more, "--ascii")
    assert result.exit_code == 0, result.output
    assert "odd\\udcff.txt" in result.stdout


def test_a_terminal_without_such_characters_gets_escapes(folder):
    runner = CliRunner(charset="ascii")
    result = runner.invoke(app, ["masks", "--text", str(folder / "text.txt"), "--layers", "0"])
    assert result.exit_code == 0, result.output
    assert "\\u2014" in result.stdout


def test_ranges():
    assert parse_layers("all", 3) == (0, 1, 2)
    assert parse_layers("5, 1-2,2", 6) == (1, 2, 5)
    assert parse_queries("all", 7) == range(7)
    assert parse_queries("3", 7) == range(3, 4)
    assert parse_queries("2:", 7) == range(2, 7)
    assert parse_queries(":2", 7) == range(2)
    assert parse_queries("2:5", 7) == range(2, 5)
    for queries in ("", "-1", "7", "3:8"):
        with pytest.raises(BadArgumentError):
            parse_queries(queries, 7)


def test_the_masks_package_knows_nothing_of_the_model():
    sources = Path(visualize.__file__).resolve().parent.glob("*.py")
    lines = [line.strip() for source in sources for line in source.read_text(encoding="utf-8").splitlines()]
    imports = [line for line in lines if line.startswith(("from csa2_compiled", "import csa2_compiled"))]
    assert imports
    assert [line for line in imports if not line.startswith("from csa2_compiled.masks")] == []
