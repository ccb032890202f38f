"""compile_model: a model or layer behind torch.compile, with this project's passes installed."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.model import CSA2Block, CSA2ForCausalLM, RunBlock
from csa2_compiled.ops import BODIES
from csa2_compiled.passes import (
    Attend,
    CompilerPass,
    Gemv,
    IndexScores,
    InlineNamedOps,
    KVGather,
    PassManager,
    RopeQuant,
    SelectTopk,
)
from csa2_compiled.passes.inductor import (
    compile_with,
    fused_multiply_add,
    graph_cache_hits,
    graph_pass,
    graphs_compiled,
    keep_kernel_launches,
    register_own_buffer_lowering,
    require_known_torch,
    use_ptxas_of_torch,
)
from csa2_compiled.rope import apply_rope_real_body
from csa2_compiled.state import CSA2Output

# The passes in the order they run; inlining takes what the others left.
PASS_ORDER = ("select_topk", "index_scores", "kv_gather", "attend", "rope_quant", "gemv", "inline")
_NUMBERS = count()  # one a compiled model
_RECOMPILE_LIMIT = 64  # a model has up to about six kinds of block, each with a few shapes
# Inductor cannot fuse the complex product of the plain body; these have its bits on their device.
_DEVICE_BODIES: dict[tuple[torch._ops.OpOverload, str], Callable[..., Tensor]] = {
    (torch.ops.csa2.apply_rope.default, "cpu"): apply_rope_real_body,
    (torch.ops.csa2.apply_rope.default, "cuda"): partial(apply_rope_real_body, multiply_add=fused_multiply_add),
}


class CompiledModel(nn.Module):
    """A module that runs compiled; made by `compile_model`.

    module: the eager one, whose parameters it shares. manager: the passes and their reports.
    """

    def __init__(
        self,
        module: nn.Module,
        manager: PassManager,
        regional: bool,
        run_block: RunBlock | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.module, self.manager, self.regional = module, manager, regional
        self._run_inside = run_block
        self.compilations = 0  # graphs compiled by calls of this object
        self.cache_hits = 0  # those of them that a cache served
        self._kwargs = {"fullgraph": True, **kwargs}
        self._number = next(_NUMBERS)
        self._regions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._whole = None if regional else self._compile(self._region((type(module).__name__,)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; inputs are checked before the graph runs."""
        if self._whole is None:
            return self.module(*args, run_block=self.run_block, **kwargs)  # which checks
        assert isinstance(self.module, CSA2ForCausalLM | CSA2Attention)
        with self.module.begin(*args, **kwargs):
            if self._run_inside is None:
                return self._whole(self.module, *args, **kwargs)
            if isinstance(self.module, CSA2Attention):
                return self._whole(self._run_inside, self.module, *args, **kwargs)
            return self._whole(self.module, *args, run_block=self._run_inside, **kwargs)

    def run_block(self, block: CSA2Block | CSA2Attention, x: Tensor, *args: Any, **kwargs: Any) -> CSA2Output:
        """Run one block, or one attention layer, through the compiled region that serves all of its kind."""
        if isinstance(block, CSA2Attention):
            with block.begin(x, *args, **kwargs):
                state, tokens, cache = block.lay_out(x, *args, **kwargs)
                return self._run_region(block, x, state, cache=cache, tokens=tokens)
        return self._run_region(block, x, *args, **kwargs)

    def explain(self) -> str:
        """What each pass did to this model, and why it left the rest."""
        return self.manager.explain()

    def _run_region(self, block: CSA2Block | CSA2Attention, *args: Any, **kwargs: Any) -> CSA2Output:
        kind = (type(block).__name__, *block.kind)
        if kind not in self._regions:
            self._regions[kind] = self._compile(self._region(kind))
        if self._run_inside is not None:
            return self._regions[kind](self._run_inside, block, *args, **kwargs)
        return self._regions[kind](block, *args, **kwargs)

    def _region(self, kind: tuple[Any, ...]) -> Callable[..., Any]:
        # Dynamo keeps its cache, and what it has learnt about dynamic sizes, by code object: one a kind here,
        # so that neither kinds nor models learn from each other.
        name = "_".join(str(part) for part in (*kind, self._number))
        code = _run_region.__code__.replace(co_name=name)
        return FunctionType(code, globals(), name)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = graph_pass(self.manager, self.manager.uuid)
        compiled = compile_with(function, passes, _RECOMPILE_LIMIT, **self._kwargs)

        def counted(*args: Any, **kwargs: Any) -> Any:
            graphs, hits = graphs_compiled(), graph_cache_hits()
            try:
                return compiled(*args, **kwargs)
            finally:
                self.compilations += graphs_compiled() - graphs
                self.cache_hits += graph_cache_hits() - hits

        return counted


def compile_model(
    model: nn.Module,
    passes: str | Iterable[str] = "all",
    regional: bool = False,
    run_block: RunBlock | None = None,
    **kwargs: Any,
) -> CompiledModel:
    """Compile a CSA2ForCausalLM, or one CSA2Attention, with this project's passes.

    passes: "all", "none" (named ops stay single calls), one pass name or several. regional: compile each
    kind of block once and reuse it for all blocks of that kind, instead of one graph for the whole model.
    run_block: runs one block, or the layer, inside the graph in place of calling it, such as `checkpoint_block`.
    kwargs go to torch.compile (``fullgraph=True`` unless given). Compilation happens at the first call.
    Raises TypeError for another module, ValueError for an unknown pass, another backend or a module that has no
    blocks to compile regionally, and UnknownTorchVersionError on a torch whose internals are not known.
    """
    require_known_torch()
    if not isinstance(model, CSA2ForCausalLM | CSA2Attention):
        raise TypeError(f"model is a {type(model).__name__}; it must be a CSA2ForCausalLM or a CSA2Attention")
    if kwargs.get("backend", "inductor") != "inductor":
        raise ValueError(f"backend is {kwargs['backend']!r}; the passes are Inductor's, so it must be 'inductor'")
    if regional and not isinstance(model, CSA2ForCausalLM):
        raise ValueError(f"regional=True needs a CSA2ForCausalLM; model is a {type(model).__name__}")
    return CompiledModel(model, make_manager(passes), regional, run_block, **kwargs)


def compile_function(
    function: Callable[..., Any], passes: str | Iterable[str] = "all", **kwargs: Any
) -> tuple[Callable[..., Any], PassManager]:
    """Compile any function of this package's ops as `compile_model` does a layer; also returns its pass manager.

    kwargs go to torch.compile (``fullgraph=True`` unless given). Raises ValueError for an unknown pass and
    UnknownTorchVersionError on a torch whose internals are not known.
    """
    manager = make_manager(passes)
    graph = graph_pass(manager, manager.uuid)
    return compile_with(function, graph, _RECOMPILE_LIMIT, **{"fullgraph": True, **kwargs}), manager


def make_manager(passes: str | Iterable[str] = "all") -> PassManager:
    """The passes in their order, with Inductor prepared for what they leave in graphs. Raises as `compile_function`."""
    require_known_torch()
    register_own_buffer_lowering()
    keep_kernel_launches()
    use_ptxas_of_torch()
    return PassManager([_make_pass(name) for name in resolve_passes(passes)], _source_files())


def resolve_passes(passes: str | Iterable[str]) -> tuple[str, ...]:
    """The names of the passes to run, in the order they run. Raises ValueError for an unknown name."""
    if passes == "all":
        return PASS_ORDER
    if passes == "none":
        return ()
    names = (passes,) if isinstance(passes, str) else tuple(passes)
    unknown = [name for name in names if name not in PASS_ORDER]
    if unknown:
        allowed = ", ".join(("all", "none", *PASS_ORDER))
        raise ValueError(f"passes names {', '.join(map(repr, unknown))}; allowed are {allowed}")
    return tuple(name for name in PASS_ORDER if name in names)


def _make_pass(name: str) -> CompilerPass:
    passes: dict[str, Callable[[], CompilerPass]] = {
        "select_topk": SelectTopk,
        "index_scores": IndexScores,
        "kv_gather": KVGather,
        "attend": Attend,
        "rope_quant": RopeQuant,
        "gemv": Gemv,
        "inline": lambda: InlineNamedOps(BODIES, _DEVICE_BODIES),
    }
    return passes[name]()


def _source_files() -> list[Path]:
    package = Path(__file__).parent
    folders = (package, package / "masks", package / "passes", package / "passes" / "kernels")
    return [path for folder in folders for path in folder.glob("*.py")]


def _run_region(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
