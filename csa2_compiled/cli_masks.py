"""`csa2 masks`: what a query looks at, and why, as pictures, a page, JSON or text."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from csa2_compiled import run_report
from csa2_compiled.cli_shared import NotWorkingError, errors, make_console
from csa2_compiled.config import CSA2Config
from csa2_compiled.generate_report import read_model, shipped_model
from csa2_compiled.mask_report import read_inputs, report_inputs, report_text
from csa2_compiled.masks import visualize
from csa2_compiled.masks.view_data import MaskReport
from csa2_compiled.run_report import BadArgumentError, Origin
from csa2_compiled.state_report import check_whole, read_state, report_state, shown_layers

_DPI = 150
_SEQ_LEN = 512


def masks(
    text: Annotated[
        Path | None, typer.Option(help="File whose first bytes are the tokens (UTF-8 text).", metavar="FILE")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a text: layer inputs prefill.{l}.input, weights, and the config as metadata args.",
            metavar="SAFETENSORS",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a run: a state that save_state wrote. --text, if given, is what its tokens are.",
            metavar="SAFETENSORS",
        ),
    ] = None,
    row: Annotated[int, typer.Option(help="Row of the batch in --inputs or --state.", metavar="N")] = 0,
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Directory of a whole model, as csa2 train makes it; without it, --config, --weights and --seed, the "
            "small one that comes with csa2-compiled.",
            metavar="DIR",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.json or inference/config.json of a model with random weights instead; with only --weights or "
            "--seed, a tiny 9-layer byte model.",
            metavar="JSON",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Attention weights of that model in the released layout; without it all are random.",
            metavar="SAFETENSORS",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights.", metavar="N", show_default="0")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Bytes of the text to read, at most.", metavar="N", show_default="512")
    ] = None,
    layers: Annotated[str, typer.Option(help='Layers to show: "all", or as 2,5-8.', metavar="LAYERS")] = "all",
    queries: Annotated[
        str, typer.Option(help='Queries to show: "all", one as 300, or a range as 256:512.', metavar="QUERIES")
    ] = "all",
    head: Annotated[
        int | None, typer.Option(help="Head whose attention is shown; without it the mean of all.", metavar="N")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Write the map of tokens to this .png, or every picture to this directory.", metavar="PATH"),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page there.", metavar="FILE")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the data there.", metavar="FILE")] = None,
    as_ascii: Annotated[
        bool, typer.Option("--ascii", help="Print the last of the queries; what happens without another output.")
    ] = False,
) -> None:
    """Show what a query looks at, and why: window, candidates, selection and how attention is split among them.

    Runs the text, eagerly, through a model: that of --model, the shipped one, or with --config, --weights or --seed one
    of random weights, its attention from --weights. Or runs each layer of --inputs on its own input; or shows what a
    saved state tells, which is all but the attention and the index scores. Exit code 2 for a bad argument, 1 where
    pictures need matplotlib and it is missing.
    """
    with errors("masks"):
        for argument, path in (("--png", png), ("--html", html), ("--json", json_path)):
            if path is not None:
                _check_output(argument, path)
        if png is not None:
            _check_matplotlib()
        report = _collect(text, inputs, state, row, model_path, config, weights, seed, seq_len, layers, queries, head)
        if png is not None:
            _write_png(png, report, head)
        if html is not None:
            _write("--html", html, visualize.make_page(report, head))
        if json_path is not None:
            _write("--json", json_path, json.dumps(visualize.to_dict(report)) + "\n")
        if as_ascii or (png is None and html is None and json_path is None):
            shown = visualize.render_ascii(report, report.queries[-1], make_console().width, head)
            # The signs for line ends, and any text, also where the terminal's encoding has no such characters.
            typer.echo(shown.encode(sys.stdout.encoding, errors="backslashreplace").decode(sys.stdout.encoding))


def parse_layers(layers: str, count: int, shown: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layer numbers of "all" or of numbers and ranges with commas between, ascending.

    count: layers of the model. shown: those that there is something to show of, None for all. Raises BadArgumentError.
    """
    shown = range(count) if shown is None else shown
    if layers == "all":
        return tuple(shown)
    chosen: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            raise BadArgumentError("--layers", f'{layers!r} is not understood; it must be "all" or as 2,5-8')
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if not first <= last < count:
            raise BadArgumentError("--layers", f"{part.strip()} is not within 0 to {count - 1}, the model's layers")
        chosen.update(range(first, last + 1))
    for layer in sorted(chosen):
        if layer not in shown:
            allowed = ", ".join(map(str, shown))
            problem = f"layer {layer} comes after the state, or a later layer replaced its selection"
            raise BadArgumentError("--layers", f"{problem}; the state shows {allowed}")
    return tuple(sorted(chosen))


def parse_queries(queries: str, count: int) -> range:
    """Queries of "all", one number, or first:stop, each end optional. Raises BadArgumentError."""
    if queries == "all":
        return range(count)
    match = re.fullmatch(r"([0-9]*)(:?)([0-9]*)", queries)
    if match is None or queries == "":
        raise BadArgumentError("--queries", f'{queries!r} is not understood; it must be "all", as 300, or as 256:512')
    first = int(match[1] or 0)
    stop = int(match[3] or count) if match[2] else first + 1
    if not first < stop <= count:
        raise BadArgumentError("--queries", f"{queries} is no range within 0 and {count - 1}, the text's tokens")
    return range(first, stop)


def _collect(
    text: Path | None,
    inputs: Path | None,
    state: Path | None,
    row: int,
    model_path: Path | None,
    config: Path | None,
    weights: Path | None,
    seed: int | None,
    seq_len: int | None,
    layers: str,
    queries: str,
    head: int | None,
) -> MaskReport:
    """The report, every argument checked before a layer runs."""
    of_model = {"--config": config, "--weights": weights, "--seed": seed}
    of_text = {"--model": model_path, **of_model, "--seq-len": seq_len}
    if state is not None:
        _refuse("--state, which is shown as it is", {"--inputs": inputs, **of_text, "--head": head})
        return _show_state(state, text, row, layers, queries)
    if inputs is not None:
        _refuse("--inputs, whose file has its own", {"--text": text, **of_text})
        source = read_inputs(inputs)
        num_rows, num_tokens = source.inputs[0].shape[:2]
        _check_row(row, num_rows)
        chosen, span = parse_layers(layers, source.cfg.num_hidden_layers), parse_queries(queries, num_tokens)
        _check_head(head, source.cfg)
        return report_inputs(source, chosen, span, row)
    if text is None:
        raise BadArgumentError("--text", "one of --text, --inputs and --state is needed")
    if model_path is not None:
        _refuse("--model, which has a config and all weights", of_model)
    shipped = model_path is None and all(value is None for value in of_model.values())
    folder = shipped_model() if shipped else model_path
    excerpt = run_report.read_text(text, _SEQ_LEN if seq_len is None else seq_len)
    num_tokens = len(excerpt.data)
    model = None if folder is None else read_model(folder, num_tokens, "cpu", "--seq-len")
    cfg = run_report.read_config(config, num_tokens) if model is None else model.cfg
    _check_row(row, 1)
    chosen, span = parse_layers(layers, cfg.num_hidden_layers), parse_queries(queries, num_tokens)
    _check_head(head, cfg)
    if model is not None:
        return report_text(model, excerpt, "the shipped demo model" if shipped else str(folder), chosen, span)
    seed = 0 if seed is None else seed
    origin = Origin(None if config is None else str(config), None if weights is None else str(weights), seed)
    return report_text(run_report.make_model(cfg, seed, "cpu", weights), excerpt, origin, chosen, span)


def _show_state(state: Path, text: Path | None, row: int, layers: str, queries: str) -> MaskReport:
    saved = read_state(state)
    num_rows, num_tokens = saved.state.publications[0].topk_indices.shape[:2]
    _check_row(row, num_rows)
    check_whole(saved, row)
    excerpt = None if text is None else run_report.read_text(text, num_tokens)
    if excerpt is not None and len(excerpt.data) < num_tokens:
        raise BadArgumentError("--text", f"{text} has {len(excerpt.data)} bytes; the state is of {num_tokens} tokens")
    chosen = parse_layers(layers, saved.cfg.num_hidden_layers, shown_layers(saved))
    return report_state(saved, state.name, excerpt, chosen, parse_queries(queries, num_tokens), row)


def _refuse(beside: str, options: dict[str, Path | int | None]) -> None:
    for argument, value in options.items():
        if value is not None:
            raise BadArgumentError(argument, f"it does not go with {beside}")


def _check_row(row: int, num_rows: int) -> None:
    if not 0 <= row < num_rows:
        raise BadArgumentError("--row", f"{row} is not within 0 to {num_rows - 1}")


def _check_head(head: int | None, cfg: CSA2Config) -> None:
    if head is not None and not 0 <= head < cfg.num_attention_heads:
        raise BadArgumentError("--head", f"{head} is not within 0 to {cfg.num_attention_heads - 1}")


def _check_output(argument: str, path: Path) -> None:
    # Before the run, so that nobody waits and then loses the result.
    if path.is_dir() and argument == "--png":
        writable = os.access(path, os.W_OK)
    elif path.is_dir():
        raise BadArgumentError(argument, f"{path} is a directory; a file name is needed")
    elif argument == "--png" and path.suffix.lower() != ".png":
        raise BadArgumentError(argument, f"{path} is no directory and does not end in .png")
    elif not path.parent.is_dir():
        raise BadArgumentError(argument, f"{path.parent} is no directory")
    else:
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    if not writable:
        raise BadArgumentError(argument, f"{path} cannot be written")


def _check_matplotlib() -> None:
    try:
        visualize.import_matplotlib()
    except visualize.VisualizationError as error:
        raise NotWorkingError(str(error)) from error


def _write_png(path: Path, report: MaskReport, head: int | None) -> None:
    names = ["map"]
    if path.is_dir():
        known = {"mass": all(view.mass is not None for view in report.layers)}
        known["scores"] = any(view.scores is not None for view in report.layers)
        names = [name for name in visualize.FIGURES if known.get(name, True)]
    for name in names:
        target = path / f"{name}.png" if path.is_dir() else path
        try:
            visualize.FIGURES[name](report, head=head).savefig(target, dpi=_DPI)
        except OSError as error:
            raise BadArgumentError("--png", f"{target} cannot be written: {error.strerror}") from error
        typer.echo(f"written: {target}", err=True)


def _write(argument: str, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BadArgumentError(argument, f"{path} cannot be written: {error.strerror}") from error
    typer.echo(f"written: {path}", err=True)
