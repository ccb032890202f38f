"""What do the parts of the attention cost alone: the core, index scores, selection, candidate blocks?

    python benchmarks/attention.py                        # the tiny config's shapes on CPU, eager only: a trial
    python benchmarks/attention.py --device cuda          # released shapes, bfloat16, ratio 1, one GPU
    python benchmarks/attention.py --device cuda --peer module:function --what-it-waits-for
    python benchmarks/attention.py --show benchmarks/results/h200-attention.json

Each part runs eager (the plain layout of the core, the bodies of named ops), compiled with named ops inlined, and as
the kernels that passes put in its place. All times at one length are interleaved and are the device's, without the
host's. Prints a table and writes benchmarks/results/<device>-attention.json.

Other implementations of the core are timed beside it: FlashMLA's sparse prefill where it is installed, and each
`--peer module:function` (found through PYTHONPATH), called as f(q, kv_all, indices, sink, scale) -> out with

    q        [S, H, D]
    kv_all   [N, D], the window's rows and then the compressed ones, keys and values at once, q's dtype
    indices  int32 [S, W + K], rows of kv_all that each query sees, -1 where a slot is empty
    sink     float32 [H], a logit that takes part in the softmax and adds no value
    scale    float, what q . k is multiplied by
    out      [S, H, D], q's dtype
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attention_parts import (
    AGREEMENT,
    CORE,
    ERROR,
    Call,
    Inputs,
    Part,
    core_kernel,
    hopper_core,
    inlined,
    make_inputs,
    make_parts,
)
from flops import attention_flops
from rich.console import Console
from rich.table import Table
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

from csa2_compiled.passes.inductor import shared_memory_per_block
from csa2_compiled.sparse_attention import visible_keys

Peer = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
FLASH_MLA = "FlashMLA"
_MANY_TOKENS = 4096  # above, a quarter of the repeats
_WAITING_TOKENS = 4096
# (heads, slots, warps, stages) of the tiles that --what-it-waits-for tries.
_TILES = (
    (64, 64, 8, 1),
    (64, 64, 8, 2),
    (64, 64, 8, 3),
    (64, 64, 16, 2),
    (64, 64, 4, 2),
    (64, 32, 8, 2),
    (64, 32, 8, 3),
    (64, 32, 4, 3),
    (64, 128, 8, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
)


@dataclass
class Row:
    """One way to compute one part; None where not measured, and `reason` says why.

    tflops: counting every slot or pair; tflops_filled: the filled or visible ones. peak_gib: above the inputs. error:
    relative, against float64; agreement: share of the plain selection, or of the plain marks, that is the same.
    """

    tokens: int
    part: str
    variant: str
    ms: float | None = None
    tflops: float | None = None
    tflops_filled: float | None = None
    peak_gib: float | None = None
    error: float | None = None
    agreement: float | None = None
    reason: str | None = None


@dataclass
class Wait:
    """The attention kernel with one thing changed; gathered_tb_s: bytes of gathered rows over time, TB/s."""

    case: str
    filled_slots: int
    ms: float | None = None
    tflops_filled: float | None = None
    gathered_tb_s: float | None = None
    reason: str | None = None


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seq_len: Annotated[str, typer.Option(help="tokens, one length or several, separated by spaces")] = "",
    repeats: Annotated[int, typer.Option(help="timed runs of each, fewer of long ones")] = 20,
    peer: Annotated[list[str] | None, typer.Option(help="another core to time, module:function")] = None,
    with_inlined: Annotated[
        bool, typer.Option("--inlined/--no-inlined", help="compile too, which takes most of a run on cuda")
    ] = True,
    what_it_waits_for: Annotated[
        bool, typer.Option("--what-it-waits-for", help="also time the kernel with one thing changed at a time")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
    show: Annotated[Path | None, typer.Option(help="print the tables of an earlier run's JSON, run nothing")] = None,
) -> None:
    """Time the parts of the attention, eager, compiled and as kernels."""
    if show is not None:
        print_result(read_result(show, Row.__dataclass_fields__))
        return
    place = require_device(device)
    released = place.type == "cuda"
    if what_it_waits_for and not released:
        raise typer.BadParameter("--what-it-waits-for times kernels, which need --device cuda")
    cfg, dtype, shapes = shapes_for(place)
    peers = load_peers(peer or [], with_flash_mla=released)
    result: dict[str, Any] = {
        **provenance(place),
        "title": f"parts of the attention, {shapes}, batch 1, r=1",
        "rows": [],
        "waits": [],
    }
    path = output or results_path(place, "attention")
    for tokens in map(int, (seq_len or ("1024 4096 16384" if released else "256")).split()):
        of_length = repeats if tokens <= _MANY_TOKENS else max(3, repeats // 4)
        inputs = make_inputs(cfg, tokens, dtype, place)
        result["rows"] += [asdict(row) for row in measure(inputs, peers, of_length, with_inlined and released)]
        del inputs
        write_result(path, result)
    if what_it_waits_for:
        waits = measure_waits(make_inputs(cfg, _WAITING_TOKENS, dtype, place), repeats)
        result["waits"] = [asdict(wait) for wait in waits]
        write_result(path, result)
    print_result(result)
    print(f"written to {path}")


def load_peers(names: list[str], with_flash_mla: bool) -> dict[str, Peer | str]:
    """Each peer by name, or why it cannot be loaded."""
    peers: dict[str, Peer | str] = {}
    for name in names:
        module_name, _, function_name = name.partition(":")
        if not module_name or not function_name:
            raise typer.BadParameter(f"peer is {name!r}; it must be module:function")
        loaded, reason = attempt(partial(_load, module_name, function_name), Exception)
        peers[name] = reason if loaded is None else loaded  # type: ignore[assignment]
    if with_flash_mla:
        loaded, reason = attempt(load_flash_mla, Exception)
        peers[FLASH_MLA] = reason if loaded is None else loaded  # type: ignore[assignment]
    return peers


def _load(module_name: str, function_name: str) -> Peer:
    return getattr(importlib.import_module(module_name), function_name)


def load_flash_mla() -> Peer:
    """FlashMLA's sparse prefill as a peer; ImportError says what is missing."""
    function = getattr(importlib.import_module("flash_mla"), "flash_mla_sparse_fwd", None)
    if function is None:
        raise ImportError("flash_mla has no flash_mla_sparse_fwd")
    missing = {"q", "kv", "indices", "sm_scale", "d_v", "attn_sink"} - set(inspect.signature(function).parameters)
    if missing:
        raise ImportError(f"flash_mla_sparse_fwd takes no {', '.join(sorted(missing))}")

    def peer(q: Tensor, kv_all: Tensor, indices: Tensor, sink: Tensor, scale: float) -> Tensor:
        rows, slots = kv_all.unsqueeze(1), indices.unsqueeze(1)  # one head of keys
        return function(q=q, kv=rows, indices=slots, sm_scale=scale, d_v=q.shape[-1], attn_sink=sink)[0]

    return peer


@torch.no_grad()
def measure(inputs: Inputs, peers: dict[str, Peer | str], repeats: int, with_inlined: bool) -> list[Row]:
    """Every variant of every part at one length: tried once, judged, and then all timed in turn."""
    torch.compiler.reset()
    device = inputs.q.device
    rows: list[Row] = []
    functions: dict[str, Call] = {}
    flops: dict[str, tuple[int, int]] = {}

    def try_variant(part: Part, variant: str, make: Callable[[], Call]) -> None:
        row = Row(inputs.tokens, part.name, variant)
        rows.append(row)

        def judged_call() -> tuple[Call, float, float | None]:
            call = make()
            return call, part.judge(call()), peak_gib(call, device)

        judged, row.reason = attempt(judged_call, Exception)  # one that fails leaves the others their figures
        if judged is None:
            return
        call, figure, row.peak_gib = judged
        setattr(row, part.figure, figure)
        functions[_key(row)] = call
        if part.flops is not None:
            flops[_key(row)] = part.flops

    for part in make_parts(inputs, with_kernels=device.type == "cuda"):
        try_variant(part, "eager", partial(_same, part.eager))
        for variant, call in part.to_inline.items() if with_inlined else ():
            try_variant(part, variant, partial(inlined, call))
        for variant, call in part.kernels.items():
            try_variant(part, variant, partial(_same, call))
        for name, peer in peers.items() if part.name == CORE else ():
            if isinstance(peer, str):
                rows.append(Row(inputs.tokens, part.name, name, reason=peer))
            else:
                try_variant(part, name, partial(peer_call, peer, inputs))
    times = medians(functions, device, repeats, ahead=True)
    for row in rows:
        row.ms = times.get(_key(row))
        if row.ms is not None and _key(row) in flops:
            row.tflops, row.tflops_filled = (count / row.ms / 1e9 for count in flops[_key(row)])
    return rows


def _key(row: Row) -> str:
    return f"{row.part}: {row.variant}"


def _same(call: Call) -> Call:
    return call


def peer_call(peer: Peer, inputs: Inputs) -> Call:
    """The peer on the inputs of the core, its shapes as in this file's docstring; a result [1, S, H, D]."""
    q, scale = inputs.q[0], inputs.q.shape[-1] ** -0.5
    kv_all = torch.cat([inputs.window_kv[0], inputs.compressed_kv[0]])
    indices = visible_keys(inputs.recent, inputs.topk_indices)[0].contiguous()

    def run() -> Tensor:
        return peer(q, kv_all, indices, inputs.sink, scale).unsqueeze(0)

    return partial(run)


@torch.no_grad()
def measure_waits(inputs: Inputs, repeats: int) -> list[Wait]:
    """The attention kernel without RoPE: other slots, then other tiles, all timed in turn."""
    device = inputs.q.device
    calls = {name: core_kernel(changed) for name, changed in waiting_inputs(inputs).items()}
    counts = {name: filled(changed) for name, changed in waiting_inputs(inputs).items()}
    for name, changed in waiting_inputs(inputs).items():
        for kernel, call in hopper_core(changed).items():
            calls[f"{kernel}, {name}"], counts[f"{kernel}, {name}"] = call, counts[name]
    reasons: dict[str, str] = {}
    base = core_kernel(inputs)
    for heads, slots, num_warps, num_stages in _TILES:
        name = f"tiles of {heads} heads x {slots} slots, {num_warps} warps, {num_stages} stages"
        tiles = replace(
            base.keywords["tiles"], heads=heads, slots=slots, num_warps=num_warps, num_stages=num_stages, splits=1
        )
        counts[name] = filled(inputs)
        needed = tiles.shared_bytes(inputs.q.shape[-1], inputs.q.element_size())
        if device.type == "cuda" and needed > shared_memory_per_block(device):
            reasons[name] = f"needs up to {needed} bytes of shared memory"
            continue
        calls[name] = partial(base, tiles=tiles)
        _, reason = attempt(calls[name], Exception)
        if reason is not None:
            reasons[name] = reason
            del calls[name]
    times = medians(calls, device, repeats, ahead=True)
    waits = [Wait(name, counts[name], times.get(name), reason=reasons.get(name)) for name in counts]
    for wait in waits:
        if wait.ms is not None:
            row_bytes = inputs.q.shape[-1] * inputs.q.element_size()
            wait.tflops_filled = attention_flops(inputs.cfg, wait.filled_slots) / wait.ms / 1e9
            wait.gathered_tb_s = wait.filled_slots * row_bytes / wait.ms / 1e9
    return waits


def filled(inputs: Inputs) -> int:
    return int((inputs.recent >= 0).sum() + (inputs.topk_indices >= 0).sum())


def waiting_inputs(inputs: Inputs) -> dict[str, Inputs]:
    """The inputs with other slots, by what is changed."""

    def change(of_slots: Callable[[Tensor], Tensor]) -> Inputs:
        return replace(inputs, recent=of_slots(inputs.recent), topk_indices=of_slots(inputs.topk_indices))

    return {
        "as selected": inputs,
        "every slot names one row": change(lambda slots: torch.where(slots >= 0, 0, -1).to(torch.int32)),
        "newest positions selected": replace(inputs, topk_indices=newest_positions(inputs.topk_indices)),
        "second half of the slots empty": change(first_half),
        "every other slot empty": change(lambda slots: slots.masked_fill(_numbers(slots) % 2 == 1, -1)),
    }


def newest_positions(topk_indices: Tensor) -> Tensor:
    """As many picks a query, but the newest positions, ascending: neighbouring rows, shared by neighbouring queries."""
    count = (topk_indices >= 0).sum(-1, keepdim=True)
    query = torch.arange(topk_indices.shape[1], device=topk_indices.device).view(1, -1, 1)
    slot = _numbers(topk_indices)
    return torch.where(slot < count, query + 1 - count + slot, -1).to(torch.int32)


def first_half(slots: Tensor) -> Tensor:
    """The first half of each query's filled slots, rounded up."""
    count = (slots >= 0).sum(-1, keepdim=True)
    return slots.masked_fill(_numbers(slots) >= (count + 1) // 2, -1)


def _numbers(slots: Tensor) -> Tensor:
    return torch.arange(slots.shape[-1], device=slots.device)


def print_result(result: dict[str, Any]) -> None:
    """The table of the parts, a section a length and part, and the table of what the kernel waits for."""
    rows = [Row(**row) for row in result["rows"]]
    figures = ("ms", "TFLOP/s", "TFLOP/s, filled", "peak GiB", ERROR, AGREEMENT)
    table = make_table(result["title"], ("tokens", "part", "variant", *figures), left=("part", "variant"))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            str(row.tokens),
            row.part,
            row.variant,
            number(row.ms, ".3f"),
            number(row.tflops, ".3g"),
            number(row.tflops_filled, ".3g"),
            number(row.peak_gib, ".2f"),
            number(row.error, ".1e"),
            number(row.agreement, ".5f"),
            end_section=following is not None and (following.tokens, following.part) != (row.tokens, row.part),
        )
    console = Console(width=140)
    console.print(table)
    waits = [Wait(**wait) for wait in result["waits"]]
    if waits:
        console.print(waiting_table(waits))
    print_reasons(console, ((f"{row.tokens} tokens, {_key(row)}", row.reason) for row in rows))
    print_reasons(console, ((wait.case, wait.reason) for wait in waits))


def waiting_table(waits: list[Wait]) -> Table:
    headings = ("case", "filled slots", "ms", "TFLOP/s, filled", "gathered TB/s")
    title = f"what the attention kernel waits for, {_WAITING_TOKENS} tokens"
    table = make_table(title, headings, left=("case",))
    for wait in waits:
        figures = number(wait.ms, ".3f"), number(wait.tflops_filled, ".3g"), number(wait.gathered_tb_s, ".2f")
        table.add_row(wait.case, str(wait.filled_slots), *figures)
    return table


if __name__ == "__main__":
    typer.run(main)
