"""`csa2 masks`: what a query looks at, and why, as pictures, a page, JSON or text."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from csa2_compiled import run_report
from csa2_compiled.cli_shared import ConfigOption, NotWorkingError, errors, make_console
from csa2_compiled.config import CSA2Config
from csa2_compiled.mask_report import LayerInputs, read_inputs, report_inputs, report_text
from csa2_compiled.masks import visualize
from csa2_compiled.masks.view_data import MaskReport
from csa2_compiled.run_report import BadArgumentError, Origin, Text

_DPI = 150


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
    row: Annotated[int, typer.Option(help="Row of the batch in --inputs.", metavar="N")] = 0,
    config: ConfigOption = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Attention weights in the released layout; without it all are random.", metavar="SAFETENSORS"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.", metavar="N")] = 0,
    seq_len: Annotated[int, typer.Option(help="Bytes of the text to read, at most.", metavar="N")] = 512,
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

    Runs the text, eagerly, through a model (random weights unless --weights is given), or each layer of --inputs on
    its own input. Exit code 2 for a bad argument, 1 where pictures need matplotlib and it is missing.
    """
    with errors("masks"):
        for argument, path in (("--png", png), ("--html", html), ("--json", json_path)):
            if path is not None:
                _check_output(argument, path)
        if png is not None:
            _check_matplotlib()
        report = _collect(text, inputs, row, config, weights, seed, seq_len, layers, queries, head)
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


def parse_layers(layers: str, count: int) -> tuple[int, ...]:
    """Layer numbers of "all" or of numbers and ranges with commas between, ascending. Raises BadArgumentError."""
    if layers == "all":
        return tuple(range(count))
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
    row: int,
    config: Path | None,
    weights: Path | None,
    seed: int,
    seq_len: int,
    layers: str,
    queries: str,
    head: int | None,
) -> MaskReport:
    """The report, every argument checked before a layer runs."""
    if (text is None) == (inputs is None):
        raise BadArgumentError("--text", "one of --text and --inputs is needed, and not both")
    source: Text | LayerInputs
    if inputs is not None:
        for argument, path in (("--config", config), ("--weights", weights)):
            if path is not None:
                raise BadArgumentError(argument, "it does not go with --inputs, whose file has its own")
        source = read_inputs(inputs)
        cfg, tokens, rows = source.cfg, source.inputs[0].shape[1], source.inputs[0].shape[0]
    else:
        assert text is not None
        source = run_report.read_text(text, seq_len)
        cfg, tokens, rows = run_report.read_config(config, len(source.data)), len(source.data), 1
    if not 0 <= row < rows:
        raise BadArgumentError("--row", f"{row} is not within 0 to {rows - 1}")
    chosen, span = parse_layers(layers, cfg.num_hidden_layers), parse_queries(queries, tokens)
    _check_head(head, cfg)
    if isinstance(source, LayerInputs):
        return report_inputs(source, chosen, span, row)
    model = run_report.make_model(cfg, seed, "cpu", weights)
    origin = Origin(None if config is None else str(config), None if weights is None else str(weights), seed)
    return report_text(model, source, origin, chosen, span)


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
        selects = any(view.scores is not None for view in report.layers)
        names = [name for name in visualize.FIGURES if name != "scores" or selects]
    for name in names:
        target = path / f"{name}.png" if path.is_dir() else path
        try:
            visualize.FIGURES[name](report, head=head).savefig(target, dpi=_DPI)
        except OSError as error:
            raise BadArgumentError("--png", f"{target} cannot be written: {error.strerror}") from error


def _write(argument: str, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BadArgumentError(argument, f"{path} cannot be written: {error.strerror}") from error
