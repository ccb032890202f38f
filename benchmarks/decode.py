"""What does one decoding step cost, per layer and for the whole stack, and what is the least it could?

    python benchmarks/decode.py                  # released shapes, bfloat16, one GPU
    python benchmarks/decode.py --device cpu     # the tiny config's layers, as a trial
    python benchmarks/decode.py --show benchmarks/results/h200-decode.json

A step is one token a row after a full cache. *eager* launches every operation; *compiled* replays a CUDA graph of
the compiled layer; the *floor* is the bytes that a step must read, the layer's weights and the cache rows that it
looks at, over the memory's copy speed. As in the model, where the tokens stand is laid out once a step, before the
layers. The stack is all attention layers of the config, with residual additions. Inductor joins small kernels that do
not depend on each other (`combo_kernels`).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from timing import (
    make_table,
    medians,
    number,
    provenance,
    read_result,
    require_device,
    results_path,
    shapes_for,
    write_result,
)
from torch import Tensor, nn

from csa2_compiled import CSA2Attention, CSA2Cache, CSA2Config, CSA2Output, CSA2State, LayerRole, compile_model
from csa2_compiled.compiled import CompiledModel
from csa2_compiled.decode import capture
from csa2_compiled.rows import buffers
from csa2_compiled.tokens import lay_out_tokens

COPY_BYTES_PER_SECOND = 4.3e12  # one H200
STACK = "stack"
_STEPS = 10  # timed in a row, as the layers of a stack follow each other; a layer's weights do not fit the L2 cache
_TOKENS_AT_ONCE = 1 << 22  # in a cache of a process that compiles beside others
# Which layers of the config a row runs; the last one is timed, the others give it its state.
ROWS = ("window", "full r=2", "full r=1 + candidates", "reindex r=1", "reuse r=1")


@dataclass
class Row:
    """One layer, or the stack, at one batch size and context; times in ms, None where not measured."""

    layer: str
    batch: int
    context: int
    eager_ms: float | None
    compiled_ms: float
    floor_ms: float
    read_bytes: int


def config_of(row: str, cfg: CSA2Config, context: int) -> CSA2Config:
    """A config of just the layers that a row needs, so that its cache is no larger than it must be."""
    ratios = {"window": (0,), "full r=2": (2,), "full r=1 + candidates": (1,)}.get(row, (1, 1))
    compressed = ratios[0] > 0
    candidates = ratios[0] == 1
    return replace(
        cfg,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=(0,) if compressed else (),
        index_source_layer_ids=(0, 1) if row == "reindex r=1" else (0,) if compressed else (),
        candidate_source_layer_id=0 if candidates else -1,
        max_position_embeddings=context,
    )


def make_layers(cfg: CSA2Config, dtype: torch.dtype, device: torch.device) -> list[CSA2Attention]:
    torch.manual_seed(0)
    layers = [CSA2Attention(cfg, i, dtype=dtype, device=device).eval() for i in range(cfg.num_hidden_layers)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return layers


def full_cache(cfg: CSA2Config, batch: int, context: int, dtype: torch.dtype, device: torch.device) -> CSA2Cache:
    """A cache with room for one more token, its rows random."""
    cache = CSA2Cache(cfg, batch, context, dtype=dtype, device=device)
    for layer in cache.layers:
        for rows in layer.all_rows():
            buffers(rows)[0].normal_()
    cache.lengths.fill_(context - 1)
    cache.record.most = context - 1
    cache.begin_step(1)
    return cache


def bytes_read(layer: CSA2Attention, cache: CSA2Cache) -> int:
    """Bytes of weights and cache rows that one step of a layer needs."""
    cfg, batch, element = cache.cfg, cache.batch_size, torch.finfo(cache.dtype).bits // 8
    weights = sum(parameter.nbytes for parameter in layer.parameters())
    rows = min(cfg.sliding_window, cache.max_seq_len)
    index_rows = 0
    if layer.ratio:
        positions = cache.max_seq_len // layer.ratio
        rows += min(cfg.index_topk, positions)
        index_rows = positions if layer.role in (LayerRole.FULL, LayerRole.REINDEX) else 0
    return weights + batch * element * (rows * cfg.head_dim + index_rows * cfg.index_head_dim)


def run_stack(
    run: Callable[..., CSA2Output], layers: list[CSA2Attention], x: Tensor, cache: CSA2Cache, state: CSA2State
) -> Tensor:
    """One step of the stack; run(layer, x, state, cache=..., tokens=...) runs a layer."""
    tokens = lay_out_tokens(1, x.device, past=cache.lengths)
    for layer in layers:
        output = run(layer, x, state, cache=cache.layers[layer.layer_idx], tokens=tokens)
        x, state = x + output.hidden_states, output.state
    return x


@torch.no_grad()
def measure(
    row: str,
    compiled: CompiledModel,
    layers: list[CSA2Attention],
    cache: CSA2Cache,
    repeats: int,
    warm_only: bool,
) -> Row:
    x = torch.randn(cache.batch_size, 1, cache.cfg.hidden_size, dtype=cache.dtype, device=cache.device)
    state, timed = CSA2State(), layers
    if row == STACK:
        arguments: tuple[Any, ...] = (layers, x, cache, state)
        step: Callable[[], Any] = partial(run_stack, compiled.run_block, *arguments)
        eager: Callable[[], Any] = partial(run_stack, CSA2Attention.__call__, *arguments)
    else:
        tokens, timed = lay_out_tokens(1, x.device, past=cache.lengths), layers[-1:]
        for layer in layers[:-1]:
            state = compiled.run_block(layer, x, state, cache=cache.layers[layer.layer_idx], tokens=tokens).state
        of_layer = {"cache": cache.layers[layers[-1].layer_idx], "tokens": tokens}
        step = partial(compiled.run_block, layers[-1], x, state, **of_layer)
        eager = partial(layers[-1], x, state, **of_layer)
    step()
    read = sum(bytes_read(layer, cache) for layer in timed)
    result = Row(row, cache.batch_size, cache.max_seq_len, None, 0.0, read / COPY_BYTES_PER_SECOND * 1e3, read)
    if warm_only:
        return result
    if cache.device.type == "cuda":
        step = capture(step, cache.device).replay
    result.compiled_ms = medians({"compiled": step}, cache.device, repeats, calls=_STEPS)["compiled"]
    try:
        result.eager_ms = medians({"eager": eager}, cache.device, 5 if row != STACK else 2, warmup=1)["eager"]
    except torch.cuda.OutOfMemoryError:
        result.eager_ms = None  # index scores of all heads at once
    return result


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    batches: Annotated[str, typer.Option(help="rows, separated by spaces")] = "1 8 64",
    contexts: Annotated[str, typer.Option(help="tokens in the cache, separated by spaces")] = "4096 65536 262144",
    rows: Annotated[str, typer.Option(help="layers, separated by commas; stack is all of the config")] = ",".join(
        (*ROWS, STACK)
    ),
    repeats: Annotated[int, typer.Option(help="timed runs of each")] = 30,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    combo_kernels: Annotated[bool, typer.Option(help="on cuda: join small independent kernels into one")] = True,
    compile_ahead: Annotated[bool, typer.Option(help="on cuda: fill the compilers' caches in parallel first")] = True,
    warm_only: Annotated[bool, typer.Option(help="compile into the caches and time nothing")] = False,
    show: Annotated[Path | None, typer.Option(help="print the table of an earlier run's JSON, run nothing")] = None,
) -> None:
    """Time one decoding step per layer and for the whole stack."""
    if show is not None:
        result = read_result(show, Row.__dataclass_fields__)
        print_table(result["title"], [Row(**row) for row in result["rows"]])
        return
    place = require_device(device)
    on_gpu = place.type == "cuda"
    cfg, dtype, shapes = shapes_for(place)
    if on_gpu and compile_ahead and not warm_only:
        compile_in_parallel(rows, batches, contexts, combo_kernels)
    results: list[Row] = []
    path = output or results_path(place, "decode")
    title = f"one decoding step, {shapes}"
    lengths, sizes = [int(c) for c in contexts.split()], [int(b) for b in batches.split()]
    for context, name, batch in product(lengths, rows.split(","), sizes):
        of_row = cfg if name == STACK else config_of(name, cfg, context)
        torch.compiler.reset()
        layers = make_layers(of_row, dtype, place)
        cache = full_cache(of_row, batch, context, dtype, place)
        compiled = compile_model(layers[-1], dynamic=False, options={"combo_kernels": combo_kernels})
        results.append(measure(name, compiled, layers, cache, repeats, warm_only))
        del layers, cache, compiled
        if not warm_only:
            write_result(path, {**provenance(place), "title": title, "rows": [asdict(row) for row in results]})
            last = results[-1]
            print(f"{name}, batch {batch}, context {context}: {last.compiled_ms:.4f} ms")
    if not warm_only:
        print_table(title, results)
        print(f"written to {path}")


def compile_in_parallel(rows: str, batches: str, contexts: str, combo_kernels: bool) -> None:
    """Fill the compilers' caches, so that the timed process compiles little.

    A process for each layer and batch; the largest caches, of which few fit at once, come one after the other in one.
    """
    command = [sys.executable, __file__, "--warm-only", f"--{'' if combo_kernels else 'no-'}combo-kernels"]
    layers = [name for name in rows.split(",") if name != STACK]
    jobs: list[tuple[str, str, str]] = []  # rows, batches, contexts
    for batch in batches.split():
        small = [context for context in contexts.split() if int(context) * int(batch) <= _TOKENS_AT_ONCE]
        jobs += [(name, batch, " ".join(small)) for name in layers if small]
        jobs += [(",".join(layers), batch, context) for context in contexts.split() if context not in small]
    processes = [
        subprocess.Popen(
            [*command, "--rows", names, "--batches", batch, "--contexts", lengths],
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        for names, batch, lengths in jobs
    ]
    print(f"compiling in {len(processes)} processes at once; times come from this process alone")
    failed = [process.args for process in processes if process.wait() != 0]
    if failed:
        raise typer.Exit(f"compilation failed: {failed}")  # type: ignore[arg-type]


def print_table(title: str, rows: list[Row]) -> None:
    headings = ("layer", "batch", "context", "eager, ms", "compiled, ms", "floor, ms", "times the floor")
    table = make_table(title, headings, left=("layer",))
    for row in rows:
        table.add_row(
            row.layer,
            str(row.batch),
            str(row.context),
            number(row.eager_ms, ".2f"),
            f"{row.compiled_ms:.4f}",
            f"{row.floor_ms:.4f}",
            f"{row.compiled_ms / row.floor_ms:.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
