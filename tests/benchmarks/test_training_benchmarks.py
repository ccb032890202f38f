"""The scripts that train: what they train on, what they write, and that the recall task is what it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recall
import torch
import train_demo
from typer.testing import CliRunner

from csa2_compiled import load_model

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


def test_the_model_has_every_role_and_fits_in_12_mb() -> None:
    assert {role.value for role in train_demo.MODEL.layer_roles} == {"window", "full", "reindex", "reuse"}
    with torch.device("meta"):
        model = train_demo.CSA2ForCausalLM(train_demo.MODEL, dtype=torch.bfloat16)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < 12e6


def test_the_demo_model_is_trained_measured_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = b"".join(b'The "%d" statement\n******\n\nIt does nothing.\n' % i for i in range(12))
    text = train_demo.Text(*({kind: [document] for kind in ("documentation", "library")} for _ in range(2)))
    monkeypatch.setattr(train_demo, "collect_text", lambda: text)
    monkeypatch.setattr(train_demo, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(train_demo, "trial_of", lambda *given: shortened(*trial_of(*given)))
    settings: dict[str, Any] = {"compile_": False, "distill": True, "topic_repeats": 2, "lr": 2e-3, "seed": 0}
    train_demo.main(tmp_path, device="cpu", minutes=0.03, **settings)
    names = {"model.safetensors", "config.json", "README.md", "report.json", "log.jsonl", "text"}
    assert {path.name for path in tmp_path.iterdir()} == names
    report = json.loads((tmp_path / "report.json").read_text())
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == report["steps"] > 0
    assert report["losses"][-1] == {key: log[-1][key] for key in ("step", "loss", "distillation_loss")}
    model = load_model(tmp_path)
    assert model.embed.weight.dtype == torch.bfloat16
    trained, drawn = (report["quality"][name]["library"] for name in ("trained", "indexer as drawn"))
    assert trained["bits_per_byte"]["dense"] == drawn["bits_per_byte"]["dense"]
    assert trained["bits_per_byte"]["window"] == drawn["bits_per_byte"]["window"]
    assert trained["recall"] != drawn["recall"]
    card = (tmp_path / "README.md").read_text()
    for part in (f"{report['steps']} steps", f"{trained['bits_per_byte']['sparse']:.4f}", "PSF License"):
        assert part in card


def test_steps_are_those_there_is_time_for(tmp_path: Path) -> None:
    cfg, settings = train_demo.trial_of(train_demo.MODEL, train_demo.SETTINGS)
    trainer = train_demo.Trainer(train_demo.CSA2ForCausalLM(cfg), [b"some text"], settings, tmp_path)
    trainer.steps_done = 12
    run = train_demo.Run(trainer, tmp_path, train_demo.time.monotonic() + 100, train_demo.Console(quiet=True))
    run._fix_steps([0.5] * 10 + [9.0, 9.0])  # the two slowest do not count
    assert 12 + 190 < trainer.cfg.steps <= 12 + 194
    assert trainer.cfg.learning_rate(11) == settings.learning_rate(11) == settings.lr
    assert trainer.cfg.learning_rate(trainer.cfg.steps - 1) == pytest.approx(settings.min_lr_ratio * settings.lr)


def test_a_step_that_cannot_go_on_leaves_the_model_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, settings = shortened(*train_demo.trial_of(train_demo.MODEL, train_demo.SETTINGS))
    trainer = train_demo.Trainer(train_demo.CSA2ForCausalLM(cfg), [b"some text"], settings, tmp_path)
    run = train_demo.Run(trainer, tmp_path, train_demo.time.monotonic() + 100, train_demo.Console(quiet=True))
    one_step = trainer.step

    def step() -> Any:
        if trainer.steps_done == 2:
            raise train_demo.TrainingError("step 3 has loss nan")
        return one_step()

    monkeypatch.setattr(trainer, "step", step)
    run.train()
    assert (run.problem, trainer.steps_done) == ("step 3 has loss nan", 2)


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
    assert "0.250" in shown.stdout
    assert "0.0625" in shown.stdout
