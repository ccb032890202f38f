"""The scripts that train: what they train on, what they write, and that the recall task is what it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recall
import timing
import torch
import train_demo
from typer.testing import CliRunner

from csa2_compiled import load_demo_model, load_model
from csa2_compiled.train_data import read_documents

trial_of = train_demo.trial_of


def test_no_held_out_document_is_trained_on() -> None:
    text = train_demo.collect_text()
    for kind in ("documentation", "library"):
        training, held_out = text.training[kind], text.held_out[kind]
        assert len(training) > len(held_out) > 0
        assert not set(training) & set(held_out)
    lines = {line for topic in text.training["documentation"] for line in topic.splitlines() if len(line) >= 40}
    for topic in text.held_out["documentation"]:
        own = [line for line in topic.splitlines() if len(line) >= 40]
        assert sum(line in lines for line in own) < 0.05 * len(own)
    assert train_demo.collect_text() == text
    assert len(text.documents(3)) == 3 * len(text.training["documentation"]) + len(text.training["library"])
    assert sum(map(len, text.held_out["documentation"])) >= 45_000


def test_text_that_is_held_out_is_there_and_not_trained_on() -> None:
    train_demo.Text({"library": [b"a", b"b"]}, {"library": [b"c"]}).check()
    with pytest.raises(ValueError, match="held-out library is empty"):
        train_demo.Text({"library": [b"a"]}, {"library": []}).check()
    with pytest.raises(ValueError, match="held-out library is trained on, in part"):
        train_demo.Text({"documentation": [b"a"], "library": [b"b"]}, {"library": [b"c", b"a"]}).check()


def test_files_of_the_library_are_regular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept.py").write_text("x = 1")
    (tmp_path / "linked.py").symlink_to(tmp_path / "kept.py")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.setattr(train_demo.sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(train_demo._library_files()) == [tmp_path / "kept.py"]


def test_the_model_has_every_role_and_fits_in_12_mb() -> None:
    assert {role.value for role in train_demo.MODEL.layer_roles} == {"window", "full", "reindex", "reuse"}
    with torch.device("meta"):
        model = train_demo.CSA2ForCausalLM(train_demo.MODEL, dtype=torch.bfloat16)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < 12e6
    assert load_demo_model().cfg == train_demo.MODEL


def test_the_demo_model_is_trained_measured_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = b"".join(b'The "%d" statement\n******\n\nIt does nothing.\n' % i for i in range(12))
    in_short(document, monkeypatch)
    monkeypatch.setattr(train_demo, "_SAVE_SECONDS", 0.0)
    settings: dict[str, Any] = {"compile_": False, "distill": True, "topic_repeats": 2, "lr": 2e-3, "seed": 0}
    cards: list[str] = []

    def continuations(*given: Any) -> Any:
        cards.append((tmp_path / "out" / "README.md").read_text())
        return original(*given)

    original = train_demo.continuations
    monkeypatch.setattr(train_demo, "continuations", continuations)
    train_demo.main(tmp_path / "out", device="cpu", minutes=0.03, text_folder=tmp_path / "text", **settings)
    assert {path.name for path in (tmp_path / "text").iterdir()} == {"documentation.txt", "library.txt"}
    tmp_path /= "out"
    names = {"model.safetensors", "config.json", "README.md", "report.json", "log.jsonl", "held-out.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert read_documents([tmp_path / "held-out.txt"]) == [document, document]
    report = json.loads((tmp_path / "report.json").read_text())
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == report["steps"] >= 2
    distilled = [step["distillation_loss"] for step in log if "distillation_loss" in step]
    assert [step["step"] for step in log if "distillation_loss" in step] == list(
        range(1, len(log) + 1, train_demo.SETTINGS.distill_every)
    )
    last = {"step": len(log), "loss": log[-1]["loss"], "distillation_loss": distilled[-1]}
    assert report["losses"][-1] == last
    assert (report["problem"], report["skipped"]) == (None, [])
    model = load_model(tmp_path)
    assert model.embed.weight.dtype == torch.bfloat16
    trained, drawn = (report["quality"][name]["library"] for name in ("trained", "indexer as drawn"))
    assert trained["bits_per_byte"]["dense"] == drawn["bits_per_byte"]["dense"]
    assert trained["bits_per_byte"]["window"] == drawn["bits_per_byte"]["window"]
    assert trained["recall"] != drawn["recall"]
    card = (tmp_path / "README.md").read_text()
    for part in (f"{report['steps']} steps", f"{trained['bits_per_byte']['sparse']:.4f}", "PSF License"):
        assert part in card
        assert part in cards[0]
    assert report["samples"][-1]["continuation"] in card
    assert "**A continuation**" in card
    assert "**A continuation**" not in cards[0]


def test_steps_are_those_there_is_time_for(tmp_path: Path) -> None:
    cfg, settings = train_demo.trial_of(train_demo.MODEL, train_demo.SETTINGS)
    trainer = train_demo.Trainer(train_demo.CSA2ForCausalLM(cfg), [b"some text"], settings, tmp_path)
    trainer.steps_done = 12
    run = train_demo.Run(trainer, tmp_path, train_demo.time.monotonic() + 100, train_demo.Console(quiet=True))
    run._fix_steps([0.5] * 10 + [9.0, 9.0])  # the two slowest do not count
    assert 12 + 190 < trainer.cfg.steps <= 12 + 194
    assert trainer.cfg.learning_rate(11) == settings.learning_rate(11) == settings.lr
    assert trainer.cfg.learning_rate(trainer.cfg.steps - 1) == pytest.approx(settings.min_lr_ratio * settings.lr)
    run._fix_steps([1e-3] * 12)
    assert trainer.cfg.steps <= settings.steps  # no more than asked for


def make_run(out: Path, **changes: Any) -> Any:
    cfg, settings = shortened(*trial_of(train_demo.MODEL, replace(train_demo.SETTINGS, **changes)))
    trainer = train_demo.Trainer(train_demo.CSA2ForCausalLM(cfg), [b"some text", b"another"], settings, out)
    return train_demo.Run(trainer, out, train_demo.time.monotonic() + 100, train_demo.Console(quiet=True))


def test_a_batch_that_is_not_finite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, steps=9)
    trainer, one_step, positions = run.trainer, run.trainer.step, []

    def step() -> Any:
        positions.append(trainer.position)
        if len(positions) in (3, 5):
            raise train_demo.TrainingError(f"call {len(positions)}")
        return one_step()

    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(run, "_fix_steps", lambda times: None)
    run.train()
    assert (run.problems, run.skips, trainer.steps_done) == ([], ["call 3", "call 5"], 9)
    assert len(set(positions)) == len(positions) == 11


@pytest.mark.parametrize("good", [0, 2])
def test_the_fifth_such_batch_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    run = make_run(tmp_path)
    one_step = run.trainer.step

    def step() -> Any:
        if run.trainer.steps_done == good:
            raise train_demo.TrainingError("loss nan")
        return one_step()

    monkeypatch.setattr(run.trainer, "step", step)
    if good == 0:
        with pytest.raises(train_demo.TrainingError, match="loss nan"):
            run.train()
        return
    run.train()
    assert (run.problems, run.trainer.steps_done) == (["the training ended early: loss nan"], good)
    assert run.skips == ["loss nan"] * 5


def test_blocks_that_cannot_be_compiled_run_eagerly_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_short(b'The "a" statement\n' * 20, monkeypatch)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel\nand more of it")

    monkeypatch.setattr(
        train_demo.Trainer, "_make_forward", lambda self: broken if self.cfg.compile else self._computing
    )
    arguments: dict[str, Any] = {"device": "cpu", "minutes": 0.01, "compile_": True, "distill": False}
    with pytest.raises(train_demo.typer.Exit) as raised:
        train_demo.main(tmp_path, **arguments)
    assert raised.value.exit_code == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problem"].endswith("first compiled step failed: RuntimeError: no such kernel")
    assert report["settings"]["compile"] is False
    assert report["steps"] >= 2
    assert (tmp_path / "README.md").exists()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_another_error_leaves_the_model_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    in_short(b'The "a" statement\n' * 20, monkeypatch)
    one_step = train_demo.Trainer.step

    def step(self: Any) -> Any:
        if self.steps_done == steps_before:
            raise RuntimeError("device lost")
        return one_step(self)

    monkeypatch.setattr(train_demo.Trainer, "step", step)
    with pytest.raises(RuntimeError, match="device lost"):
        train_demo.main(tmp_path, device="cpu", minutes=1.0)
    assert (tmp_path / "model.safetensors").exists() == (tmp_path / "report.json").exists() == (steps_before > 0)
    if steps_before:
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["problem"], report["steps"]) == ("RuntimeError: device lost", 2)


@pytest.mark.parametrize("given", ["--out X", "--out=X", "--output X", "--output=X", "--text X", "--out"])
def test_a_recorded_command_names_no_path(given: str) -> None:
    command = ["benchmarks/train_demo.py", "--seed", "3", *given.split(), "--quick"]
    if given == "--out":
        command.remove("--quick")
    kept = timing.without_paths(command)
    assert kept == ["benchmarks/train_demo.py", "--seed", "3", *(["--quick"] if given != "--out" else [])]


def in_short(document: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with one document for everything and short rows."""
    text = train_demo.Text(*({kind: [document] for kind in ("documentation", "library")} for _ in range(2)))
    monkeypatch.setattr(train_demo, "collect_text", lambda: text)
    monkeypatch.setattr(train_demo, "trial_of", lambda *given: shortened(*trial_of(*given)))


def shortened(cfg: Any, settings: Any) -> Any:
    return cfg, replace(settings, warmup=7, seq_len=64, batch_size=1)


def test_answers_follow_their_keys_far_outside_the_window() -> None:
    tokens, is_answer = recall.make_batch(4, recall.GAP, torch.Generator().manual_seed(0))
    reach = recall.MODEL.num_hidden_layers * (recall.MODEL.sliding_window - 1)
    answers = is_answer.nonzero().flatten().tolist()
    assert len(answers) == recall.QUERIES
    for row in tokens.tolist():
        pairs = dict(zip(row[0 : 2 * recall.PAIRS : 2], row[1 : 2 * recall.PAIRS : 2], strict=True))
        assert len(pairs) == recall.PAIRS
        for i in answers:
            assert row[i] == pairs[row[i - 1]]
            assert i - 1 - reach >= 2 * recall.PAIRS
        assert all(token >= recall.KEYS + recall.VALUES for token in row[2 * recall.PAIRS : -2 * recall.QUERIES])
    assert reach < recall.GAP < recall.LONG_GAP


@pytest.mark.parametrize("variant", recall.VARIANTS)
def test_each_variant_trains_and_is_measured(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "accuracy", lambda model, run_block, gap, seed: 0.25)
    path = tmp_path / "recall.json"
    arguments = [
        "--steps",
        "3",
        "--dense-steps",
        "1",
        "--batch-size",
        "2",
        "--variants",
        variant,
        "--output",
        str(path),
    ]
    app = recall.typer.Typer()
    app.command()(recall.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [row["variant"] for row in report["rows"]] == [variant]
    shown = CliRunner().invoke(app, ["--show", str(path)])
    assert shown.stdout.startswith(
        f"device {report['device']}, threads {report['threads']}, torch {torch.__version__}, "
    )
    assert "0.250" in shown.stdout
    assert "0.0625" in shown.stdout


def test_the_recall_result_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    results = timing.REPOSITORY / "benchmarks" / "results"
    recall.main(show=results / "cpu-recall.json")
    first, second, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("device ")
    assert "date " in first
    assert second == "python benchmarks/recall.py"
    assert any("indexer distilled" in line for line in table)
    with pytest.raises(recall.typer.BadParameter, match="another benchmark"):
        recall.main(show=results / "h200-decode.json")


def test_a_variant_that_is_none_is_refused_by_name() -> None:
    app = recall.typer.Typer()
    app.command()(recall.main)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--variants", "window only,dense"])
    assert result.exit_code == 2
    assert "'dense' is no variant; allowed are window only, indexer as drawn" in result.stderr


class Oracle(torch.nn.Module):
    """Knows the token after each one, but says the wrong one at the last `wrong` answers."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.embed, self.wrong = torch.nn.Embedding(1, 1), wrong

    def forward(self, tokens: torch.Tensor, run_block: Any) -> torch.Tensor:
        following = tokens.roll(-1, 1)
        for i in range(self.wrong):
            following[:, -2 - 2 * i] += 1
        return torch.nn.functional.one_hot(following, recall.MODEL.vocab_size).float()


@pytest.mark.parametrize(("wrong", "share"), [(0, 1.0), (3, 5 / 8), (recall.QUERIES, 0.0)])
def test_accuracy_is_the_share_of_right_answers(wrong: int, share: float) -> None:
    oracle: Any = Oracle(wrong)
    for gap in (recall.GAP, recall.LONG_GAP):
        assert recall.accuracy(oracle, lambda *_: None, gap, seed=0, batches=2) == pytest.approx(share)
