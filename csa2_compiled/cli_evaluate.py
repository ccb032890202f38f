"""`csa2 evaluate`: what a model's selection is worth on some text."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from csa2_compiled import quality, run_report
from csa2_compiled.cli_shared import Device, DeviceOption, check_output, errors, make_console
from csa2_compiled.generate_report import read_model, shipped_model
from csa2_compiled.quality import QualityReport
from csa2_compiled.run_report import BadArgumentError
from csa2_compiled.tokens import CSA2InputError
from csa2_compiled.train_data import TrainDataError, read_documents

_MEANINGS = {
    "sparse": "the selection, as the model is",
    "dense": "all visible compressed positions",
    "window": "the window and the sink alone",
}


def evaluate(
    text: Annotated[list[Path], typer.Option(help="File to read; may be given several times.", metavar="FILE")],
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Directory of a whole model; without it the small one that comes with csa2-compiled.",
            metavar="DIR",
        ),
    ] = None,
    document_separator: Annotated[
        str,
        typer.Option(help="Ends a document; empty: each file is one.", metavar="TEXT", show_default="form feed"),
    ] = "\f",
    seq_len: Annotated[int, typer.Option(help="Bytes a window, at most.", metavar="N")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.", metavar="N")] = 1,
    device: DeviceOption = Device.CPU,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the report there, as JSON.", metavar="PATH")
    ] = None,
) -> None:
    """Measure a model on text: bits per byte with its sparse attention, with dense attention, with the window alone.

    Also, for each layer that selects, the recall of its selection: the share that is among the positions to which the
    layer's own dense attention gives most. Runs eagerly. Exit code 2 for a bad argument.
    """
    with errors("evaluate"):
        if json_path is not None:
            check_output("--json", json_path)
        run_report.check_device(device.value)
        try:
            documents = read_documents(text, os.fsencode(document_separator))
            folder = shipped_model() if model_path is None else model_path
            model = read_model(folder, seq_len, device.value, "--seq-len")
            with _progress() as on_batch:
                report = quality.evaluate(model, documents, seq_len, batch_size, on_batch=on_batch)
        except TrainDataError as error:
            raise BadArgumentError(f"--{error.field.replace('_', '-')}", error.problem) from error
        except CSA2InputError as error:
            name, _, problem = str(error).partition(" ")
            raise BadArgumentError(f"--{name.replace('_', '-')}", problem) from error
        _print_report(make_console(), report)
        if json_path is not None:
            json_path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    console = make_console(stderr=True)
    columns = TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_report(console: Console, report: QualityReport) -> None:
    console.print(f"{report.predicted_bytes} bytes predicted, windows of up to {report.seq_len}", style="bold")
    bits = Table("attends to", "bits per byte", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in report.bits_per_byte.items():
        bits.add_row(_MEANINGS[name], f"{value:.4f}")
    console.print(bits)
    if not report.layers:
        console.print("No layer selects.")
        return
    recalls = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("layer", "role", "ratio", "queries", "recall", "at random"):
        recalls.add_column(header, justify="left" if header == "role" else "right")
    for layer in report.layers:
        shares = (_share(layer.recall), _share(layer.random))
        recalls.add_row(str(layer.layer), layer.role, str(layer.ratio), str(layer.queries), *shares)
    recalls.add_row("all", "", "", "", _share(report.recall), _share(report.random))
    console.print(recalls)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
