"""The private Dynamo and Inductor APIs that this project touches, in one place.

Written against torch 2.11 and 2.13 and tried on 2.14; another version is refused when something is
compiled, not when the package is imported, because eager use needs nothing of this.
"""

import ast
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

KNOWN_VERSIONS = ("2.11", "2.13", "2.14")
GLUON_TRITON_VERSIONS = ("3.6",)  # Gluon is experimental, and changes

# FlexAttention on CPU refuses K and V in one buffer there.
FLEX_CPU_NEEDS_OWN_VALUES = torch.__version__.startswith("2.11.")


class UnknownTorchVersionError(RuntimeError):
    """This torch is not one whose Inductor internals the passes were written against."""


def require_known_torch() -> None:
    """Raise UnknownTorchVersionError unless the installed torch is a known one."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in KNOWN_VERSIONS:
        raise UnknownTorchVersionError(
            f"torch {torch.__version__} is not among the versions that csa2_compiled's passes know "
            f"({', '.join(KNOWN_VERSIONS)}); eager use works, compile_model does not"
        )


def graph_pass(run: Callable[[fx.Graph], None], uuid: str) -> Any:
    """Wrap a function as a graph pass that Inductor can put in its cache key (`uuid`)."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> str:
            return uuid

    return GraphPass()


def trace_body(body: Callable[..., Any], inputs: list[Any]) -> fx.Graph:
    """Trace a named op's body on fake inputs (tensors and symbolic ints) down to what Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(body, decomposition_table=select_decomp_table())(*inputs).graph


def has_static_value(size: Any) -> bool:
    """Whether a size is a number, or a symbol of which only one number is possible."""
    from torch.fx.experimental.symbolic_shapes import has_static_value as is_static

    return is_static(size)


def argument_names_and_defaults(op: Any) -> list[tuple[str, Any]]:
    """The arguments of an op overload, in the order of its schema."""
    return [(argument.name, argument.default_value) for argument in op._schema.arguments]


def is_erased(node: fx.Node) -> bool:
    """Whether a node has left its graph."""
    return node._erased


def fake_mode_of(value: Tensor) -> Any:
    """The fake tensor mode that a graph's example value belongs to."""
    return value.fake_mode  # type: ignore[attr-defined]


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once, in a graph that Inductor compiles (float32)."""
    from torch._inductor.inductor_prims import fma

    return fma(*torch.broadcast_tensors(a, b, c))


@torch.compiler.assume_constant_result
def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory one block may use on a CUDA device."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def why_no_gluon_for_hopper(device: torch.device) -> str | None:
    """Why a Gluon kernel written for compute capability 9.0 cannot serve a CUDA device; None when it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the device has compute capability {capability[0]}.{capability[1]}, not 9.0"
    import triton  # type: ignore[import-not-found]

    release = ".".join(triton.__version__.split(".")[:2])
    if release not in GLUON_TRITON_VERSIONS:
        return f"Triton is {triton.__version__}; the kernel is known to run with {', '.join(GLUON_TRITON_VERSIONS)}"
    return None


def keep_kernel_launches() -> None:
    """Tell FX that a kernel launch, which returns nothing and writes its arguments, is not dead code."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    fx.node.has_side_effect(triton_kernel_wrapper_mutation)


def use_ptxas_of_torch() -> None:
    """Have Triton call the ptxas that comes with torch, as Inductor does once it compiles a kernel in this process.

    The version is part of the keys of Triton's cache, and asked once a process. Without this, a process that takes all
    its graphs from a cache looks for kernels of our own under other keys than the process that compiled the graphs.
    A path in TRITON_PTXAS_PATH stays.
    """
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()


def use_triton_cache_of_inductor(device: torch.device) -> None:
    """Have Triton keep kernels where Inductor keeps those of this CUDA device, unless TRITON_CACHE_DIR is set.

    Inductor sets it so once it compiles a kernel in this process, which it does not where all graphs come from a cache.
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(device.index)


def register_own_buffer_lowering() -> None:
    """Lower `csa2::own_buffer` to a realized buffer, so that its producer still fuses into the write."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import clone, lowerings, register_lowering

    target = torch.ops.csa2.own_buffer.default
    if target in lowerings:
        return

    @register_lowering(target, type_promotion_kind=None)
    def own_buffer(x: Any, copy: int = 0) -> Any:
        # A layout that stays flexible may still become its producer's, after the template has read it.
        return ExternKernel.require_contiguous(clone(x))


def compile_with(
    function: Callable[..., Any], manager_pass: Any, recompile_limit: int, **kwargs: Any
) -> Callable[..., Any]:
    """``torch.compile(function, **kwargs)`` with the manager's pass installed and a limit of its own.

    `mode` and `options` of kwargs are both honoured: a mode is expanded into its options first.
    """
    options = dict(kwargs.pop("options", None) or {})
    mode = kwargs.pop("mode", None)
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options

        options = {**list_mode_options(mode, kwargs.get("dynamic")), **options}
    if "post_grad_custom_pre_pass" in options:
        raise ValueError("options has post_grad_custom_pre_pass, which holds this project's pass manager; leave it out")
    options["post_grad_custom_pre_pass"] = manager_pass
    # Round to bfloat16 wherever the eager code does: quantization comes next, and would land elsewhere.
    options.setdefault("emulate_precision_casts", True)
    # Kernels that passes put in are given strides as numbers, so buffers may not grow others.
    options.setdefault("comprehensive_padding", False)
    compiled = torch.compile(function, options=options, **kwargs)

    def call(*args: Any, **call_kwargs: Any) -> Any:
        # torch.compile(recompile_limit=...) exists from 2.13 on; the config patch serves every version.
        with torch._dynamo.config.patch(recompile_limit=recompile_limit):
            return compiled(*args, **call_kwargs)

    return call


def graphs_compiled() -> int:
    """How many graphs Dynamo has handed to a backend in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def graph_cache_hits() -> int:
    """How many compiled graphs came from Inductor's cache, by way of AOTAutograd's or not, in this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"]


def without_autograd_cache() -> AbstractContextManager[None]:
    """Within it, AOTAutograd takes no graph from its cache and stores none (Inductor's is an option)."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(enable_autograd_cache=False)


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call, or None when it finds none that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None


# Phases of a compilation. An event of torch's compile log that has no phase counts for the one around it.
PHASES = ("dynamo", "aot_autograd", "passes", "inductor", "kernels", "autotuning")
_PHASE_OF_EVENT = {
    "dynamo": "dynamo",
    "backend_compile": "aot_autograd",
    "_recursive_pre_grad_passes": "inductor",
    "_recursive_joint_graph_passes": "inductor",
    "inductor_compile": "inductor",
    "AOTAutogradCache.inductor_load": "inductor",
    "pass.post_grad_passes.post_grad_custom_pre_pass": "passes",
    "compile_file": "kernels",
    "async_compile.wait": "kernels",
    "async_compile.precompile": "kernels",
    "reload_kernel_in_parent": "kernels",
    "CachingAutotuner.slow_precompile_config": "kernels",
    "StaticAutotunerFuture.warm_precompile": "kernels",
    "CachingAutotuner.benchmark_all_configs": "autotuning",
    "CachingAutotuner.coordinate_descent_tuning": "autotuning",
    "CachingAutotuner.combo_sequential_autotune": "autotuning",
    "benchmark_fused_nodes": "autotuning",
    "benchmark_codegened_module": "autotuning",
}
_PHASE_OF_EVENT_ENDING = {"_template_precompiling": "kernels", "_template_autotuning": "autotuning"}


@contextmanager
def compile_phases() -> Iterator[dict[str, float]]:
    """While entered, adds up this thread's seconds in each of PHASES, in the dict that it yields.

    A second counts once, for the innermost phase; waiting for compilers in other threads or processes is "kernels".
    """
    from torch._dynamo.utils import ChromiumEventLogger

    require_known_torch()
    seconds = dict.fromkeys(PHASES, 0.0)
    entered: list[str | None] = []
    thread, since = threading.get_ident(), 0.0
    log_start, log_end = ChromiumEventLogger.log_event_start, ChromiumEventLogger.log_event_end

    def charge() -> None:
        nonlocal since
        now = time.perf_counter()
        if entered and entered[-1] is not None:
            seconds[entered[-1]] += now - since
        since = now

    def start(logger: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            charge()
            entered.append(_phase_of(name) or (entered[-1] if entered else None))
        log_start(logger, name, *args, **kwargs)

    def end(logger: Any, name: str, *args: Any, **kwargs: Any) -> None:
        log_end(logger, name, *args, **kwargs)
        if threading.get_ident() == thread and entered:
            charge()
            entered.pop()

    with _replaced(ChromiumEventLogger, log_event_start=start, log_event_end=end):
        yield seconds


@contextmanager
def _replaced(owner: type, **methods: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(owner, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


def _phase_of(event: str) -> str | None:
    endings = (phase for ending, phase in _PHASE_OF_EVENT_ENDING.items() if event.endswith(ending))
    return _PHASE_OF_EVENT.get(event) or next(endings, None)


@dataclass(frozen=True)
class CompileCounts:
    """What this process has compiled since `keep_compile_counts`.

    graph_breaks: by reason. guards: of all graphs together. recompilations: the reason of each. kernels_generated: as
    Inductor counts them, also those of graphs from a cache.
    """

    graphs: int
    cache_hits: int
    graph_breaks: dict[str, int]
    guards: int
    recompilations: tuple[str, ...]
    kernels_generated: int


def keep_compile_counts(limit: int = 4096) -> None:
    """Keep the records of that many compilations of this process, where torch keeps the newest 64."""
    from torch._dynamo.utils import set_compilation_metrics_limit

    require_known_torch()
    set_compilation_metrics_limit(limit)


def compile_counts() -> CompileCounts:
    """Read torch's counters. `keep_compile_counts` must have come before the first compilation."""
    from torch._dynamo.utils import counters, get_compilation_metrics
    from torch._inductor import metrics

    records = get_compilation_metrics()
    return CompileCounts(
        graphs=graphs_compiled(),
        cache_hits=graph_cache_hits(),
        graph_breaks=dict(counters["graph_break"]),
        guards=sum(record.guard_count or 0 for record in records),
        # The guard that failed, without where it comes from.
        recompilations=tuple(
            record.recompile_reason.split("\n")[0].split("  # ")[0].strip()
            for record in records
            if record.recompile_reason
        ),
        kernels_generated=metrics.generated_kernel_count,
    )


@contextmanager
def kernel_launches() -> Iterator[Counter[str]]:
    """While entered, counts what compiled graphs launch: "generated" kernels and "library" calls, as in their code."""
    from torch._inductor.output_code import CompiledFxGraph

    require_known_torch()
    launches: Counter[str] = Counter()
    run = CompiledFxGraph.__call__

    def counted(graph: Any, inputs: Any) -> Any:
        launches.update(launches_in(graph.source_code))
        return run(graph, inputs)

    with _replaced(CompiledFxGraph, __call__=counted):
        yield launches


@lru_cache
def launches_in(source_code: str) -> Counter[str]:
    """How often a graph's wrapper, as Inductor writes it, calls "generated" kernels and "library" functions."""
    tree = ast.parse(source_code)
    kernels = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile.")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return Counter(
        generated=sum(call.removesuffix(".run") in kernels for call in calls),
        library=sum(call.startswith(("extern_kernels.", "torch.ops.", "aten.")) for call in calls),
    )


def cache_folder() -> Path:
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())


def cpp_libraries() -> list[Path]:
    """Libraries of the C++ kernels that this process knows, and of the compiler's tries of instruction sets.

    All below `cache_folder`. PyTorch's portable artifacts do not hold them.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache, get_path

    kernels = [Path(get_path(key, "main.so")[2]) for key in CppPythonBindingsCodeCache.cache]
    tries = [path for path in cache_folder().glob("??/*.so") if _tries_instructions(path.with_suffix(".cpp"))]
    loaded = [path.with_name(path.name + ".load_ok") for path in tries]  # torch 2.14 notes there that one loads
    return [path for path in (*kernels, *tries, *loaded) if path.is_file()]


def use_cpp_libraries(libraries: Iterable[Path]) -> None:
    """Have Inductor load these C++ kernels, files of `cache_folder`, where a graph asks for kernels of their names.

    It precompiles its C++ header, which takes seconds, for every kernel that this process does not know yet, before it
    looks whether there is a library. Nothing is loaded here, and other kernels are compiled as ever.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    for library in libraries:
        key = library.name.removesuffix(".main.so")
        load = lru_cache(partial(CppPythonBindingsCodeCache._load_library, str(library), key))
        CppPythonBindingsCodeCache.cache.setdefault(key, load)


def _tries_instructions(source: Path) -> bool:
    return source.is_file() and "_chk_kernel" in source.read_text(encoding="utf-8", errors="replace")


def cpp_command() -> str:
    """The command that compiles a C++ kernel, less its instruction set; the names of libraries depend on it."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(include_pytorch=False, shared=True, device_type="cpu")
    return " ".join(CppBuilder(name="o", sources="i", BuildOption=options).get_command_line().split())


def triton_files(kernel: Any) -> list[Path]:
    """What Triton's cache holds for a kernel that this process launched without Inductor.

    Binaries and metadata of the kernel's variants, their launchers, and the library by which Triton calls CUDA; a
    folder's name is a key of the cache.
    """
    variants = [variant for compiled, *_ in kernel.device_caches.values() for variant in compiled.values()]
    groups = [
        [Path(path) for name, path in variant.metadata_group.items() if name.endswith((".json", ".cubin"))]
        for variant in variants
    ]
    called = [variant.run.launch for variant in variants if variant.module is not None]
    if called:
        from triton.runtime import driver  # type: ignore[import-not-found]

        called.append(driver.active.utils.load_binary)
    groups += [[Path(function.__self__.__file__)] for function in called]
    whole = [group for group in groups if all(path.is_file() for path in group)]
    return list(dict.fromkeys(path for group in whole for path in group))


def put_triton_files(files: Mapping[str, bytes]) -> None:
    """Write files, by their folder and name, to Triton's cache, where a kernel's next compilation finds them.

    A folder's list of its files, without which Triton takes none, holds absolute paths, and so is written anew.
    """
    from triton.runtime.cache import FileCacheManager  # type: ignore[import-not-found]

    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for name, content in files.items():
        folder, _, file = name.partition("/")
        groups[folder][file] = FileCacheManager(folder).put(content, file)
    for folder, group in groups.items():
        for metadata in (file for file in group if file.endswith(".json")):
            FileCacheManager(folder).put_group(metadata, group)
