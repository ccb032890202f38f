"""What does one attention layer cost, per role: eager, compiled with named ops inlined, compiled with all passes?

    python benchmarks/layer.py                          # the tiny config's layers, on CPU
    python benchmarks/layer.py --device cuda            # released shapes, bfloat16, one GPU
    python benchmarks/layer.py --device cuda --seq-len "4096 32768" --layers "window,reuse r=1"
    python benchmarks/layer.py --show benchmarks/results/h200-layer.json

Prints a table and writes benchmarks/results/<device>-layer.json, one row a role and length. All times of a row come
from one run, interleaved. The floor is the layer's dense products alone; TFLOP/s count them, the attention core over
the slots that are filled, and the index scores of visible pairs. What is not measured says why.

On CUDA a process a layer first fills the compilers' caches, so "first call" is not what compiling costs
(--no-compile-ahead leaves that out).
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from flops import attention_flops, filled_slots, index_score_flops, visible_pairs
from rich.console import Console
from timing import (
    attempt,
    make_table,
    medians,
    number,
    peak_gib,
    print_reasons,
    provenance,
    read_result,
    require_device,
    results_path,
    shapes_for,
    write_result,
)
from torch import Tensor

from csa2_compiled import (
    AttentionLayout,
    CSA2Attention,
    CSA2Config,
    CSA2Output,
    CSA2State,
    LayerRole,
    compile_model,
)
from csa2_compiled.compiled import resolve_passes

# (row, layer, the layer before it that gives it its state)
TINY_LAYERS: tuple[tuple[str, int, int | None], ...] = (
    ("window", 0, None),
    ("full r=2", 2, None),
    ("reuse r=2", 3, 2),
    ("full r=1 + candidates", 5, None),
    ("reindex r=1", 7, 5),
    ("reuse r=1", 6, 5),
)
RELEASED_LAYERS: tuple[tuple[str, int, int | None], ...] = (
    ("window", 0, None),
    ("full r=2", 2, None),
    ("full r=1 + candidates", 20, None),
    ("reindex r=1", 24, 20),
    ("reuse r=1", 21, 20),
)
_MANY_TOKENS = 4096  # above, a quarter of the repeats
_CUDA_SECONDS = 150.0


@dataclass
class Row:
    """One layer at one length, figures by variant: "eager", then the pass sets; None where not measured.

    Times in ms, memory in GiB above weights and inputs. flops: by kind of work. reasons: of what is None.
    """

    layer: str
    layout: str
    milliseconds: dict[str, float | None]
    projections_ms: float
    peak_gib: dict[str, float | None]
    compile_seconds: dict[str, float]  # of the first call
    error_against_eager: dict[str, float]
    share_of_equal_selections: dict[str, float]
    # What follows is absent from older files.
    tokens: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    tflops: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """What all measurements of a run share."""

    cfg: CSA2Config
    dtype: torch.dtype
    device: torch.device
    pass_sets: tuple[str, ...]
    layout: AttentionLayout = AttentionLayout.AUTO
    repeats: int = 8
    skip_eager_above: int = _MANY_TOKENS
    deadline: float = float("inf")  # of time.perf_counter()
    warm_only: bool = False

    def why_not(self, variant: str, tokens: int) -> str | None:
        """Why a variant is not to be run; None when it is."""
        if time.perf_counter() > self.deadline:
            return "the time limit had passed (--time-limit)"
        if variant == "eager" and self.warm_only:
            return "only compiling"
        if tokens > self.skip_eager_above and variant not in self.pass_sets[-1:]:
            return f"skipped above {self.skip_eager_above} tokens (--skip-eager-above)"
        return None

    def make_layer(self, layer_idx: int) -> CSA2Attention:
        torch.manual_seed(layer_idx)
        layer = CSA2Attention(self.cfg, layer_idx, dtype=self.dtype, device=self.device).eval()
        layer.layout = self.layout
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        return layer

    def make_input(self, tokens: int) -> Tensor:
        return torch.randn(1, tokens, self.cfg.hidden_size, dtype=self.dtype, device=self.device)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seq_len: Annotated[str, typer.Option(help="tokens, one length or several, separated by spaces")] = "",
    passes: Annotated[str, typer.Option(help="pass sets to compare, separated by spaces")] = "inline all",
    layers: Annotated[str, typer.Option(help="rows to measure, separated by commas; all unless given")] = "",
    layout: Annotated[AttentionLayout, typer.Option(help="layout of the attention core")] = AttentionLayout.AUTO,
    repeats: Annotated[int, typer.Option(help="timed runs of each, fewer of long ones; 0: 8 on cuda, 20 on cpu")] = 0,
    skip_eager_above: Annotated[
        int, typer.Option(help="tokens above which only the last pass set runs: the others gather all slots")
    ] = _MANY_TOKENS,
    time_limit: Annotated[
        float, typer.Option(help="seconds after which nothing new is compiled; 0: 150 on cuda, none on cpu")
    ] = 0.0,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    compile_ahead: Annotated[bool, typer.Option(help="on cuda: fill the compilers' caches in parallel first")] = True,
    warm_only: Annotated[bool, typer.Option(help="compile into the caches and time nothing")] = False,
    show: Annotated[Path | None, typer.Option(help="print the table of an earlier run's JSON, run nothing")] = None,
) -> None:
    """Time every role's layer, eager and compiled."""
    if show is not None:
        result = read_result(show, Row.__dataclass_fields__)
        print_table(result["title"], [Row(**row) for row in result["rows"]])
        return
    begin = time.perf_counter()
    place = require_device(device)
    released = place.type == "cuda"
    lengths = [int(tokens) for tokens in (seq_len or ("1024 4096 16384" if released else "512")).split()]
    for name in passes.split():
        resolve_passes(name)
    cfg, dtype, shapes = shapes_for(place)
    setup = Setup(
        cfg=replace(cfg, max_position_embeddings=max(*lengths, 65536 if released else 1)),
        dtype=dtype,
        device=place,
        pass_sets=tuple(passes.split()),
        layout=layout,
        repeats=repeats or (8 if released else 20),
        skip_eager_above=skip_eager_above,
        deadline=begin + (time_limit or (_CUDA_SECONDS if released else float("inf"))),
        warm_only=warm_only,
    )
    chosen = choose_layers(RELEASED_LAYERS if released else TINY_LAYERS, layers)
    if released and compile_ahead and not warm_only:
        compile_in_parallel([row for row, _, _ in chosen], lengths, passes, layout, skip_eager_above)
    title = f"one layer, {shapes}, batch 1"
    path = output or results_path(place, "layer")
    rows: list[Row] = []
    for row in (row for tokens in lengths for row in measure_layers(setup, chosen, tokens)):
        rows.append(row)
        if not warm_only:
            write_result(path, {**provenance(place), "title": title, "rows": [asdict(row) for row in rows]})
    if not warm_only:
        print_table(title, rows)
        print(f"written to {path} after {time.perf_counter() - begin:.0f} s")


def choose_layers(
    known: tuple[tuple[str, int, int | None], ...], names: str
) -> tuple[tuple[str, int, int | None], ...]:
    """The known rows that `names` lists, separated by commas; all of them when it lists none."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = set(wanted) - {row for row, _, _ in known}
    if unknown:
        allowed = ", ".join(row for row, _, _ in known)
        raise typer.BadParameter(f"layers names {', '.join(sorted(unknown))}; allowed are {allowed}")
    return tuple(layer for layer in known if not wanted or layer[0] in wanted)


def compile_in_parallel(
    rows: list[str], lengths: list[int], passes: str, layout: AttentionLayout, skip_eager_above: int
) -> None:
    """Fill the compilers' caches with a process a row, so that the timed process compiles little."""
    options = {
        "--device": "cuda",
        "--seq-len": " ".join(map(str, lengths)),
        "--passes": passes,
        "--layout": layout.value,
        "--skip-eager-above": str(skip_eager_above),
    }
    command = [sys.executable, __file__, "--warm-only", *(word for option in options.items() for word in option)]
    threads = str(max(1, (os.cpu_count() or 1) // len(rows)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}
    processes = [subprocess.Popen([*command, "--layers", row], env=environment) for row in rows]
    for row, process in zip(rows, processes, strict=True):
        if process.wait() != 0:
            print(f"compiling {row} ahead failed; it is compiled when it is timed")


def measure_layers(setup: Setup, layers: tuple[tuple[str, int, int | None], ...], tokens: int) -> Iterator[Row]:
    """One row a layer; a layer's state comes from its source's row, or from a run of the source if that has none."""
    states: dict[int, CSA2State | None] = {}
    for row, layer_idx, source in layers:
        if source is not None and source not in states:
            states[source] = source_state(setup, source, tokens)
        begin = time.perf_counter()
        measured, states[layer_idx] = measure(
            setup, row, layer_idx, tokens, CSA2State() if source is None else states[source]
        )
        print(f"{tokens} tokens, {row}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        yield measured


@torch.no_grad()
def source_state(setup: Setup, layer_idx: int, tokens: int) -> CSA2State | None:
    """What a layer publishes on random input; None where that takes too much memory or time."""
    to_run = replace(setup, warm_only=False)
    variant = next((name for name in ("eager", *setup.pass_sets) if to_run.why_not(name, tokens) is None), None)
    if variant is None:
        return None
    layer = setup.make_layer(layer_idx)
    run = layer if variant == "eager" else compile_model(layer, passes=variant, dynamic=False)
    output, _ = attempt(partial(run, setup.make_input(tokens)))
    return None if output is None else output.state


@torch.no_grad()
def measure(
    setup: Setup, row: str, layer_idx: int, tokens: int, state: CSA2State | None
) -> tuple[Row, CSA2State | None]:
    """A layer's row, and the state that it publishes; None when no variant ran, or none of its source (state None)."""
    torch.compiler.reset()
    layer = setup.make_layer(layer_idx)
    x = setup.make_input(tokens)
    measured = Row(row, layer.compiled_layout(tokens).layout.value, {}, 0.0, {}, {}, {}, {}, tokens)
    functions: dict[str, Callable[[], Any]] = {}
    eager: CSA2Output | None = None
    published: CSA2State | None = None
    for name in ("eager", *setup.pass_sets):
        reason = setup.why_not(name, tokens) or ("its source layer did not run" if state is None else None)
        if reason is None:
            run = layer if name == "eager" else compile_model(layer, passes=name, dynamic=False)
            functions[name] = partial(run, x, state)
            begin = time.perf_counter()
            output, reason = attempt(functions[name])
        if reason is not None:
            functions.pop(name, None)
            measured.reasons[name] = reason
            continue
        assert output is not None
        published = published or output.state
        if name == "eager":
            eager = output
            continue
        measured.compile_seconds[name] = time.perf_counter() - begin
        if eager is not None:
            measured.error_against_eager[name], measured.share_of_equal_selections[name] = compare(eager, output)
        del output
    if not setup.warm_only:
        add_figures(measured, setup, layer, x, published, functions)
    return measured, published


def add_figures(
    row: Row,
    setup: Setup,
    layer: CSA2Attention,
    x: Tensor,
    published: CSA2State | None,
    functions: dict[str, Callable[[], Any]],
) -> None:
    """Time, memory and TFLOP/s of the variants that run."""
    device, tokens = setup.device, x.shape[1]
    variants = ("eager", *setup.pass_sets)
    row.peak_gib = {name: peak_gib(functions[name], device) if name in functions else None for name in variants}
    repeats = setup.repeats if tokens <= _MANY_TOKENS else max(3, setup.repeats // 4)
    calls = 10 if device.type == "cuda" else 1  # as in a stack, whose launches queue up
    timed = medians({**functions, "projections": projections(layer, x)}, device, repeats, warmup=2, calls=calls)
    row.milliseconds = {name: timed.get(name) for name in variants}
    row.projections_ms = timed["projections"]
    if published is not None:
        row.flops = layer_flops(layer, tokens, published)
        total = sum(row.flops.values())
        row.tflops = {name: total / ms / 1e9 if ms else None for name, ms in row.milliseconds.items()}


def dense_weights(layer: CSA2Attention, tokens: int) -> Iterator[tuple[str, int, Tensor]]:
    """Name, input rows and weight of each dense product of a layer."""
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            latents = name == "indexer.wk"  # one a complete group
            yield name, tokens // layer.ratio if latents else tokens, module.weight


def layer_flops(layer: CSA2Attention, tokens: int, state: CSA2State) -> dict[str, int]:
    """Operations of a prefill of one row: dense products, filled slots, visible pairs of an index source.

    state: what the layer's output holds, for its selection.
    """
    read = state.of_ratio(layer.ratio)
    slots = filled_slots(tokens, layer.cfg.sliding_window, None if read is None else read.topk_indices)
    is_index_source = layer.role in (LayerRole.FULL, LayerRole.REINDEX)
    return {
        "projections": sum(2 * rows * weight.numel() for _, rows, weight in dense_weights(layer, tokens)),
        "attention": attention_flops(layer.cfg, slots),
        "index_scores": index_score_flops(layer.cfg, visible_pairs(tokens, layer.ratio)) if is_index_source else 0,
    }


def projections(layer: CSA2Attention, x: Tensor) -> Callable[[], None]:
    """The dense products alone, on ready inputs and in the activation dtype: no layer can be faster."""
    tokens, groups = x.shape[1], layer.cfg.o_groups
    work = [
        (x.new_empty(rows, weight.shape[1]).normal_(), weight.to(x.dtype))
        for name, rows, weight in dense_weights(layer, tokens)
        if name != "wo_a"
    ]
    grouped = x.new_empty(groups, tokens, layer.wo_a.in_features).normal_()
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
    """A section a length; below it the reasons of what was not measured."""
    names = list(rows[0].milliseconds)
    last = names[-1].removeprefix("compiled, passes=")  # the spelling of older files
    times_of_each = (*(f"{name}, ms" for name in names), f"{names[0]} / {names[-1]}")
    others = ("floor, ms", "TFLOP/s", "peak GiB, of each", "error", "equal selections", "first call, s")
    table = make_table(title, ("tokens", "layer", "layout", *times_of_each, *others), left=("layer", "layout"))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        times = [row.milliseconds[name] for name in names]
        table.add_row(
            str(row.tokens or ""),
            row.layer,
            row.layout,
            *(number(time_, ".2f") for time_ in times),
            number(times[0] / times[-1] if times[0] and times[-1] else None, ".2f"),
            f"{row.projections_ms:.2f}",
            number(row.tflops.get(names[-1]), ".3g"),
            " / ".join(number(row.peak_gib.get(name), ".2f") for name in names),
            number(row.error_against_eager.get(last), ".1e"),
            number(row.share_of_equal_selections.get(last), ".4f"),
            number(row.compile_seconds.get(last), ".0f"),
            end_section=following is not None and following.tokens != row.tokens,
        )
    console = Console(width=200)
    console.print(table)
    for row in rows:
        place = f"{row.tokens} tokens, {row.layer}"
        print_reasons(console, ((f"{place}, {name}", reason) for name, reason in row.reasons.items()))


if __name__ == "__main__":
    typer.run(main)
