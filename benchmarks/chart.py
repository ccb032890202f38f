"""Draws the benchmarks' results: milliseconds of each layer, from the JSON that layer.py and decode.py write.

python benchmarks/chart.py                     # docs/images/layers.png, and decode.png where there are results
python benchmarks/chart.py --tokens 16384 --images /tmp
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from timing import REPOSITORY

# Okabe and Ito's colours, apart also in grey: vermilion, sky blue, blue, black.
COLOURS = ("#D55E00", "#56B4E9", "#0072B2", "#000000")
LAYER_SERIES = {"eager": "eager", "inline": "compiled, named ops inlined", "all": "compiled, all passes"}
DECODE_SERIES = {
    "eager_ms": "eager",
    "compiled_ms": "compiled, all passes, CUDA graph",
    "floor_ms": "floor: weights and cache rows at copy speed",
}
_BAR_WIDTH = 0.2


def main(
    results: Annotated[Path, typer.Option(help="folder of the JSON files")] = REPOSITORY / "benchmarks" / "results",
    images: Annotated[Path, typer.Option(help="folder of the images")] = REPOSITORY / "docs" / "images",
    device: Annotated[str, typer.Option(help="whose results: what their names begin with")] = "h200",
    tokens: Annotated[int, typer.Option(help="length of the layers' chart")] = 4096,
) -> None:
    """Draw layers.png, and decode.png if there are results of decode.py."""
    layer_results = results / f"{device}-layer.json"
    if not layer_results.is_file():
        raise typer.BadParameter(f"{layer_results} is missing; python benchmarks/layer.py --device cuda writes it")
    plt.switch_backend("agg")
    images.mkdir(parents=True, exist_ok=True)
    print(f"written to {save(draw_layers(json.loads(layer_results.read_text()), tokens), images / 'layers.png')}")
    decode_results = results / f"{device}-decode.json"
    if decode_results.is_file():
        print(f"written to {save(draw_decode(json.loads(decode_results.read_text())), images / 'decode.png')}")
    else:
        print(f"no decode.png: {decode_results} is missing; python benchmarks/decode.py writes it")


def draw_layers(result: dict[str, Any], tokens: int) -> Figure:
    """Bars a role at one length: eager, inlined, all passes, floor. `result` is layer.py's JSON."""
    rows = [row for row in result["rows"] if row["tokens"] == tokens]
    if not rows:
        lengths = sorted({row["tokens"] for row in result["rows"]})
        raise typer.BadParameter(f"the results hold no layer at {tokens} tokens, only at {lengths}")
    series = {label: [row["milliseconds"].get(name) for row in rows] for name, label in LAYER_SERIES.items()}
    series["floor: the dense products alone"] = [row["projections_ms"] for row in rows]
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    draw_bars(axes, [row["layer"] for row in rows], series)
    axes.set_title(f"{result['title']}, {tokens} tokens")
    axes.legend(frameon=False)
    add_caption(figure, result)
    return figure


def draw_decode(result: dict[str, Any]) -> Figure:
    """A panel a batch size and context, points a layer: eager, compiled, floor. `result` is decode.py's JSON."""
    panels = sorted({(row["context"], row["batch"]) for row in result["rows"]})
    columns = len({batch for _, batch in panels})
    lines = -(-len(panels) // columns)
    size = (5.5 * columns, 3.5 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (context, batch) in zip(grid.flat, panels, strict=False):
        rows = [row for row in result["rows"] if (row["context"], row["batch"]) == (context, batch)]
        series = {label: [row[name] for row in rows] for name, label in DECODE_SERIES.items()}
        draw_points(axes, [row["layer"] for row in rows], series)
        axes.set_title(f"batch {batch}, context {context}")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, title=result["title"], loc="outside upper center", ncols=len(labels), frameon=False)
    add_caption(figure, result)
    return figure


def draw_bars(axes: Axes, groups: Sequence[str], series: dict[str, list[float | None]]) -> None:
    """Groups of labelled bars on a linear axis from 0; a value of None is a word instead of a bar."""
    colours = (*COLOURS[: len(series) - 1], COLOURS[-1])  # the last one is the floor
    for number, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        offset = (number - (len(series) - 1) / 2) * _BAR_WIDTH
        places = [place + offset for place in range(len(groups))]
        bars = axes.bar(places, [value or 0.0 for value in values], _BAR_WIDTH * 0.9, label=label, color=colour)
        texts = ["not run" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(bars, texts, padding=2, fontsize=7, rotation=90)
    axes.margins(y=0.15)
    label_axes(axes, groups)


def draw_points(axes: Axes, groups: Sequence[str], series: dict[str, list[float | None]]) -> None:
    """Labelled points on a logarithmic axis, for values that are too far apart for bars; None has no point."""
    for (label, values), colour, marker in zip(series.items(), (COLOURS[0], *COLOURS[2:]), "os_", strict=True):
        places = [place for place, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        axes.plot(places, heights, marker, color=colour, label=label, markersize=8 if marker == "_" else 5)
        side = -1 if marker == "_" else 1  # the floor is often close to what is above it
        for place, height in zip(places, heights, strict=True):
            axes.annotate(
                f"{height:.3g}",
                (place, height),
                (6 * side, 0),
                textcoords="offset points",
                va="center",
                ha="right" if side < 0 else "left",
                fontsize=7,
            )
    axes.set_yscale("log")
    axes.margins(x=0.17, y=0.1)
    label_axes(axes, groups, width=10)


def label_axes(axes: Axes, groups: Sequence[str], width: int = 14) -> None:
    """Names of groups, in lines of so many characters, and the unit."""
    axes.set_xticks(range(len(groups)), [textwrap.fill(group, width) for group in groups], fontsize=8)
    axes.set_ylabel("ms")
    axes.spines[["top", "right"]].set_visible(False)


def add_caption(figure: Figure, result: dict[str, Any]) -> None:
    """Machine, versions, date, commit and command below the axes, as far as the results tell."""
    versions = [f"{name} {result[name]}" for name in ("torch", "triton", "commit") if name in result]
    known = [result.get("device"), *versions, result.get("date"), result.get("command")]
    figure.supxlabel(textwrap.fill(", ".join(text for text in known if text), 150), fontsize=8)


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    typer.run(main)
