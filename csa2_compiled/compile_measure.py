"""One measurement of what compiling costs, in the process that runs it; `compile_report` starts one process for each.

    python -m csa2_compiled.compile_measure CASE RESULT    # both JSON files, of a Case and of a Measurement

Caches are those of the environment (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, TMPDIR).
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.cache import CSA2Cache
from csa2_compiled.compile_cache import load_compile_cache, save_compile_cache
from csa2_compiled.compiled import CompiledModel, compile_model
from csa2_compiled.config import CSA2Config
from csa2_compiled.masks.layout import AttentionLayout
from csa2_compiled.model import CSA2Block, CSA2ForCausalLM
from csa2_compiled.passes.inductor import compile_counts, compile_phases, keep_compile_counts, kernel_launches
from csa2_compiled.state import CSA2State

# Layers that are measured alone: the layer of ROLES_CONFIG and the one that gives it its state.
ROLES: dict[str, tuple[int, int | None]] = {
    "window": (0, None),
    "full r=2": (1, None),
    "reuse r=2": (2, 1),
    "full r=1 + candidates": (3, None),
    "reindex r=1": (4, 3),
    "reuse r=1": (5, 3),
}
# Stacks: compress ratios, KV sources, index sources, candidate source.
STACKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = {
    "1 layer": ((0,), (), (), -1),
    "4 layers": ((0, 1, 1, 1), (1,), (1, 2), 1),
    "one of each role": ((0, 2, 2, 1, 1, 1), (1, 3), (1, 3, 4), 3),
    "40 layers": ((0,) * 2 + (2,) * 18 + (1,) * 20, (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), 20),
}
MODES = ("layer", "full", "regional")
STARTS = ("cold", "warm", "portable")
DECODE_STEPS = 3


@dataclass(frozen=True)
class Case:
    """What to compile, and how.

    what: a key of ROLES or STACKS. mode: "layer" (an attention layer alone), "full" (one graph for the stack) or
    "regional". lengths: of the prefills, one after the other; decode: steps of one token with a cache come after them.
    start: "cold" (empty caches), "warm" (those that the same case left) or "portable" (empty, then a file of
    `save_compile_cache`). layout: of the attention core.
    """

    what: str
    mode: str
    passes: str = "all"
    dynamic: bool = False
    start: str = "cold"
    lengths: tuple[int, ...] = (256,)
    decode: bool = False
    device: str = "cpu"
    layout: str = "auto"

    def __post_init__(self) -> None:
        if self.what not in (ROLES if self.mode == "layer" else STACKS) or self.mode not in MODES:
            raise ValueError(
                f"what is {self.what!r} and mode {self.mode!r}; allowed are {list(ROLES)} with mode 'layer'"
                f" and {list(STACKS)} with 'full' or 'regional'"
            )
        if self.decode and self.mode == "layer":
            raise ValueError("decode is given with mode 'layer'; it needs a stack")

    @property
    def name(self) -> str:
        shapes = "dynamic" if self.dynamic else "static"
        lengths = f"{self.lengths[0]}" if len(self.lengths) == 1 else f"{min(self.lengths)} to {max(self.lengths)}"
        tokens = f"{lengths} tokens{' and decode' if self.decode else ''}"
        return f"{self.what}, {self.mode}, passes {self.passes}, {shapes}, {tokens}, {self.start}"


@dataclass(frozen=True)
class Measurement:
    """What a case cost. Times in seconds, memory in MiB.

    compile_seconds: of all calls that compiled, loading included, without what they computed. phases: its parts (see
    `inductor.PHASES`), "load" of a portable cache, and "rest", work of the call around them. passes: parts of the phase
    of that name. forward_seconds: of one more call of each. graphs_after: how many graphs there were after each length
    and after decoding. launches: of one more call of the first length, by kind. peak_process, peak_compiler: resident
    memory of this process above what it held before, and of its largest child. peak_device: allocated above weights
    and inputs.
    """

    case: Case
    compile_seconds: float
    phases: dict[str, float]
    passes: dict[str, float]
    forward_seconds: float
    graphs: int
    graphs_after: dict[str, int]
    cache_hits: int
    graph_breaks: dict[str, int]
    guards: int
    recompilations: tuple[str, ...]
    kernels_generated: int
    launches: dict[str, int]
    peak_process: float
    peak_compiler: float
    peak_device: float | None


def stack_config(what: str, device: str, max_tokens: int) -> CSA2Config:
    """The config of a stack: tiny widths on CPU, released ones on CUDA."""
    ratios, kv_sources, index_sources, candidates = STACKS[what]
    widths = CSA2Config.v41_flash() if device == "cuda" else CSA2Config.tiny()
    return replace(
        widths,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv_sources,
        index_source_layer_ids=index_sources,
        candidate_source_layer_id=candidates,
        max_position_embeddings=max(max_tokens, 65536),
    )


@torch.no_grad()
def measure(case: Case, portable: Path | None = None) -> Measurement:
    """Compile a case in this process, which must not have compiled anything yet.

    portable: a file of `save_compile_cache`: read first where the case starts "portable", else written afterwards.
    """
    keep_compile_counts()
    torch.manual_seed(0)
    calls, compiled = _layer_calls(case) if case.mode == "layer" else _stack_calls(case)
    _wait(case.device)
    memory = _ProcessMemory(case.device)
    graphs_after: dict[str, int] = {}
    with compile_phases() as phases:
        start = time.perf_counter()
        if case.start == "portable" and portable is not None:
            load_compile_cache(portable)
        load = time.perf_counter() - start
        for name, call in calls.items():
            call()
            graphs_after[name] = compiled.compilations
        _wait(case.device)
        seconds = time.perf_counter() - start
    peaks = memory.peaks()
    if case.start != "portable" and portable is not None:
        save_compile_cache(portable, case.device)
    with kernel_launches() as launches:
        next(iter(calls.values()))()
    again = time.perf_counter()
    for call in calls.values():
        call()
    _wait(case.device)
    forward = time.perf_counter() - again
    counts = compile_counts()
    rest = max(0.0, seconds - load - sum(phases.values()) - forward)
    return Measurement(
        case=case,
        compile_seconds=load + sum(phases.values()) + rest,
        phases={**phases, "load": load, "rest": rest},
        passes=dict(compiled.manager.seconds),
        forward_seconds=forward,
        graphs=compiled.compilations,
        graphs_after=graphs_after,
        cache_hits=compiled.cache_hits,
        graph_breaks=counts.graph_breaks,
        guards=counts.guards,
        recompilations=counts.recompilations,
        kernels_generated=counts.kernels_generated,
        launches=dict(launches),
        peak_process=peaks[0],
        peak_compiler=peaks[1],
        peak_device=peaks[2],
    )


def _layer_calls(case: Case) -> tuple[dict[str, Callable[[], Any]], CompiledModel]:
    cfg = stack_config("one of each role", case.device, max(case.lengths))
    index, source = ROLES[case.what]
    dtype = _dtype(case)
    layer = _with_weights(CSA2Attention(cfg, index, dtype, case.device).eval())
    layer.layout = AttentionLayout(case.layout)
    before = None if source is None else _with_weights(CSA2Attention(cfg, source, dtype, case.device).eval())
    compiled = compile_model(layer, case.passes, dynamic=case.dynamic, fullgraph=False)
    inputs: list[tuple[Tensor, CSA2State]] = []
    for tokens in case.lengths:
        x = torch.randn(1, tokens, cfg.hidden_size, dtype=dtype, device=case.device)
        inputs.append((x, CSA2State() if before is None else before(x).state))
    return {str(x.shape[1]): partial(compiled, x, state) for x, state in inputs}, compiled


def _stack_calls(case: Case) -> tuple[dict[str, Callable[[], Any]], CompiledModel]:
    cfg = stack_config(case.what, case.device, max(case.lengths))
    model = CSA2ForCausalLM(cfg, _dtype(case), case.device).eval()
    for block in model.layers:
        assert isinstance(block, CSA2Block)
        block.attn.layout = AttentionLayout(case.layout)
    compiled = compile_model(
        model, case.passes, regional=case.mode == "regional", dynamic=case.dynamic, fullgraph=False
    )
    ids = torch.randint(cfg.vocab_size, (1, max(case.lengths)), device=case.device)
    calls: dict[str, Callable[[], Any]] = {str(tokens): partial(compiled, ids[:, :tokens]) for tokens in case.lengths}
    if case.decode:
        cache = CSA2Cache(cfg, 1, 2 * case.lengths[0], dtype=_dtype(case), device=case.device)
        model(ids[:, : case.lengths[0]], cache)
        calls["decode"] = lambda: [compiled(ids[:, :1], cache=cache) for _ in range(DECODE_STEPS)]
    return calls, compiled


def _with_weights(layer: CSA2Attention) -> CSA2Attention:
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return layer


def _dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.device == "cuda" else torch.float32


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class _ProcessMemory:
    """Peaks of memory since it was made, in MiB."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._before = _peak_resident()
        if device == "cuda":
            torch.cuda.synchronize()
            self._allocated = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[float, float, float | None]:
        import resource  # which Windows does not have

        compiler = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        allocated = torch.cuda.max_memory_allocated() - self._allocated if self.device == "cuda" else None
        return _peak_resident() - self._before, compiler, None if allocated is None else allocated / 2**20


def _peak_resident() -> float:
    # In KiB on Linux. A process that another one starts inherits its peak, but not this line of status.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(case_path: Path, result_path: Path, portable: Path | None = None) -> None:
    """Measure the case of one JSON file into another."""
    values = json.loads(case_path.read_text(encoding="utf-8"))
    measurement = measure(Case(**{**values, "lengths": tuple(values["lengths"])}), portable)
    result_path.write_text(json.dumps(asdict(measurement)), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
