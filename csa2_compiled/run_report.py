"""What `csa2 run` and `csa2 explain` report, gathered as plain data; nothing here prints."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, fx
from torch.nn.functional import cross_entropy

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.checkpoint import CheckpointError, load_attention
from csa2_compiled.compiled import CompiledModel, compile_model, resolve_passes
from csa2_compiled.config import ConfigError, CSA2Config, LayerRole
from csa2_compiled.masks.layout import pairs_per_query
from csa2_compiled.model import CSA2Block, CSA2ForCausalLM
from csa2_compiled.passes import CompilerPass, PassReport
from csa2_compiled.passes.inductor import graph_cache_hits, graphs_compiled, without_autograd_cache
from csa2_compiled.state import CSA2Output, CSA2State
from csa2_compiled.tokens import Tokens

TIMED_RUNS = 5  # after a warm-up; the median counts
BYTE_VALUES = 256
_SEEDS = 2**63

# Called before each block: its layer number, the name of its kind, whether it is the first of its kind.
OnBlock = Callable[[int, str, bool], None]
T = TypeVar("T")


class BadArgumentError(ValueError):
    """A command line argument that cannot be used; the message begins with its name."""

    def __init__(self, argument: str, problem: object) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


@dataclass(frozen=True)
class Text:
    """The first bytes of a file. truncated: the file goes on after them."""

    name: str
    data: bytes
    truncated: bool


@dataclass(frozen=True)
class Environment:
    """Where the numbers come from. threads: those torch computes with on the CPU."""

    torch: str
    python: str
    device: str
    threads: int


@dataclass(frozen=True)
class Declined:
    """How often a pass left an op alone for one reason."""

    op: str
    reason: str
    count: int


@dataclass(frozen=True)
class PassSummary:
    """What one pass did: rewrites by op, and what it left with the reason."""

    name: str
    fired: dict[str, int]
    declined: tuple[Declined, ...]


@dataclass(frozen=True)
class LayerReport:
    """One layer of a run.

    layout: what the compiled call took. selected, visible: compressed positions, mean per query; None for a
    window layer. relative_error: Frobenius norm of compiled minus eager block output over that of eager, on
    the same input and state. same_selection: share of queries that select the same positions compiled and
    eager; None where the layer makes no selection. Times: medians, in milliseconds. compile_seconds: wall
    time of the first call where it compiled something, None where an earlier layer's graph served.
    from_cache: PyTorch's caches had the graph, so that no pass ran.
    """

    index: int
    kind: str
    role: str
    ratio: int
    layout: str
    layout_reason: str
    selected: float | None
    visible: float | None
    relative_error: float
    same_selection: float | None
    compiled_ms: float
    eager_ms: float
    compile_seconds: float | None
    from_cache: bool


@dataclass(frozen=True)
class Origin:
    """What made the model: files as given, None for the tiny config and for random attention weights."""

    config: str | None
    weights: str | None
    seed: int


@dataclass(frozen=True)
class RunReport:
    """One text through one model, block by block, compiled and eager.

    origin: what made the model; as str, the directory that all of it comes from. graphs: compiled in this run.
    caches: whether PyTorch's graph caches were on. bits_per_byte: mean next-byte loss of the compiled model, None
    for a single byte; uniform_bits: that of a uniform guess over the vocabulary.
    """

    text: str
    num_bytes: int
    text_truncated: bool
    origin: Origin | str
    environment: Environment
    dtype: str
    caches: bool
    kinds: int
    graphs: int
    compile_seconds: float
    layers: tuple[LayerReport, ...]
    passes: tuple[PassSummary, ...]
    bits_per_byte: float | None
    uniform_bits: float


@dataclass(frozen=True)
class KindReport:
    """What compiling the first block of one kind did.

    layers: all layers of the kind. dense_pairs, slots_pairs: the layout rule's cost figures, (query, key)
    pairs a query evaluates, the slots' weighted by the price of gathering. ops_before: named ops and
    FlexAttention calls in the graph before any pass.
    """

    name: str
    layers: tuple[int, ...]
    layout: str
    layout_reason: str
    dense_pairs: float
    slots_pairs: float
    ops_before: dict[str, int]
    passes: tuple[PassSummary, ...]
    graphs: int
    compile_seconds: float


@dataclass(frozen=True)
class ExplainReport:
    """`csa2 explain`: one report a kind of block, in the order of their first layers."""

    num_tokens: int
    environment: Environment
    kinds: tuple[KindReport, ...]


def read_text(path: Path, seq_len: int) -> Text:
    """The first `seq_len` bytes of a file (all it has, if fewer). Raises BadArgumentError."""
    if seq_len < 1:
        raise BadArgumentError("--seq-len", f"{seq_len} is not at least 1")
    if path.is_dir():
        raise BadArgumentError("--text", f"{path} is a directory; a file is needed")
    try:
        with path.open("rb") as file:
            data = file.read(seq_len + 1)
    except OSError as error:
        raise BadArgumentError("--text", f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise BadArgumentError("--text", f"{path} is empty; at least one byte is needed")
    return Text(path.name, data[:seq_len], len(data) > seq_len)


def read_end(path: Path, count: int) -> bytes:
    """The last `count` bytes of a file (all it has, if fewer). Raises BadArgumentError."""
    if count < 1:
        raise BadArgumentError("--context", f"{count} is not at least 1")
    read_text(path, 1)  # which refuses what cannot be read
    with path.open("rb") as file:
        if file.seekable():
            file.seek(-min(count, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read()[-count:]


def read_config(path: Path | None, seq_len: int, argument: str = "--seq-len") -> CSA2Config:
    """The config of a JSON file, `CSA2Config.tiny()` for None, checked to take that many bytes.

    argument: what asked for them. Raises BadArgumentError.
    """
    try:
        cfg = CSA2Config.tiny() if path is None else CSA2Config.from_json(path)
    except FileNotFoundError as error:
        raise BadArgumentError("--config", f"{path} does not exist") from error
    except ConfigError as error:
        raise BadArgumentError("--config", error) from error
    if cfg.vocab_size < BYTE_VALUES:
        raise BadArgumentError("--config", f"vocab_size is {cfg.vocab_size}; bytes need {BYTE_VALUES}")
    check_length(cfg, seq_len, argument)
    return cfg


def check_length(cfg: CSA2Config, seq_len: int, argument: str) -> None:
    """Raise BadArgumentError, naming `argument`, for a number of bytes that a model of `cfg` cannot take."""
    if not 1 <= seq_len <= cfg.max_position_embeddings:
        allowed = f"1 to max_position_embeddings = {cfg.max_position_embeddings}"
        raise BadArgumentError(argument, f"{seq_len} is not within {allowed} of the config")


def choose_passes(passes: str) -> tuple[str, ...]:
    """Pass names of "all", "none" or names with commas between. Raises BadArgumentError."""
    try:
        return resolve_passes(passes if passes in ("all", "none") else [p.strip() for p in passes.split(",")])
    except ValueError as error:
        raise BadArgumentError("--passes", str(error).removeprefix("passes ")) from error


def check_device(device: str) -> None:
    """Raise BadArgumentError for "cuda" where torch finds none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadArgumentError("--device", "cuda was asked for, and torch finds no CUDA device")


def make_model(cfg: CSA2Config, seed: int, device: str, weights: Path | None = None) -> CSA2ForCausalLM:
    """A float32 model with weights drawn from `seed`, the same on every device; attention from `weights`.

    Raises BadArgumentError.
    """
    if not 0 <= seed < _SEEDS:
        raise BadArgumentError("--seed", f"{seed} is not within 0 and 2^63 - 1")
    torch.manual_seed(seed)
    model = CSA2ForCausalLM(cfg, dtype=torch.float32).eval()
    if weights is not None:
        try:
            load_attention(model, weights)
        except CheckpointError as error:
            raise BadArgumentError("--weights", error) from error
    return model.to(device)


def compile_for_report(model: CSA2ForCausalLM, passes: Sequence[str], caches: bool = False) -> CompiledModel:
    """Compile block by block for one length; without caches, so that the passes run (see `graph_caches`)."""
    options = {} if caches else {"fx_graph_cache": False}
    return compile_model(model, passes=passes, regional=True, dynamic=False, options=options)


def graph_caches(caches: bool) -> AbstractContextManager[None]:
    """Where a graph comes from a cache the passes do not run and have nothing to report."""
    return nullcontext() if caches else without_autograd_cache()


def kind_name(attn: CSA2Attention) -> str:
    """A layer's kind in words, as "full, ratio 1, publishes candidates"."""
    parts = [attn.role.value]
    parts += [f"ratio {attn.ratio}"] if attn.ratio else []
    parts += ["publishes candidates"] if attn.publishes_candidates else []
    parts += ["selects within candidates"] if attn.selects_within_candidates else []
    return ", ".join(parts)


@torch.no_grad()
def report_run(
    compiled: CompiledModel,
    text: Text,
    origin: Origin | str,
    caches: bool = False,
    on_block: OnBlock | None = None,
) -> RunReport:
    """Run a text through a regionally compiled model and, block by block, through the eager one."""
    model = compiled.module
    assert isinstance(model, CSA2ForCausalLM)
    input_ids = torch.tensor([list(text.data)], device=model.head.weight.device)
    observer = _RunObserver(compiled, on_block)
    graphs = graphs_compiled()
    with graph_caches(caches):
        logits = model(input_ids, run_block=observer)
    return RunReport(
        text=text.name,
        num_bytes=len(text.data),
        text_truncated=text.truncated,
        origin=origin,
        environment=environment_of(input_ids.device),
        dtype=str(model.head.weight.dtype).removeprefix("torch."),
        caches=caches,
        kinds=len(observer.kinds),
        graphs=graphs_compiled() - graphs,
        compile_seconds=sum(layer.compile_seconds or 0.0 for layer in observer.layers),
        layers=tuple(observer.layers),
        passes=tuple(map(summarize, compiled.manager.totals())),
        bits_per_byte=bits_per_byte(logits, input_ids),
        uniform_bits=math.log2(logits.shape[-1]),
    )


@torch.no_grad()
def report_explain(compiled: CompiledModel, num_tokens: int, on_block: OnBlock | None = None) -> ExplainReport:
    """Compile the first block of each kind, on random bytes, and report what the passes did to it."""
    model = compiled.module
    assert isinstance(model, CSA2ForCausalLM)
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(BYTE_VALUES, (1, num_tokens), generator=generator).to(device)
    compiled.manager.passes = (NamedOpCensus(), *compiled.manager.passes)
    observer = _KindObserver(compiled, on_block)
    with graph_caches(False):
        model(input_ids, run_block=observer)
    return ExplainReport(num_tokens, environment_of(device), tuple(observer.kinds.values()))


def bits_per_byte(logits: Tensor, input_ids: Tensor) -> float | None:
    """Mean next-byte loss of logits [1, S, vocab] on input_ids [1, S], in bits; None when S is 1."""
    if input_ids.shape[1] < 2:
        return None
    return cross_entropy(logits[0, :-1].float(), input_ids[0, 1:]).item() / math.log(2)


def summarize(report: PassReport) -> PassSummary:
    """A pass's report as plain data, sorted by op."""
    declined = (Declined(op, reason, count) for (op, reason), count in sorted(report.declined.items()))
    return PassSummary(report.name, dict(sorted(report.fired.items())), tuple(declined))


def environment_of(device: torch.device) -> Environment:
    """Versions and the device's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Environment(torch.__version__, platform.python_version(), name, torch.get_num_threads())


class NamedOpCensus(CompilerPass):
    """Counts CSA2's ops and FlexAttention calls and changes nothing; put before the other passes."""

    name = "census"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                if node.target.namespace == "csa2":
                    report.fire(node.target.name())
            elif node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention:
                report.fire("flex_attention")
        return report


class _RunObserver:
    """A `run_block` that runs each block compiled and eagerly, and passes the compiled output on."""

    def __init__(self, compiled: CompiledModel, on_block: OnBlock | None) -> None:
        self.compiled, self.on_block = compiled, on_block
        self.kinds: set[tuple[object, ...]] = set()
        self.layers: list[LayerReport] = []

    def __call__(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        attn = block.attn
        if self.on_block is not None:
            self.on_block(attn.layer_idx, kind_name(attn), attn.kind not in self.kinds)
        self.kinds.add(attn.kind)
        graphs, hits = graphs_compiled(), graph_cache_hits()
        output, seconds = _timed(lambda: self.compiled.run_block(block, x, state, tokens), x.device)
        compiled_here, from_cache = graphs_compiled() > graphs, graph_cache_hits() > hits
        eager = block(x, state, tokens)
        layout = attn.compiled_layout(x.shape[1])
        selected, visible = _mean_positions(attn, output.state, tokens)
        self.layers.append(
            LayerReport(
                index=attn.layer_idx,
                kind=kind_name(attn),
                role=attn.role.value,
                ratio=attn.ratio,
                layout=layout.layout.value,
                layout_reason=layout.reason,
                selected=selected,
                visible=visible,
                relative_error=relative_error(output.hidden_states, eager.hidden_states),
                same_selection=_same_selection(attn, output.state, eager.state),
                compiled_ms=_median_ms(lambda: self.compiled.run_block(block, x, state, tokens), x.device),
                eager_ms=_median_ms(lambda: block(x, state, tokens), x.device),
                compile_seconds=seconds if compiled_here else None,
                from_cache=from_cache,
            )
        )
        return output


class _KindObserver:
    """A `run_block` that compiles the first block of each kind and runs the others eagerly."""

    def __init__(self, compiled: CompiledModel, on_block: OnBlock | None) -> None:
        self.compiled, self.on_block = compiled, on_block
        self.kinds: dict[tuple[object, ...], KindReport] = {}

    def __call__(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        kind = block.attn.kind
        if self.on_block is not None:
            self.on_block(block.attn.layer_idx, kind_name(block.attn), kind not in self.kinds)
        if kind in self.kinds:
            return block(x, state, tokens)
        seen, graphs = len(self.compiled.manager.reports), graphs_compiled()
        output, seconds = _timed(lambda: self.compiled.run_block(block, x, state, tokens), x.device)
        self.kinds[kind] = self._report(block.attn, x.shape[1], seen, graphs_compiled() - graphs, seconds)
        return output

    def _report(self, attn: CSA2Attention, num_tokens: int, seen: int, graphs: int, seconds: float) -> KindReport:
        manager, blocks = self.compiled.manager, self.compiled.module.layers
        assert isinstance(blocks, torch.nn.ModuleList)
        census, *passes = manager.totals(seen)
        layout = attn.compiled_layout(num_tokens)
        dense, slots = pairs_per_query(
            num_compressed=num_tokens // attn.ratio if attn.ratio else 0,
            topk=attn.cfg.index_topk if attn.ratio else 0,
            window=attn.cfg.sliding_window,
            device_type=attn.wq_a.weight.device.type,
        )
        return KindReport(
            name=kind_name(attn),
            layers=tuple(i for i, block in enumerate(blocks) if block.kind == attn.kind),
            layout=layout.layout.value,
            layout_reason=layout.reason,
            dense_pairs=dense,
            slots_pairs=slots,
            ops_before=dict(sorted(census.fired.items())),
            passes=tuple(map(summarize, passes)),
            graphs=graphs,
            compile_seconds=seconds,
        )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected, in float64."""
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def _mean_positions(attn: CSA2Attention, state: CSA2State, tokens: Tokens) -> tuple[float | None, float | None]:
    read = state.of_ratio(attn.ratio) if attn.ratio else None
    if read is None:
        return None, None
    start, stop = tokens.visible_range(attn.ratio)
    selected = (read.topk_indices >= 0).sum(-1).double().mean()
    return selected.item(), (stop - start).double().mean().item()


def _same_selection(attn: CSA2Attention, state: CSA2State, eager: CSA2State) -> float | None:
    if attn.role not in (LayerRole.FULL, LayerRole.REINDEX):
        return None
    got, expected = state.of_ratio(attn.ratio), eager.of_ratio(attn.ratio)
    assert got is not None
    assert expected is not None
    return (got.topk_indices == expected.topk_indices).all(-1).double().mean().item()


def _timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    _wait_for(device)
    start = time.perf_counter()
    result = call()
    _wait_for(device)
    return result, time.perf_counter() - start


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    return 1000 * statistics.median(_timed(call, device)[1] for _ in range(TIMED_RUNS))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
