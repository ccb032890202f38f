"""`csa2 train`: what it writes and prints, going on after a signal, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import make_config
from typer.testing import CliRunner

from csa2_compiled import CSA2ForCausalLM, doctor, load_model, save_model
from csa2_compiled.cli import app
from csa2_compiled.train import StepReport, Trainer, TrainingError

TEXT = b"the cat sat on the mat and the dog sat on the cat.\f" * 12
SETTINGS = ("--steps", 6, "--batch-size", 2, "--seq-len", 32, "--warmup", 2, "--val-every", 3, "--save-every", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").write_bytes(TEXT)
    (folder / "two").write_bytes(TEXT[:40])
    (folder / "empty").touch()
    (folder / "short").write_bytes(b"abc")
    make_config((0, 2, 2), (1,), (1,)).to_json(folder / "config.json")
    make_config((0,), (), (), vocab_size=255).to_json(folder / "narrow.json")
    return folder


def arguments(folder: Path, out: Path, *more: object) -> list[str]:
    usual = ("train", "--text", folder / "text", "--config", folder / "config.json", "--out", out, *SETTINGS)
    return [str(argument) for argument in (*usual, *more)]


def invoke(folder: Path, out: Path, *more: object) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments(folder, out, *more))


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def untimed(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in step.items() if "second" not in key} for step in log]


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Any, Path]:
    out = folder / "finished"
    result = invoke(folder, out)
    assert result.exit_code == 0, result.output
    return result, out


def test_a_run_leaves_log_checkpoints_and_a_model(finished: tuple[Any, Path]) -> None:
    result, out = finished
    log = log_of(out)
    keys = {"step", "epoch", "loss", "lr", "grad_norm", "bytes", "seconds", "bytes_per_second"}
    assert [step["step"] for step in log] == [1, 2, 3, 4, 5, 6]
    assert all(keys <= set(step) <= keys | {"val_bits_per_byte"} for step in log)
    assert [step["step"] for step in log if "val_bits_per_byte" in step] == [3, 6]
    assert all(step["seconds"] > 0 and step["bytes"] > 0 for step in log)
    names = {"checkpoint-2", "checkpoint-4", "checkpoint-6", "latest", "log.jsonl", "model.safetensors", "config.json"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "latest").read_text() == "checkpoint-6\n"
    last, where = result.stdout.splitlines()
    held_out = f"{log[-1]['val_bits_per_byte']:.3f} bits per byte on held-out text"
    assert last == f"Step 6 of 6: loss {log[-1]['loss']:.4f} nats per byte, {held_out}."
    assert where == f"The model is in {out}: csa2 generate --model {out} --prompt ..."
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [f"Step {i} of 6" for i in (1, 3, 6)]
    assert "tokens/s" in result.stderr


def test_a_run_that_distills_says_so(folder: Path) -> None:
    result = invoke(folder, folder / "distilled", "--distill", "--distill-warmup", 4, "--distill-weight", 2)
    assert result.exit_code == 0, result.output
    assert all(step["distillation_loss"] > 0 for step in log_of(folder / "distilled"))
    assert "distillation 0.0" in result.stderr
    result = invoke(folder, folder / "seldom", "--distill", "--distill-every", 3)
    assert ["distillation_loss" in step for step in log_of(folder / "seldom")] == [s % 3 == 1 for s in range(1, 7)]
    assert result.stderr.splitlines()[-1].count("distillation 0.0") == 1


def test_the_model_generates(finished: tuple[Any, Path]) -> None:
    _, out = finished
    usual = ["generate", "--model", out, "--eager", "--prompt", "the ", "--max-new-tokens", 5, "--temperature", 0]
    result = CliRunner().invoke(app, [str(a) for a in usual])
    assert result.exit_code == 0, result.output
    model, ids = load_model(out).eval(), list(b"the ")
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert result.stdout.rstrip("\n") == bytes(ids[4:]).decode().rstrip("\n")


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        (["--model", "{folder}"], "--model"),
        (["--model", "{folder}/none"], "--model"),
        (["--model", "{out}", "--config", "{folder}/config.json"], "--model"),
        (["--model", "{out}", "--weights", "{out}"], "--model"),
        (["--model", "{folder}/many"], "--model"),
        (["--model", "{out}", "--max-new-tokens", "200"], "--max-new-tokens after a prompt of 4 bytes"),
    ],
)
def test_generate_refuses_in_one_line(finished: tuple[Any, Path], folder: Path, more: list[str], argument: str) -> None:
    save_model(CSA2ForCausalLM(make_config((0,), (), (), vocab_size=300)), folder / "many")
    given = [value.format(folder=folder, out=finished[1]) for value in more]
    result = CliRunner().invoke(app, ["generate", "--eager", "--prompt", "the ", *given])
    assert_refused(result, "generate", argument)


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while that step runs."""
    original: Callable[[Trainer], StepReport] = Trainer.step

    def interrupted(self: Trainer) -> StepReport:
        if self.steps_done == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Trainer, "step", interrupted)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    folder: Path, finished: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    out, handler = tmp_path / "out", signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        result = invoke(folder, out)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-2:] == [
        f"csa2 train: interrupted after step {step} of 6; {out / f'checkpoint-{step}'} is saved.",
        "The same command with --resume goes on from there.",
    ]
    assert result.stdout == ""
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(log_of(out)) == step
    assert not (out / "model.safetensors").exists()
    resumed = invoke(folder, out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert untimed(log_of(out)) == untimed(log_of(finished[1]))
    assert (out / "model.safetensors").read_bytes() == (finished[1] / "model.safetensors").read_bytes()


def test_an_interrupt_in_the_last_step_is_a_finished_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(6, monkeypatch)
    assert invoke(folder, tmp_path).exit_code == 0
    assert (tmp_path / "model.safetensors").exists()


def test_what_was_done_after_the_checkpoint_is_done_again(
    folder: Path, finished: tuple[Any, Path], tmp_path: Path
) -> None:
    assert invoke(folder, tmp_path).exit_code == 0
    (tmp_path / "latest").write_text("checkpoint-2\n")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # as a killed run leaves it
    assert invoke(folder, tmp_path, "--resume").exit_code == 0
    assert untimed(log_of(tmp_path)) == untimed(log_of(finished[1]))


def test_a_finished_run_has_nothing_to_do(folder: Path, finished: tuple[Any, Path]) -> None:
    _, out = finished
    before = (out / "log.jsonl").read_bytes()
    result = invoke(folder, out, "--resume")
    assert result.exit_code == 0
    assert result.stdout.startswith("The model is in ")
    assert (out / "log.jsonl").read_bytes() == before


TWO_SIGNALS = """
import os, signal, sys
from csa2_compiled.cli import app
from csa2_compiled.train import Trainer
original, count = Trainer.step, int(sys.argv.pop(1))
def step(self):
    if self.steps_done == 2:
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)
    return original(self)
Trainer.step = step
app()
"""


@pytest.mark.parametrize(("signals", "code", "newest"), [(1, 130, "checkpoint-3"), (2, -signal.SIGINT, "checkpoint-2")])
def test_a_second_signal_ends_at_once(folder: Path, tmp_path: Path, signals: int, code: int, newest: str) -> None:
    command = [sys.executable, "-c", TWO_SIGNALS, str(signals), *arguments(folder, tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == code, done.stderr
    assert "finishing this step, then saving; interrupt again to end at once" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "latest").read_text() == f"{newest}\n"


def assert_refused(result: Any, command: str, argument: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"csa2 {command}: {argument}: "), result.stderr
    assert result.stderr.count("\n") == 1


REFUSED: dict[str, tuple[str, list[str]]] = {
    "no file": ("--text", ["--text", "{folder}/none"]),
    "folder": ("--text", ["--text", "{folder}"]),
    "empty": ("--text", ["--text", "{folder}/empty"]),
    "config": ("--config", ["--config", "{folder}/none.json"]),
    "narrow": ("--config", ["--config", "{folder}/narrow.json"]),
    "steps": ("--steps", ["--steps", "0"]),
    "batch": ("--batch-size", ["--batch-size", "0"]),
    "one byte": ("--seq-len", ["--seq-len", "1"]),
    "too long": ("--seq-len", ["--seq-len", "129"]),
    "lr": ("--lr", ["--lr", "nan"]),
    "warmup": ("--warmup", ["--warmup", "-1"]),
    "ratio": ("--min-lr-ratio", ["--min-lr-ratio", "1.5"]),
    "decay": ("--weight-decay", ["--weight-decay", "-1"]),
    "clip": ("--grad-clip", ["--grad-clip", "-1"]),
    "fraction": ("--val-fraction", ["--val-fraction", "1"]),
    "validation": ("--val-every", ["--val-every", "-1"]),
    "saving": ("--save-every", ["--save-every", "-1"]),
    "seed": ("--seed", ["--seed", "-1"]),
    "dtype": ("--dtype", ["--dtype", "float16"]),
    "warmup alone": ("--distill-warmup", ["--distill-warmup", "1000"]),
    "weight alone": ("--distill-weight", ["--distill-weight", "1"]),
    "every alone": ("--distill-every", ["--distill-every", "1"]),
    "distillation": ("--distill-every", ["--distill", "--distill-every", "0"]),
    "out is a file": ("--out", ["--out", "{folder}/text"]),
    "out under a file": ("--out", ["--out", "{folder}/text/out"]),
    "a run": ("--out", ["--out", "{finished}"]),
    "no run": ("--resume", ["--resume"]),
    "other run": ("--resume", ["--resume", "--out", "{finished}", "--lr", "0.5"]),
    "other text": ("--resume", ["--resume", "--out", "{finished}", "--document-separator", ""]),
    "fewer steps": ("--steps", ["--resume", "--out", "{finished}", "--steps", "5"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_in_one_line(
    folder: Path, finished: tuple[Any, Path], tmp_path: Path, case: str
) -> None:
    argument, given = REFUSED[case]
    before = sorted(finished[1].iterdir())
    out = tmp_path / "new" / "out"
    result = invoke(folder, out, *(value.format(folder=folder, finished=finished[1]) for value in given))
    assert_refused(result, "train", argument)
    assert sorted(finished[1].iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_a_text_of_one_window_needs_no_validation(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    usual = ["train", "--config", folder / "config.json", "--text", folder / "short", *SETTINGS, "--out", out]
    result = CliRunner().invoke(app, [str(a) for a in usual])
    assert_refused(result, "train", "--val-fraction")
    assert not list(tmp_path.iterdir())
    result = CliRunner().invoke(app, [str(a) for a in (*usual, "--val-fraction", 0)])
    assert result.exit_code == 0, result.output
    assert not any("val_bits_per_byte" in step for step in log_of(out))


def test_a_model_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    assert_refused(invoke(folder, tmp_path), "train", "--out")
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    assert invoke(folder, tmp_path).exit_code == 0
    damaged = tmp_path / "checkpoint-6" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    log = (tmp_path / "log.jsonl").read_bytes()
    result = invoke(folder, tmp_path, "--resume")
    assert_refused(result, "train", "--resume")
    assert f"{damaged} is damaged" in result.stderr
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_several_texts_and_a_separator(folder: Path, tmp_path: Path) -> None:
    result = invoke(folder, tmp_path, "--text", folder / "two", "--document-separator", "cat", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("error", "problem"),
    [(TrainingError("step 2 has loss nan"), "a lower --lr"), (OSError(28, "No space"), "No space")],
)
def test_a_run_that_breaks_says_so_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    def fail(self: Trainer) -> None:
        raise error

    monkeypatch.setattr(Trainer, "step" if isinstance(error, TrainingError) else "save", fail)
    result = invoke(folder, tmp_path)
    assert result.exit_code == 1
    assert problem in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_machines_that_cannot_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(invoke(folder, tmp_path / "out", "--device", "cuda"), "train", "--device")
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: None)
    result = invoke(folder, tmp_path / "out", "--compile")
    assert result.exit_code == 1
    assert "no C++ compiler" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by its mode: root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or mode == os.R_OK)
    for out in (tmp_path, tmp_path / "new" / "out"):
        result = invoke(folder, out)
        assert_refused(result, "train", "--out")
        assert f"{out} cannot be written: {tmp_path} does not allow it" in " ".join(result.stderr.split())
    monkeypatch.undo()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    assert_refused(invoke(folder, tmp_path / "link"), "train", "--out")
