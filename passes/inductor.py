"""The private Dynamo and Inductor APIs that this project touches, in one place.

Written against torch 2.11 and 2.13 and tried on 2.14; another version is refused when something is
compiled, not when the package is imported, because eager use needs nothing of this.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

KNOWN_VERSIONS = ("2.11", "2.13", "2.14")

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


def trace_body(body: Callable[..., Tensor], inputs: list[Any]) -> fx.Graph:
    """Trace a named op's body on fake inputs (tensors and symbolic ints) down to what Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(body, decomposition_table=select_decomp_table())(*inputs).graph


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


def keep_kernel_launches() -> None:
    """Tell FX that a kernel launch, which returns nothing and writes its arguments, is not dead code."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    fx.node.has_side_effect(triton_kernel_wrapper_mutation)


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
