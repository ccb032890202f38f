"""`csa2 train`: the command, its progress bar, and what Ctrl-C does."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from csa2_compiled import run_report
from csa2_compiled import train as training
from csa2_compiled.checkpoint import CheckpointError
from csa2_compiled.cli_shared import ConfigOption, Device, DeviceOption, NotWorkingError, errors, make_console
from csa2_compiled.doctor import run_obstacle
from csa2_compiled.model_files import WEIGHTS_NAME
from csa2_compiled.run_report import BadArgumentError
from csa2_compiled.train import StepReport, TrainConfig, TrainConfigError, Trainer, TrainingError
from csa2_compiled.train_checkpoint import LATEST_NAME, latest_checkpoint
from csa2_compiled.train_data import TrainDataError, read_documents
from csa2_compiled.train_log import TrainLog

INTERRUPTED = 130


def train(
    text: Annotated[list[Path], typer.Option(help="File to train on; may be given several times.", metavar="FILE")],
    steps: Annotated[int, typer.Option(help="Steps of the whole run.", metavar="N")],
    out: Annotated[Path, typer.Option(help="Directory of checkpoints, log and model.", metavar="DIR")],
    config: ConfigOption = None,
    document_separator: Annotated[
        str,
        typer.Option(help="Ends a document; empty: each file is one.", metavar="TEXT", show_default="form feed"),
    ] = "\f",
    batch_size: Annotated[int, typer.Option(help="Rows a step.", metavar="N")] = TrainConfig.batch_size,
    seq_len: Annotated[int, typer.Option(help="Bytes a row.", metavar="N")] = TrainConfig.seq_len,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", metavar="X")] = TrainConfig.lr,
    warmup: Annotated[int, typer.Option(help="Steps of linear growth to it.", metavar="N")] = TrainConfig.warmup,
    min_lr_ratio: Annotated[
        float, typer.Option(help="What a cosine leaves of it at the last step.", metavar="X")
    ] = TrainConfig.min_lr_ratio,
    weight_decay: Annotated[float, typer.Option(help="Of matrices only.", metavar="X")] = TrainConfig.weight_decay,
    grad_clip: Annotated[
        float,
        typer.Option(help="Norm of all gradients together, the indexers' apart, at most; 0: no limit.", metavar="X"),
    ] = TrainConfig.grad_clip,
    val_fraction: Annotated[
        float, typer.Option(help="Share of the text that only validates.", metavar="X")
    ] = TrainConfig.val_fraction,
    val_every: Annotated[
        int, typer.Option(help="Steps from validation to validation; 0: at the end only.", metavar="N")
    ] = TrainConfig.val_every,
    save_every: Annotated[
        int, typer.Option(help="Steps from checkpoint to checkpoint; 0: at the end only.", metavar="N")
    ] = TrainConfig.save_every,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.", metavar="N")] = TrainConfig.seed,
    device: DeviceOption = Device.CPU,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 to compute in it with float32 parameters.", metavar="DTYPE")
    ] = TrainConfig.dtype,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile each kind of block.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute activations again instead of keeping them.")
    ] = False,
    distill: Annotated[
        bool, typer.Option("--distill", help="Train the indexers too, to score positions as the attention does.")
    ] = False,
    distill_warmup: Annotated[
        int | None,
        typer.Option(
            help="First steps, in which they are compared over all positions.",
            metavar="N",
            show_default=str(TrainConfig.distill_warmup),
        ),
    ] = None,
    distill_weight: Annotated[
        float | None,
        typer.Option(help="Of that loss beside the other.", metavar="X", show_default=str(TrainConfig.distill_weight)),
    ] = None,
    distill_every: Annotated[
        int | None,
        typer.Option(
            help="Steps from one with that loss to the next.", metavar="N", show_default=str(TrainConfig.distill_every)
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
) -> None:
    """Train a byte-level model on text files, with checkpoints that --resume goes on from bit for bit.

    Writes log.jsonl, checkpoint-N directories and, at the end, model.safetensors and config.json to --out. Ctrl-C
    finishes the step, saves and exits with code 130; a second one ends at once. Exit code 2 for a bad argument.
    """
    distillation = {
        "distill_warmup": distill_warmup,
        "distill_weight": distill_weight,
        "distill_every": distill_every,
    }
    with errors("train"):
        try:
            settings = TrainConfig(
                steps=steps,
                batch_size=batch_size,
                seq_len=seq_len,
                lr=lr,
                warmup=warmup,
                min_lr_ratio=min_lr_ratio,
                weight_decay=weight_decay,
                grad_clip=grad_clip,
                val_fraction=val_fraction,
                val_every=val_every,
                save_every=save_every,
                seed=seed,
                dtype=dtype,
                compile=compile_,
                checkpointing=checkpointing,
                distill=distill,
                **_given_with_distill(distill, distillation),
            )
            trainer = _make_trainer(settings, config, device, text, os.fsencode(document_separator), out, resume)
        except (TrainConfigError, TrainDataError) as error:
            raise BadArgumentError(f"--{error.field.replace('_', '-')}", error.problem) from error
        _run(trainer)


def _given_with_distill(distill: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Those of --distill's options that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and not distill:
        name = next(iter(given))
        raise TrainConfigError(name, f"it is {given[name]}, but nothing is distilled; it goes with --distill")
    return given


def _make_trainer(
    settings: TrainConfig,
    config: Path | None,
    device: Device,
    text: list[Path],
    separator: bytes,
    out: Path,
    resume: bool,
) -> Trainer:
    """The trainer, at its checkpoint when it resumes; nothing is written but, at the very end, the directory `out`."""
    run_report.check_device(device.value)
    cfg = run_report.read_config(config, settings.seq_len)
    obstacle = run_obstacle(device.value) if settings.compile else None
    if obstacle is not None:
        raise NotWorkingError(f"compiled runs do not work here: {obstacle}; `csa2 doctor` says more")
    documents = read_documents(text, separator)
    _check_out(out, resume)
    trainer = Trainer(run_report.make_model(cfg, settings.seed, device.value), documents, settings, out)
    if resume:
        try:
            trainer.load(latest_checkpoint(out))
        except CheckpointError as error:
            raise BadArgumentError("--resume", error) from error
        if trainer.steps_done > settings.steps:
            raise BadArgumentError("--steps", f"{settings.steps} is less than the {trainer.steps_done} already done")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgumentError("--out", f"{out} cannot be made: {error.strerror}") from error
    return trainer


def _check_out(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise BadArgumentError("--out", f"{out} is a file; a directory is needed")
    if not resume and (out / LATEST_NAME).exists():
        raise BadArgumentError("--out", f"{out} holds a run; --resume goes on with it, another directory starts anew")
    if not resume and (out / WEIGHTS_NAME).exists():
        raise BadArgumentError("--out", f"{out} holds a {WEIGHTS_NAME}, which would be replaced")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise BadArgumentError("--out", f"{out} cannot be made: {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadArgumentError("--out", f"{out} cannot be written: {there} does not allow it")


def _run(trainer: Trainer) -> None:
    resumed = trainer.steps_done
    reports: list[StepReport] = []
    with Interrupt() as interrupt, _progress(trainer) as show:

        def on_step(report: StepReport) -> None:
            log.write(report)
            reports[:] = [report]
            show(report)

        try:
            log = TrainLog(trainer.out / "log.jsonl", resumed)
            finished = training.train(trainer, on_step, stop=lambda: interrupt.asked)
        except TrainingError as error:
            hint = "a lower --lr or a longer --warmup may help"
            raise NotWorkingError(f"{error}; {hint}; checkpoints in {trainer.out} are unharmed") from error
        except (OSError, SafetensorError) as error:
            problem = f"{trainer.out} cannot be written: {error}"
            raise NotWorkingError(f"{problem}; what {LATEST_NAME} names there is unharmed") from error
    steps = trainer.cfg.steps
    if not finished:
        path = trainer.out / f"checkpoint-{trainer.steps_done}"
        typer.echo(f"csa2 train: interrupted after step {trainer.steps_done} of {steps}; {path} is saved.", err=True)
        typer.echo("The same command with --resume goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    for report in reports:
        validation = report.val_bits_per_byte
        held_out = "" if validation is None else f", {validation:.3f} bits per byte on held-out text"
        typer.echo(f"Step {report.step} of {steps}: loss {report.loss:.4f} nats per byte{held_out}.")
    typer.echo(f"The model is in {trainer.out}: csa2 generate --model {trainer.out} --prompt ...")


class Interrupt:
    """While entered, notes the first SIGINT in `asked`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Not through the console, which may be in the middle of a line; the bar may have hidden the cursor.
        cursor = b"\x1b[?25h" if os.isatty(2) else b""
        os.write(2, cursor + b"\ncsa2 train: finishing this step, then saving; interrupt again to end at once\n")


@contextmanager
def _progress(trainer: Trainer) -> Iterator[training.OnStep]:
    """A bar on stderr with the newest figures; where no terminal is, a line at the first step and each validation."""
    console = make_console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    first = trainer.steps_done + 1
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=trainer.cfg.steps, completed=trainer.steps_done)
        validation = distilled = ""

        def show(report: StepReport) -> None:
            nonlocal validation, distilled
            if report.val_bits_per_byte is not None:
                validation = f", validation {report.val_bits_per_byte:.3f} bits/byte"
            if report.distillation_loss is not None:
                distilled = f", distillation {report.distillation_loss:.4f}"
            losses = f"loss {report.loss:.4f}{distilled}"
            figures = f"{losses}, lr {report.lr:.2e}, {report.bytes_per_second:.0f} tokens/s{validation}"
            progress.update(task, completed=report.step, description=figures)
            if not console.is_terminal and (report.step == first or report.val_bits_per_byte is not None):
                console.print(f"Step {report.step} of {trainer.cfg.steps}: {figures}")

        yield show
