"""What does a training step of the attention core cost: forward and backward, time, memory, error?

    python benchmarks/backward.py                         # the tiny config's shapes on CPU, eager only: a trial
    python benchmarks/backward.py --device cuda           # released shapes, bfloat16, ratio 1, one GPU
    python benchmarks/backward.py --device cuda --sweep   # and the backward kernels with other tiles
    python benchmarks/backward.py --show benchmarks/results/h200-backward.json

The core runs as plain products with autograd's own backward, as the named op `csa2::attend` inlined, and with all
passes, where kernels take its place. Times at one length are interleaved and are the device's, without the host's.
Errors are those of the gradients, relative, against float64: of q for a few hundred queries, and of the rows for a
few of them, over all queries. Prints a table and writes benchmarks/results/<device>-backward.json.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attention_parts import Inputs, make_inputs
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

from csa2_compiled import AttentionLayout, ops
from csa2_compiled.attention_math import attend_plain
from csa2_compiled.compiled import compile_function
from csa2_compiled.sparse_attention import sparse_attention, visible_keys

GRADIENTS = ("q", "sink", "window_kv", "compressed_kv")
_SAMPLED_ROWS = 16
_QUERIES_AT_ONCE = 64  # in float64
_CHUNK = 1024  # queries of the sweep's kernels
FIRST, SECOND, THIRD = "gradient of q", "gradients of slots", "sums of slots"
WHOLE, SORT = "whole backward", "slots by row"
Step = Callable[[], tuple[Tensor, ...]]


@dataclass
class Row:
    """One way to run a step; None where not measured, and `reason` says why.

    peak_gib: above the inputs and the results. errors: of each gradient in `GRADIENTS`, relative.
    """

    tokens: int
    variant: str
    forward_ms: float | None = None
    ms: float | None = None
    peak_gib: float | None = None
    errors: dict[str, float] | None = None
    reason: str | None = None


@dataclass
class Tiling:
    """One kernel of the backward pass with other tiles, over all queries; ms is its own time."""

    kernel: str
    tiles: str
    ms: float | None = None
    reason: str | None = None


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seq_len: Annotated[str, typer.Option(help="tokens, one length or several, separated by spaces")] = "",
    repeats: Annotated[int, typer.Option(help="timed runs of each")] = 20,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="also time the kernels with other tiles, at the last length")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    show: Annotated[Path | None, typer.Option(help="print the tables of an earlier run's JSON, run nothing")] = None,
) -> None:
    """Time a training step of the attention core."""
    if show is not None:
        print_result(read_result(show, Row.__dataclass_fields__))
        return
    place = require_device(device)
    released = place.type == "cuda"
    if sweep and not released:
        raise typer.BadParameter("--sweep times kernels, which need --device cuda")
    cfg, dtype, shapes = shapes_for(place)
    result: dict[str, Any] = {
        **provenance(place),
        "title": f"core, forward + backward, {shapes}, batch 1, r=1",
        "rows": [],
        "tilings": [],
    }
    path = output or results_path(place, "backward")
    inputs = None
    for tokens in map(int, (seq_len or ("1024 4096" if released else "128")).split()):
        inputs = make_inputs(cfg, tokens, dtype, place)
        result["rows"] += [asdict(row) for row in measure(inputs, repeats)]
        write_result(path, result)
        print_result({**result, "rows": [row for row in result["rows"] if row["tokens"] == tokens]})
    if sweep and inputs is not None:
        result["tilings"] = [asdict(tiling) for tiling in measure_tilings(inputs, repeats)]
        write_result(path, result)
        print_result({**result, "rows": []})
    print(f"written to {path}")


def measure(inputs: Inputs, repeats: int) -> list[Row]:
    """Every variant at one length: tried once, judged, and then all timed in turn."""
    torch.compiler.reset()
    device, leaves = inputs.q.device, leaves_of(inputs)
    grad_out = torch.randn_like(inputs.q)
    expected = exact_gradients(inputs, grad_out)
    rows: list[Row] = []
    forwards: dict[str, Callable[[], Any]] = {}
    steps: dict[str, Step] = {}
    for name, make in variants(inputs, device.type == "cuda").items():
        row = Row(inputs.tokens, name)
        rows.append(row)

        def judged(make: Callable[[], Callable[..., Tensor]] = make) -> tuple[Any, Step, dict[str, float]]:
            function = make()
            step = partial(training_step, function, leaves, grad_out)
            return partial(function, *leaves), step, errors_of(inputs, step()[1:], expected)

        found, row.reason = attempt(judged, Exception)  # one that fails leaves the others their figures
        if found is None:
            continue
        forwards[name], steps[name], row.errors = found
        results = sum(x.numel() * x.element_size() for x in steps[name]()) / 2**30
        peak = peak_gib(steps[name], device)
        row.peak_gib = None if peak is None else peak - results
    times = medians(steps, device, repeats, ahead=True)
    forward_times = medians(forwards, device, repeats, ahead=True)
    for row in rows:
        row.ms, row.forward_ms = times.get(row.variant), forward_times.get(row.variant)
    return rows


def leaves_of(inputs: Inputs) -> tuple[Tensor, ...]:
    i = inputs
    return tuple(x.detach().requires_grad_() for x in (i.q, i.sink, i.window_kv, i.compressed_kv))


def training_step(function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of the leaves."""
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def variants(inputs: Inputs, compiles: bool) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Ways to run the core as a function of q, sink, window_kv and compressed_kv; each is made when it is tried."""
    i, cfg = inputs, inputs.cfg

    def plain(q: Tensor, sink: Tensor, window_kv: Tensor, compressed_kv: Tensor) -> Tensor:
        gathered = [ops.gather_kv(window_kv, i.recent), ops.gather_kv(compressed_kv, i.topk_indices)]
        return attend_plain(q, torch.cat(gathered, dim=2), torch.cat([i.recent, i.topk_indices], dim=-1), sink)[0]

    def core(q: Tensor, sink: Tensor, window_kv: Tensor, compressed_kv: Tensor) -> Tensor:
        window, topk = cfg.sliding_window, cfg.index_topk
        return sparse_attention(
            q, window_kv, compressed_kv, i.topk_indices, sink, window, topk, None, AttentionLayout.PLAIN
        )

    made: dict[str, Callable[[], Callable[..., Tensor]]] = {"eager": lambda: core}
    if compiles:
        made["plain products, compiled"] = lambda: compile_function(plain, "inline", dynamic=False)[0]
        made["named op, inlined"] = lambda: compile_function(core, "inline", dynamic=False)[0]
        made["passes"] = lambda: compile_function(core, dynamic=False)[0]
    return made


@dataclass(frozen=True)
class Exact:
    """float64 gradients: of q for the sampled queries [n, H, D], of the sink [H], of the sampled rows [n, D] each."""

    q: Tensor
    sink: Tensor
    window_kv: Tensor
    compressed_kv: Tensor


def sampled_rows(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(_SAMPLED_ROWS, count), device=device).round().long()


def exact_gradients(inputs: Inputs, grad_out: Tensor) -> Exact:
    """The gradients in float64, a few queries at a time."""
    i, device = inputs, inputs.q.device
    keys, slots = torch.cat([i.window_kv, i.compressed_kv], dim=1)[0], visible_keys(i.recent, i.topk_indices)[0]
    sampled = sampled_rows(i.tokens, device), sampled_rows(i.compressed_kv.shape[1], device)
    numbers = torch.cat([sampled[0], sampled[1] + i.tokens])
    of_q: list[Tensor] = []
    of_sink, of_rows = (
        i.sink.new_zeros(i.sink.shape, dtype=torch.float64),
        keys.new_zeros(len(numbers), keys.shape[1], dtype=torch.float64),
    )
    for chosen in torch.arange(i.tokens, device=device).split(_QUERIES_AT_ONCE):
        q = i.q[0, chosen].double().requires_grad_()
        sink = i.sink.double().requires_grad_()
        index = slots[chosen]
        gathered = keys[index.clamp(min=0)].double().requires_grad_()
        logits = torch.einsum("shd,skd->shk", q, gathered) * q.shape[-1] ** -0.5
        logits = logits.masked_fill((index < 0).unsqueeze(1), float("-inf"))
        weights = torch.cat([sink.view(1, -1, 1).expand(len(chosen), -1, 1), logits], dim=-1).softmax(-1)[..., 1:]
        out = torch.einsum("shk,skd->shd", weights, gathered)
        grads = torch.autograd.grad(out, (q, sink, gathered), grad_out[0, chosen].double())
        of_q.append(grads[0][(chosen.unsqueeze(1) == i.sampled).any(1)])
        of_sink += grads[1]
        for n, number_ in enumerate(numbers.tolist()):
            of_rows[n] += grads[2][index == number_].sum(0)
    window, compressed = of_rows.split([len(sampled[0]), len(sampled[1])])
    return Exact(torch.cat(of_q), of_sink, window, compressed)


def errors_of(inputs: Inputs, gradients: tuple[Tensor, ...], expected: Exact) -> dict[str, float]:
    """Relative errors of the gradients, sampled where the exact ones are."""
    q, sink, window_kv, compressed_kv = gradients
    device = q.device
    got = {
        "q": q[0, inputs.sampled],
        "sink": sink,
        "window_kv": window_kv[0, sampled_rows(window_kv.shape[1], device)],
        "compressed_kv": compressed_kv[0, sampled_rows(compressed_kv.shape[1], device)],
    }
    errors = {}
    for name, value in got.items():
        exact = getattr(expected, name)
        errors[name] = ((value.double() - exact).norm() / exact.norm()).item()
    return errors


def measure_tilings(inputs: Inputs, repeats: int) -> list[Tiling]:
    """Each kernel of the backward pass alone, with several tiles, on one chunk; then all of it, and the sort."""
    from csa2_compiled.passes.kernels import sparse_attention_backward as kernels
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention as forward

    i, device = inputs, inputs.q.device
    heads, dim = i.q.shape[2:]
    sources = (i.window_kv, i.recent, i.compressed_kv, i.topk_indices)
    logsumexp = torch.empty(i.q.shape[:3], device=device)
    out = forward(i.q, i.sink, *sources, logsumexp=logsumexp)
    of_core = (torch.randn_like(out), i.q, out, logsumexp)
    keys, rows = kernels.one_source(*sources)
    count = min(_CHUNK, i.tokens)
    first, share = i.tokens - count, i.tokens / count  # the last queries, whose slots are all filled
    weights = torch.zeros(count, heads, rows.shape[1], dtype=out.dtype, device=device)
    gradients = torch.zeros_like(weights)
    rests = weights.new_zeros(count, heads, kernels.split_slots(i.recent, out.dtype))
    grad_q, mean = torch.empty_like(out), torch.empty_like(logsumexp)
    sums = torch.zeros(keys.shape, device=device)
    workspace = torch.zeros(count, rows.shape[1], dim, device=device)
    entries, bounds = kernels.slots_by_row(rows[first:], keys.shape[0], count)

    def run(kernel: str, tiles: Any) -> None:
        if kernel == FIRST:
            kernels.run_grad_q(of_core, keys, rows, grad_q, mean, weights, rests, gradients, first, count, tiles)
        elif kernel == SECOND:
            kernels.run_grad_slots(of_core, rows, weights, rests, gradients, workspace, first, count, tiles)
        elif kernel == THIRD:
            kernels.run_sum_slots(workspace, entries, bounds[0], 0, sums, tiles)
        else:
            kernels.sparse_attention_backward(of_core[0], out, logsumexp, i.q, i.sink, *sources, tiles=tiles)

    tilings: dict[tuple[str, str], Tiling] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for kernel, fields in tile_choices():
        tiles = replace(kernels.choose_backward_tiles(heads, dim, i.q.element_size()), **fields)
        name = ", ".join(f"{field} {value}" for field, value in fields.items()) or "as chosen"
        tiling = Tiling(kernel, name)
        call, tiling.reason = attempt(partial(captured, partial(run, kernel, tiles), device), Exception)
        tilings[kernel, name] = tiling
        if call is not None:
            calls[f"{kernel}: {name}"] = call
    sort = f"{SORT}: torch.sort"
    tilings[SORT, "torch.sort"] = Tiling(SORT, "torch.sort")
    calls[sort] = partial(kernels.slots_by_row, rows, keys.shape[0], count)
    for name, ms in medians(calls, device, repeats, ahead=True).items():
        kernel, _, description = name.partition(": ")
        tilings[kernel, description].ms = ms if kernel in (WHOLE, SORT) else ms * share
    return list(tilings.values())


def tile_choices() -> list[tuple[str, dict[str, Any]]]:
    """What the sweep tries: a kernel, and the fields of `BackwardTiles` that differ from the chosen ones."""
    first = [
        (64, 64, 8, 1, True),
        (64, 64, 8, 1, False),
        (64, 64, 16, 1, True),
        (64, 32, 8, 1, True),
        (64, 32, 8, 2, True),
        (64, 32, 8, 3, True),
        (64, 32, 16, 2, True),
        (64, 16, 8, 3, True),
        (32, 64, 4, 2, False),
        (32, 32, 4, 2, False),
    ]
    names: tuple[str, ...] = ("heads", "slots", "num_warps", "num_stages", "logits_once")
    choices = [(FIRST, dict(zip(names, values, strict=True))) for values in first]
    names = ("row_slots", "row_channels", "row_warps", "row_stages")
    second = [
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (64, 128, 8, 2),
        (64, 256, 8, 2),
        (64, 256, 8, 1),
        (64, 64, 4, 2),
    ]
    choices += [(SECOND, dict(zip(names, values, strict=True))) for values in second]
    names = ("sum_channels", "sum_entries", "sum_warps")
    third = [(128, 32, 4), (128, 16, 4), (128, 64, 4), (256, 16, 4), (512, 8, 4), (512, 16, 8), (128, 16, 2)]
    choices += [(THIRD, dict(zip(names, values, strict=True))) for values in third]
    whole: list[dict[str, Any]] = [{}, {"queries": 528}, {"queries": 2112}]
    return choices + [(WHOLE, fields) for fields in whole]


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The run as a CUDA graph, whose replays cost the host nothing."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def print_result(result: dict[str, Any]) -> None:
    """The table of the steps and, where there was a sweep, that of the tiles."""
    rows, tilings = [Row(**row) for row in result["rows"]], [Tiling(**tiling) for tiling in result["tilings"]]
    console = Console(width=140)
    if rows:
        errors_of_each = (f"error of {name}" for name in GRADIENTS)
        headings = ("tokens", "variant", "forward ms", "both ms", "peak GiB", *errors_of_each)
        table = make_table(result["title"], headings, left=("variant",))
        for row in rows:
            errors = [number((row.errors or {}).get(name), ".2e") for name in GRADIENTS]
            times = number(row.forward_ms, ".3f"), number(row.ms, ".3f"), number(row.peak_gib, ".2f")
            table.add_row(str(row.tokens), row.variant, *times, *errors)
        console.print(table)
    if tilings:
        title = "kernels of the backward pass, ms for all queries"
        table = make_table(title, ("kernel", "tiles", "ms"), left=("kernel", "tiles"))
        for tiling in tilings:
            table.add_row(tiling.kernel, tiling.tiles, number(tiling.ms, ".3f"))
        console.print(table)
    print_reasons(console, ((f"{row.tokens} tokens, {row.variant}", row.reason) for row in rows))
    print_reasons(console, ((f"{tiling.kernel}, {tiling.tiles}", tiling.reason) for tiling in tilings))


if __name__ == "__main__":
    typer.run(main)
