"""`csa2 bench compile` and `csa2 compile-cache`: what compiling costs, and how to take it to another machine."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from csa2_compiled import compile_report, run_report
from csa2_compiled.cache import CSA2Cache
from csa2_compiled.cli_shared import (
    DOES_NOT_WORK,
    ConfigOption,
    Device,
    DeviceOption,
    NotWorkingError,
    check_output,
    errors,
    make_console,
)
from csa2_compiled.compile_cache import (
    CompileCacheContents,
    CompileCacheError,
    load_compile_cache,
    save_compile_cache,
)
from csa2_compiled.compile_measure import Case, Measurement
from csa2_compiled.compile_report import PHASE_NAMES, CompareError, CompileReport, Difference
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.doctor import run_obstacle
from csa2_compiled.masks.visualize import VisualizationError, import_matplotlib
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.passes.inductor import cache_folder
from csa2_compiled.run_report import BadArgumentError

bench = typer.Typer(help="Measure this project on this machine.", no_args_is_help=True)
compile_cache = typer.Typer(help="Take compiled graphs to another process or machine.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(help="File of compiled graphs.", metavar="FILE")]


@bench.callback()
def _bench() -> None:  # so that `compile` stays the name of a command
    pass


@bench.command("compile")
def compile_(
    device: DeviceOption = Device.CPU,
    full: Annotated[
        bool, typer.Option("--full", help="Every layer, stack, pass set, kind of shapes and start; hours on a CPU.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cases whose name has this in it; may be given several times.", metavar="TEXT"),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Begin no case after that many seconds.", metavar="S", show_default="180 on cuda"),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the report there after each case, as JSON.", metavar="PATH"),
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Also draw it, stacked bars of phases.", metavar="PNG")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing; show the report of an earlier --json.", metavar="JSON")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with an earlier --json; exit code 1 if it grew.", metavar="JSON")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Factor by which compile times may grow; counts may not.", metavar="X")
    ] = 1.3,
) -> None:
    """Measure what compiling costs and what makes it compile again, each case in a fresh process with empty caches.

    Tiny widths on CPU, released shapes on CUDA. Prints seconds by phase, graphs, breaks, guards, recompilations,
    kernels, memory, and the figures that should be reached. Exit code 2 for a bad argument, 1 where --compare finds
    growth or a case failed.
    """
    with errors("bench compile"):
        old = None if compare is None else _read("--compare", compare)
        if threshold < 1:
            raise BadArgumentError("--threshold", f"{threshold} is less than 1")
        for argument, path in (("--json", json_path), ("--chart", chart)):
            if path is not None:
                check_output(argument, path)
        if chart is not None:
            _check_matplotlib()

        def write(report: CompileReport) -> None:
            if json_path is not None:
                text = json.dumps(compile_report.to_dict(report), indent=1) + "\n"
                json_path.write_text(text, encoding="utf-8")

        only = only or []
        report = _measure(device.value, full, only, time_limit, write) if show is None else _read("--show", show)
        console = make_console()
        print_report(console, report)
        write(report)
        if chart is not None:
            compile_report.draw(report).savefig(chart, dpi=150)
        failed = any(reason.startswith("exit code") for reason in report.not_measured.values())
        if old is not None:
            try:
                differences = compile_report.compare(report, old, threshold)
            except CompareError as error:
                raise BadArgumentError("--compare", error) from error
            _print_differences(console, differences, threshold)
            failed = failed or any(difference.grown for difference in differences)
        if failed:
            raise typer.Exit(DOES_NOT_WORK)


@compile_cache.command()
def save(
    file: FileArgument,
    config: ConfigOption = None,
    device: DeviceOption = Device.CPU,
    passes: Annotated[
        str, typer.Option(help='Compiler passes: "all", "none", or names with commas between.', metavar="NAMES")
    ] = "all",
    seq_len: Annotated[
        int, typer.Option(help="Tokens of the prefill, and of the cache that a decoding step reads.", metavar="N")
    ] = 512,
) -> None:
    """Compile a model's prefill and decoding step, a graph a kind of block, and write the graphs to one file.

    Weights do not matter, shapes do. Exit code 2 for a bad argument.
    """
    with errors("compile-cache save"):
        names = run_report.choose_passes(passes)
        run_report.check_device(device.value)
        cfg = run_report.read_config(config, seq_len)
        check_output("FILE", file)
        obstacle = run_obstacle(device.value)
        if obstacle is not None:
            raise NotWorkingError(f"compiled runs do not work here: {obstacle}; `csa2 doctor` says more")
        compiled = run_report.compile_for_report(run_report.make_model(cfg, 0, device.value), names, caches=True)
        typer.echo("Compiling, a minute or two on a CPU.", err=True)
        _compile(compiled, seq_len)
        try:
            contents = save_compile_cache(file, device.value)
        except OSError as error:
            raise BadArgumentError("FILE", f"{file} cannot be written: {error.strerror}") from error
        typer.echo(f"{compiled.compilations} graphs, {compiled.cache_hits} of them from the caches here.")
        typer.echo(f"Saved to {file}: {_describe(contents)}.")


@compile_cache.command()
def load(file: FileArgument) -> None:
    """Put the graphs of a file into this machine's caches, where later runs find them.

    They are code that later runs execute: load only files that you trust. Exit code 2 for a file that is damaged, or
    was made for another device, by other versions or other sources; nothing is changed then.
    """
    with errors("compile-cache load"):
        try:
            contents = load_compile_cache(file)
        except CompileCacheError as error:
            raise BadArgumentError("FILE", error) from error
        typer.echo(f"Loaded into {cache_folder()}: {_describe(contents)}.")


def print_report(console: Console, report: CompileReport) -> None:
    """Tables of times and of counts, then the figures that should be reached."""
    where = report.environment
    console.print(f"{where.device}, {where.threads} threads, torch {where.torch}, Python {where.python}, {report.date}")
    phases = "load", "Dynamo", "AOT", "passes", "Inductor", "kernels", "tuning", "rest"
    console.print(_table(("case, seconds", *phases, "total"), map(_time_cells, report.measurements)))
    counts = "graphs", "hits", "breaks", "guards", "again", "kernels", "launches"
    memory = "process\nMiB", "compiler\nMiB", "device\nMiB"
    console.print(_table(("case", *counts, *memory), map(_count_cells, report.measurements)))
    for measurement in report.measurements:
        for reason in measurement.recompilations:
            console.print(f"{measurement.case.name} compiled again: {' '.join(reason.split())}")
        for reason, count in measurement.graph_breaks.items():
            console.print(f"{measurement.case.name} broke {count} x: {' '.join(reason.split())}")
    for name, reason in report.not_measured.items():
        console.print(f"Not measured: {name}: {reason}")
    for target in compile_report.targets(report):
        met = {None: "not measured", True: "reached", False: "NOT reached"}[target.met]
        value = "-" if target.value is None else f"{target.value:.3g}"
        note = f" ({target.note})" if target.note else ""
        console.print(f"{target.name}: {value}, at most {target.limit:g}: {met}{note}")


def _measure(
    device: str, full: bool, only: list[str], time_limit: float | None, on_report: Callable[[CompileReport], None]
) -> CompileReport:
    run_report.check_device(device)
    known = compile_report.all_cases(device) if full else compile_report.default_cases(device)
    cases = [case for case in known if not only or any(text in case.name for text in only)]
    if not cases:
        names = "; ".join(case.name for case in known)
        raise BadArgumentError("--only", f"no case has {' or '.join(map(repr, only))} in its name; cases are {names}")
    obstacle = run_obstacle(device)
    if obstacle is not None:
        raise NotWorkingError(f"compiled runs do not work here: {obstacle}; `csa2 doctor` says more")
    if time_limit is None:
        time_limit = compile_report.CUDA_SECONDS if device == "cuda" and not full else float("inf")
    console, begin = make_console(stderr=True), time.perf_counter()

    def on_case(case: Case) -> None:
        console.print(f"{time.perf_counter() - begin:.0f} s: measuring {case.name}")

    script = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else ["csa2"]
    command = shlex.join([*script, *sys.argv[1:]])
    return compile_report.run_cases(cases, on_case, time_limit, command, on_report)


@torch.no_grad()
def _compile(compiled: CompiledModel, seq_len: int) -> None:
    """One prefill without a cache, and one step of one token with a cache that holds a token."""
    model = compiled.module
    assert isinstance(model, CSA2ForCausalLM)
    ids = torch.zeros(1, seq_len, dtype=torch.int64, device=model.embed.weight.device)
    compiled(ids)
    if seq_len > 1:
        cache = CSA2Cache(model.cfg, 1, seq_len, dtype=model.embed.weight.dtype, device=ids.device)
        model(ids[:, :1], cache)
        compiled(ids[:, :1], cache=cache)


def _read(argument: str, path: Path) -> CompileReport:
    try:
        return compile_report.read_report(path)
    except CompareError as error:
        raise BadArgumentError(argument, error) from error


def _check_matplotlib() -> None:
    try:
        import_matplotlib()
    except VisualizationError as error:
        raise NotWorkingError(str(error)) from error


def _time_cells(row: Measurement) -> tuple[str, ...]:
    return row.case.name, *(f"{row.phases[phase]:.2f}" for phase in PHASE_NAMES), f"{row.compile_seconds:.2f}"


def _count_cells(row: Measurement) -> tuple[str, ...]:
    figures: tuple[Any, ...] = (
        row.graphs,
        row.cache_hits,
        sum(row.graph_breaks.values()),
        row.guards,
        len(row.recompilations),
        row.kernels_generated,
        sum(row.launches.values()),
    )
    memory = (row.peak_process, row.peak_compiler, row.peak_device)
    return row.case.name, *map(str, figures), *("-" if value is None else f"{value:.0f}" for value in memory)


def _print_differences(console: Console, differences: tuple[Difference, ...], threshold: float) -> None:
    changed = [difference for difference in differences if difference.old != difference.new]
    rows = ((d.case, d.figure, f"{d.old:.4g}", f"{d.new:.4g}", "GREW" if d.grown else "") for d in changed)
    console.print(_table(("case", "figure", "before", "now", ""), rows))
    grown = sum(difference.grown for difference in differences)
    console.print(f"{grown} of {len(differences)} figures grew (times: by more than a factor of {threshold:g}).")


def _table(headers: tuple[str, ...], rows: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    return table


def _describe(contents: CompileCacheContents) -> str:
    artifacts = ", ".join(f"{count} {kind} artifacts" for kind, count in sorted(contents.artifacts.items()))
    return f"{artifacts}, {contents.libraries} C++ libraries, {contents.file_bytes / 2**20:.1f} MiB"
