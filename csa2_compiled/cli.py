"""The `csa2` command: run a text and compare, generate, explain the passes, look at the machine."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as RichText

from csa2_compiled import run_report
from csa2_compiled.cli_bench import bench, compile_cache
from csa2_compiled.cli_evaluate import evaluate
from csa2_compiled.cli_masks import masks
from csa2_compiled.cli_shared import DOES_NOT_WORK, ConfigOption, Device, DeviceOption, NotWorkingError
from csa2_compiled.cli_shared import errors as _errors
from csa2_compiled.cli_shared import make_console as _console
from csa2_compiled.cli_train import train
from csa2_compiled.doctor import CudaDevice, DoctorReport, examine, run_obstacle
from csa2_compiled.generate_report import GenerateReport, generate_text, read_model, shipped_model
from csa2_compiled.model import CSA2ForCausalLM
from csa2_compiled.model_files import copy_in_dtype
from csa2_compiled.run_report import (
    BadArgumentError,
    Environment,
    ExplainReport,
    KindReport,
    LayerReport,
    Origin,
    PassSummary,
    RunReport,
)

_NO_PASSES = "No passes: named ops run as they are, one call each."

app = typer.Typer(
    help="CSA2, the attention of DeepSeek-V4.1: run it compiled, see what the passes do, check a machine.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

WeightsOption = Annotated[
    Path | None,
    typer.Option(
        help="Attention weights in the released layout: a safetensors file or a directory of them. "
        "Everything else of the model stays random.",
        metavar="SAFETENSORS",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the report there, as JSON.", metavar="PATH")
]
PassesOption = Annotated[
    str, typer.Option(help='Compiler passes: "all", "none", or names with commas between.', metavar="NAMES")
]


@app.command()
def run(
    text: Annotated[Path, typer.Option(help="File whose first bytes are the tokens (UTF-8 text).", metavar="FILE")],
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Directory of a whole model, as csa2 train makes it, to compute with in float32; without it all that "
            "--weights does not give is random.",
            metavar="DIR",
        ),
    ] = None,
    config: ConfigOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = Device.CPU,
    passes: PassesOption = "all",
    seq_len: Annotated[int, typer.Option(help="Bytes of the text to read, at most.", metavar="N")] = 512,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights.", metavar="N", show_default="0")] = None,
    json_path: JsonOption = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Take compiled graphs from PyTorch's caches. Passes do not run on those, so their report "
            "then misses what was cached.",
        ),
    ] = False,
) -> None:
    """Run a text through a model, block by block, compiled and eager, and compare the two.

    Prints a row a layer: role, layout of the attention core and why, selected and visible compressed
    positions (mean per query), error of the compiled block against the eager one on the same input, both
    times, compile time. Blocks of the same kind share one compiled graph. Exit code 2 for a bad argument.
    """
    with _errors("run"):
        if json_path is not None:
            _check_writable(json_path)
        excerpt = run_report.read_text(text, seq_len)
        if model_path is not None and seed is not None:
            raise BadArgumentError("--seed", "it does not go with --model, which has a config and all weights")
        seed = 0 if seed is None else seed
        model, names = _prepare(config, passes, device, seq_len, seed, weights, model_path=model_path)
        origin: Origin | str = Origin(_name(config), _name(weights), seed)
        if model_path is not None:
            model, origin = copy_in_dtype(model, torch.float32).eval(), str(model_path)
        with _progress(len(model.layers)) as on_block:
            compiled = run_report.compile_for_report(model, names, cache)
            report = run_report.report_run(compiled, excerpt, origin, cache, on_block)
        _print_run(_console(), report)
        if json_path is not None:
            _write_json(json_path, asdict(report))


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to go on from, after that of --text.", metavar="TEXT")] = "",
    text: Annotated[
        Path | None, typer.Option(help="File whose last bytes come before the prompt.", metavar="FILE")
    ] = None,
    context: Annotated[int, typer.Option(help="Bytes of --text to read, at most.", metavar="N")] = 512,
    max_new_tokens: Annotated[int, typer.Option(help="Bytes to generate, at most.", metavar="N")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte.", metavar="T")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the K likeliest bytes.", metavar="K")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest bytes that hold this probability.", metavar="P")
    ] = None,
    stop: Annotated[str, typer.Option(help="End at any of these bytes.", metavar="BYTES")] = "",
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Directory of a whole model, as csa2 train makes it; without it, --config and --weights, the small "
            "one that comes with csa2-compiled.",
            metavar="DIR",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json of a model with random weights instead.", metavar="JSON"),
    ] = None,
    weights: WeightsOption = None,
    device: DeviceOption = Device.CPU,
    passes: PassesOption = "all",
    eager: Annotated[bool, typer.Option("--eager", help="Compile nothing: no wait, slower bytes.")] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Keep the cache as bytes of its quantization formats.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights and of the sampling.", metavar="N")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Go on from a text, byte by byte, and print the bytes as they come.

    The text runs through the model in chunks and fills a cache; then one compiled step, the same graph at every
    position, makes a byte. It is compiled after the first byte, which takes a minute or two on a CPU. Rates,
    compilations and the cache's bytes go to stderr. Exit code 2 for a bad argument.
    """
    with _errors("generate"):
        if json_path is not None:
            _check_writable(json_path)
        before = b"" if text is None else run_report.read_end(text, context)
        prompt_bytes = before + os.fsencode(prompt)
        if not prompt_bytes:
            raise BadArgumentError("--prompt", "it is empty, and there is no --text; a byte to go on from is needed")
        if max_new_tokens < 1:
            raise BadArgumentError("--max-new-tokens", f"{max_new_tokens} is not at least 1")
        length = len(prompt_bytes) + max_new_tokens - 1  # the last byte does not go in
        run_report.check_device(device.value)
        if model_path is None and config is None and weights is None:
            model_path = shipped_model()
        asked_by = f"--max-new-tokens after a prompt of {len(prompt_bytes)} bytes"
        model, names = _prepare(
            config,
            passes,
            device,
            length,
            seed,
            weights,
            compiles=not eager,
            length_argument=asked_by,
            model_path=model_path,
        )
        runs = model if eager else run_report.compile_for_report(model, names, caches=True)
        report = generate_text(
            runs,
            prompt_bytes,
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            os.fsencode(stop),
            seed,
            packed,
            on_text=lambda piece: typer.echo(_printable(piece, sys.stdout.encoding), nl=False),
            on_compile=lambda: typer.echo("Compiling the step: a minute or two on a CPU, once.", err=True),
        )
        typer.echo()
        _print_generate(_console(stderr=True), report)
        if json_path is not None:
            _write_json(json_path, asdict(report))


@app.command()
def explain(
    config: ConfigOption = None,
    passes: PassesOption = "all",
    device: DeviceOption = Device.CPU,
    seq_len: Annotated[int, typer.Option(help="Tokens to compile for.", metavar="N")] = 128,
) -> None:
    """Compile one block of each kind, without caches, and print what each pass did to it and why.

    Also prints the named ops and FlexAttention calls that the passes found, and the cost figures behind the
    choice of the attention core's layout. Exit code 2 for a bad argument.
    """
    with _errors("explain"):
        model, names = _prepare(config, passes, device, seq_len)
        with _progress(len(model.layers)) as on_block:
            compiled = run_report.compile_for_report(model, names)
            report = run_report.report_explain(compiled, seq_len, on_block)
        _print_explain(_console(), report)


app.command()(masks)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what works on this machine and why the rest does not.

    Compiles one small function for each device, which takes a few seconds. Exit code 0 when eager runs work
    and compiled runs work on the CPU or a GPU, else 1.
    """
    report = examine()
    if as_json:
        typer.echo(json.dumps({**asdict(report), "core_works": report.core_works}, indent=2))
    else:
        _print_doctor(_console(), report)
    if not report.core_works:
        raise typer.Exit(DOES_NOT_WORK)


app.command()(train)
app.command()(evaluate)
app.add_typer(bench, name="bench")
app.add_typer(compile_cache, name="compile-cache")


def _prepare(
    config: Path | None,
    passes: str,
    device: Device,
    seq_len: int,
    seed: int = 0,
    weights: Path | None = None,
    compiles: bool = True,
    length_argument: str = "--seq-len",
    model_path: Path | None = None,
) -> tuple[CSA2ForCausalLM, tuple[str, ...]]:
    """The model and the names of the passes, every argument checked before anything is compiled."""
    names = run_report.choose_passes(passes)
    run_report.check_device(device.value)
    if model_path is not None and (config is not None or weights is not None):
        raise BadArgumentError("--model", f"{model_path} has a config and all weights; give no --config and --weights")
    model = None if model_path is None else read_model(model_path, seq_len, device.value, length_argument)
    cfg = run_report.read_config(config, seq_len, length_argument) if model is None else model.cfg
    obstacle = run_obstacle(device.value) if compiles else None
    if obstacle is not None:
        raise NotWorkingError(f"compiled runs do not work here: {obstacle}; `csa2 doctor` says more")
    return run_report.make_model(cfg, seed, device.value, weights) if model is None else model, names


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _check_writable(path: Path) -> None:
    # Before the run: nobody wants to compile for minutes and then lose the report.
    if path.is_dir():
        raise BadArgumentError("--json", f"{path} is a directory; a file name is needed")
    if not path.parent.is_dir():
        raise BadArgumentError("--json", f"{path.parent} is no directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadArgumentError("--json", f"{path} cannot be written")


def _write_json(path: Path, values: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadArgumentError("--json", f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _progress(num_layers: int) -> Iterator[run_report.OnBlock]:
    """A progress bar on stderr that names the kind of block in work; one line a kind where no terminal is."""
    console = _console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=num_layers)

        def on_block(index: int, kind: str, first_of_kind: bool) -> None:
            doing = f"layer {index}: {'compiling' if first_of_kind else 'running'} {kind}"
            progress.update(task, completed=index, description=doing)
            if first_of_kind and not console.is_terminal:
                console.print(doing)

        yield on_block


def _print_run(console: Console, report: RunReport) -> None:
    extent = f"the first {report.num_bytes}" if report.text_truncated else f"all {report.num_bytes}"
    console.print(f"{report.text}: {extent} bytes, {_describe_origin(report.origin)}", style="bold")
    console.print(f"{_describe(report.environment)}, {report.dtype}", style="dim")
    console.print(_layer_table(report))
    for layer in report.layers:
        if layer.same_selection is not None and layer.same_selection < 1:
            share = f"{100 * (1 - layer.same_selection):.2f} % of queries"
            console.print(f"Layer {layer.index} selects other positions compiled than eager for {share}.")
    shared = f"{report.graphs} compilations for {len(report.layers)} layers of {report.kinds} kinds"
    console.print(f"{shared}, {report.compile_seconds:.1f} s in all.")
    console.print(_cache_note(report))
    if not report.passes:
        console.print(_NO_PASSES)
    for summary in report.passes:
        console.print(f"Pass {summary.name}: " + "\n  ".join(_pass_lines(summary)))
    console.print(_loss_note(report))


def _describe_origin(origin: Origin | str) -> str:
    if isinstance(origin, str):
        return f"model {origin}"
    weights = f"random weights (seed {origin.seed})"
    if origin.weights is not None:
        weights = f"attention from {origin.weights}, the rest random (seed {origin.seed})"
    return f"{origin.config or 'tiny config'}, {weights}"


def _printable(text: str, encoding: str = "utf-8") -> str:
    """Text for a terminal: what would move its cursor or change its colours, or is not in `encoding`, is escaped."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, errors="backslashreplace").decode(encoding)


def _print_generate(console: Console, report: GenerateReport) -> None:
    console.print(_describe(report.environment), style="dim")
    rate = report.prompt_bytes / report.prefill_seconds
    console.print(f"Prompt: {report.prompt_bytes} bytes in {report.prefill_seconds:.2f} s ({rate:.0f} bytes/s).")
    if report.first_step_seconds is not None:
        count = report.compilations
        compiled = "" if count is None else f", {count} compilation{'s' * (count != 1)} included"
        console.print(f"First step: {report.first_step_seconds:.2f} s{compiled}.")
    if report.tokens_per_second is not None:
        console.print(f"Then {report.tokens_per_second:.1f} tokens/s ({report.new_bytes} bytes in all).")
    kind = "packed" if report.packed else "unpacked"
    console.print(f"Cache: {report.cache_bytes} bytes for {report.cache_tokens} tokens, {kind}.")


def _layer_table(report: RunReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("#", "role", "ratio"):
        table.add_column(header, justify="left" if header == "role" else "right", no_wrap=True)
    table.add_column("layout and why", overflow="fold")
    for header in ("selected /\nvisible", "error", "compiled\nms", "eager\nms", "compile\ns"):
        table.add_column(header, justify="right", no_wrap=True)
    for layer in report.layers:
        table.add_row(*_layer_cells(layer))
    return table


def _layer_cells(layer: LayerReport) -> tuple[str, ...]:
    positions = "-"
    if layer.selected is not None and layer.visible is not None:
        positions = f"{layer.selected:.1f} / {layer.visible:.1f}"
    return (
        str(layer.index),
        layer.role,
        str(layer.ratio),
        f"{layer.layout}: {layer.layout_reason}",
        positions,
        f"{layer.relative_error:.1e}",
        f"{layer.compiled_ms:.2f}",
        f"{layer.eager_ms:.2f}",
        "shared" if layer.compile_seconds is None else f"{layer.compile_seconds:.1f}",
    )


def _cache_note(report: RunReport) -> str:
    if not report.caches:
        return "Graph caches were off, so that the passes ran; kernels built by earlier runs are still reused."
    cached = [str(layer.index) for layer in report.layers if layer.from_cache]
    if not cached:
        return "Graph caches were on and had none of the graphs, so that the passes ran."
    return f"Graph caches were on: those of layers {', '.join(cached)} came from them and no pass ran on them."


def _loss_note(report: RunReport) -> str:
    if report.bits_per_byte is None:
        return "No next-byte loss: a single byte has no next one."
    loss = f"Mean next-byte loss: {report.bits_per_byte:.2f} bits per byte."
    uniform = f"a uniform guess has {report.uniform_bits:.2f}."
    if isinstance(report.origin, str):
        return f"{loss} For comparison, {uniform}"
    weights = "All weights are random" if report.origin.weights is None else "All but the attention is random"
    return f"{loss} {weights}; {uniform}"


def _pass_lines(summary: PassSummary) -> list[str]:
    lines = [f"rewrote {_counts(summary.fired) or 'nothing'}"]
    return lines + [f"declined {_counts({d.op: d.count})}: {d.reason}" for d in summary.declined]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {op.removeprefix('csa2::')}" for op, count in counts.items())


def _print_explain(console: Console, report: ExplainReport) -> None:
    console.print(f"{len(report.kinds)} kinds of block, compiled for {report.num_tokens} tokens", style="bold")
    console.print(_describe(report.environment), style="dim")
    for kind in report.kinds:
        console.print()
        console.print(kind.name, style="bold")
        console.print(_kind_table(kind))


def _kind_table(kind: KindReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("layers", ", ".join(map(str, kind.layers)))
    table.add_row("layout", f"{kind.layout}: {kind.layout_reason}")
    table.add_row("cost", f"dense {kind.dense_pairs:.0f}, slots {kind.slots_pairs:.0f} (weighted pairs a query)")
    table.add_row("ops before", _counts(kind.ops_before) or "none")
    if not kind.passes:
        table.add_row("passes", _NO_PASSES)
    for summary in kind.passes:
        table.add_row(summary.name, "\n".join(_pass_lines(summary)))
    table.add_row("compiled", f"{kind.graphs} graph{'s' * (kind.graphs != 1)}, {kind.compile_seconds:.1f} s")
    return table


def _describe(environment: Environment) -> str:
    threads = f"{environment.threads} thread{'s' * (environment.threads != 1)}"
    return f"torch {environment.torch}, Python {environment.python}, {environment.device}, {threads}"


def _print_doctor(console: Console, report: DoctorReport) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("torch", report.torch)
    facts.add_row("Python", report.python)
    facts.add_row("Triton", report.triton or "not installed (CUDA only)")
    facts.add_row("C++ compiler", report.cpp_compiler or "none found")
    facts.add_row("CPU", ", ".join(report.cpu_features))
    if not report.cuda_devices:
        facts.add_row("CUDA", "no device")
    console.print(facts)
    for device in report.cuda_devices:
        console.print(_cuda_table(device))
    features = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    features.add_column("feature", no_wrap=True)
    features.add_column("works", no_wrap=True)
    features.add_column("found", no_wrap=True)
    features.add_column("how, or why not", overflow="fold")
    for feature in report.features:
        works = RichText("yes", style="green") if feature.works else RichText("no", style="yellow")
        features.add_row(feature.name, works, "tried" if feature.tried else "inferred", RichText(feature.detail))
    console.print(features)
    works_or_not = "work here." if report.core_works else "do not both work here; see above."
    console.print(f"Eager and compiled runs {works_or_not}", style="bold")


def _cuda_table(device: CudaDevice) -> Table:
    limits = f"{device.shared_memory_per_block} bytes of shared memory a block"
    limits += f", {device.shared_memory_per_block_optin} by opting in"
    table = Table(
        title=f"{device.name}, capability {device.capability}, {limits}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for header in ("head_dim", "BLOCK_M", "BLOCK_N", "warps", "stages"):
        table.add_column(header, justify="right")
    table.add_column("FlexAttention tiles, bfloat16, 128 query rows", overflow="fold")
    for choice in device.tiles:
        tiles = choice.tiles
        sizes = ["-"] * 4
        if tiles is not None:
            sizes = [str(n) for n in (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)]
        table.add_row(str(choice.head_dim), *sizes, choice.reason)
    return table
