"""What does one attention layer cost, per role: eager, compiled without passes, compiled with them?

    python benchmarks/layer.py                      # the demo model's layers, on CPU
    python benchmarks/layer.py --device cuda        # released shapes, bfloat16, one GPU
    python benchmarks/layer.py --show benchmarks/results/h200-layer-4096.json

Prints a table and writes benchmarks/results/<name>.json. All times of a row come from one run, interleaved.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import REPOSITORY, medians, peak_gib, provenance
from torch import Tensor

from csa2_compiled import AttentionLayout, CSA2Attention, CSA2Config, CSA2Output, CSA2State, compile_model
from csa2_compiled.compiled import resolve_passes

# (row, layer, layers run before it for their state), by preset
TINY_LAYERS = (
    ("window", 0, ()),
    ("full r=2", 2, ()),
    ("reuse r=2", 3, (2,)),
    ("full r=1 + candidates", 5, ()),
    ("reindex r=1", 7, (5,)),
    ("reuse r=1", 6, (5,)),
)
RELEASED_LAYERS = (
    ("window", 0, ()),
    ("full r=2", 2, ()),
    ("full r=1 + candidates", 20, ()),
    ("reindex r=1", 24, (20,)),
    ("reuse r=1", 21, (20,)),
)


@dataclass
class Row:
    """One layer's figures; times in ms, memory in GiB above weights and inputs."""

    layer: str
    layout: str
    milliseconds: dict[str, float]
    projections_ms: float
    peak_gib: dict[str, float | None]
    compile_seconds: dict[str, float]
    error_against_eager: dict[str, float]
    share_of_equal_selections: dict[str, float]


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seq_len: Annotated[int, typer.Option(help="tokens")] = 0,
    passes: Annotated[str, typer.Option(help="pass sets to compare, separated by spaces")] = "none all",
    layout: Annotated[AttentionLayout, typer.Option(help="layout of the attention core")] = AttentionLayout.AUTO,
    repeats: Annotated[int, typer.Option(help="timed runs of each")] = 20,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    show: Annotated[Path | None, typer.Option(help="print the table of an earlier run's JSON, run nothing")] = None,
) -> None:
    """Time every role's layer, eager and compiled."""
    if show is not None:
        result = json.loads(show.read_text())
        print_table(result["title"], [Row(**row) for row in result["rows"]])
        return
    place = torch.device(device)
    released = place.type == "cuda"
    tokens = seq_len or (4096 if released else 512)
    dtype = torch.bfloat16 if released else torch.float32
    cfg = CSA2Config.v41_flash() if released else CSA2Config.tiny()
    cfg = replace(cfg, max_position_embeddings=max(tokens, 65536 if released else 0))
    pass_sets = str.split(passes)
    for name in pass_sets:
        resolve_passes(name)
    rows = [
        measure(cfg, row, layer, before, tokens, dtype, place, pass_sets, layout, repeats)
        for row, layer, before in (RELEASED_LAYERS if released else TINY_LAYERS)
    ]
    shapes = "released shapes" if released else "tiny preset"
    title = f"{shapes}, {dtype}, batch 1, {tokens} tokens"
    result = {**provenance(place), "title": title, "rows": [asdict(row) for row in rows]}
    kind = result["device"].split()[-1].lower() if released else "cpu"
    path = output or REPOSITORY / "benchmarks" / "results" / f"{kind}-layer-{tokens}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print_table(title, rows)
    print(f"written to {path}")


@torch.no_grad()
def measure(
    cfg: CSA2Config,
    row: str,
    layer_idx: int,
    before: tuple[int, ...],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    pass_sets: list[str],
    layout: AttentionLayout,
    repeats: int,
) -> Row:
    torch.manual_seed(layer_idx)
    torch.compiler.reset()
    layer = CSA2Attention(cfg, layer_idx, dtype=dtype, device=device).eval()
    layer.layout = layout
    x = torch.randn(1, tokens, cfg.hidden_size, dtype=dtype, device=device)
    state = CSA2State()
    for source in before:
        source_layer = CSA2Attention(cfg, source, dtype=dtype, device=device)
        state = source_layer(torch.randn_like(x), state).state
    expected = layer(x, state)
    functions: dict[str, Callable[[], Any]] = {"eager": partial(layer, x, state)}
    compile_seconds, errors, selections = {}, {}, {}
    for name in pass_sets:
        compiled = compile_model(layer, passes=name, dynamic=False)
        begin = time.perf_counter()
        got = compiled(x, state)
        compile_seconds[name] = time.perf_counter() - begin
        errors[name], selections[name] = compare(expected, got)
        functions[f"compiled, passes={name}"] = partial(compiled, x, state)
    return Row(
        row,
        layer.compiled_layout(tokens).layout.value,
        medians(functions, device, repeats),
        medians({"projections": projections(layer, x)}, device, repeats)["projections"],
        {name: peak_gib(function, device) for name, function in functions.items()},
        compile_seconds,
        errors,
        selections,
    )


def projections(layer: CSA2Attention, x: Tensor) -> Callable[[], None]:
    """The dense projections alone, on ready inputs: no layer can be faster."""
    rows = x.shape[0] * x.shape[1]
    work = [
        (x.new_empty(rows, module.in_features, dtype=module.weight.dtype).normal_(), module.weight)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "wo_a"
    ]
    groups = layer.cfg.o_groups
    grouped = x.new_empty(groups, rows, layer.wo_a.in_features).normal_()
    wo_a = layer.wo_a.weight.view(groups, -1, layer.wo_a.in_features).transpose(1, 2)

    def run() -> None:
        for inputs, weight in work:
            torch.nn.functional.linear(inputs, weight)
        torch.bmm(grouped, wo_a)

    return run


def compare(expected: CSA2Output, got: CSA2Output) -> tuple[float, float]:
    """Relative error on the queries whose selection agrees, and the share of those queries."""
    agree = torch.ones(expected.hidden_states.shape[:2], dtype=torch.bool, device=expected.hidden_states.device)
    selected, selected_now = expected.state.topk_indices, got.state.topk_indices
    if selected is not None and selected_now is not None:
        agree = (selected == selected_now).all(-1)
    left, right = got.hidden_states[agree].double(), expected.hidden_states[agree].double()
    return ((left - right).norm() / right.norm()).item(), agree.double().mean().item()


def print_table(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    names = list(rows[0].milliseconds)
    for heading in ("layer", "layout", *(f"{name}, ms" for name in names), "speed-up", "projections, ms"):
        table.add_column(heading, justify="left" if heading in ("layer", "layout") else "right")
    for heading in ("error", "equal selections", "peak GiB", "compile s"):
        table.add_column(heading, justify="right")
    last = list(rows[0].compile_seconds)[-1]
    for row in rows:
        times = [row.milliseconds[name] for name in names]
        peak = row.peak_gib[names[-1]]
        table.add_row(
            row.layer,
            row.layout,
            *(f"{time_:.2f}" for time_ in times),
            f"{times[0] / times[-1]:.2f}x",
            f"{row.projections_ms:.2f}",
            f"{row.error_against_eager[last]:.1e}",
            f"{row.share_of_equal_selections[last]:.4f}",
            "" if peak is None else f"{peak:.2f}",
            f"{row.compile_seconds[last]:.0f}",
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
