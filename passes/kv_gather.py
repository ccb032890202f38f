"""The attention pass: gather, FlexAttention, sink and the rotations around them become one kernel.

before (the slots layout)::

    %q = call_function csa2.apply_rope(%projected, %rotations, False)
    %window = call_function csa2.gather_kv(%window_kv, %window_slots)
    %selected = call_function csa2.gather_kv(%compressed_kv, %topk)
    %keys = call_function aten.cat([%window, %selected], 2)
    %attended = call_function flex_attention(%q, %keys, %keys, %sink_score, %slot_mask, ...)
    %out = call_function csa2.apply_rope(%attended, %rotations, True)

after::

    %out = call_function aten.empty([1, 4096, 64, 512])
    call_function triton_kernel_wrapper_mutation(sparse_attention_kernel, %projected, %window_kv, ..., %out)

The released shapes on Hopper take the kernel of `hopper_attention` instead, which is one opaque op.

The kernel knows one score mod, the sink, and one mask, the filled slots. FlexAttention calls with any other mod
are left as they are, so that whoever changes the attention in Python gets what they wrote.
"""

import sys
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from csa2_compiled.passes.inductor import (
    shared_memory_per_block,
    use_triton_cache_of_inductor,
    why_no_gluon_for_hopper,
)
from csa2_compiled.passes.manager import CompilerPass, PassReport
from csa2_compiled.passes.rewrite import (
    FLOAT_DTYPES,
    all_arguments,
    example_of,
    is_call,
    replace_by_trace,
)

_NAME = "flex_attention"
HOPPER = "csa2::hopper_attention"
_MANY_TOKENS = 4096  # where their number is not known while compiling
_HOPPER_TOKENS = 64  # with fewer, splits of a token's slots fill the device better
aten, csa2 = torch.ops.aten, torch.ops.csa2


# Registered here and not beside the kernel: a graph from a cache calls it without any pass having run.
@torch.library.custom_op("csa2::hopper_attention", mutates_args=(), device_types="cuda")
def hopper_attention(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None,
    topk_indices: Tensor | None,
    rotations: Tensor | None,
    rotate_q: bool,
    rotate_output: bool,
) -> tuple[Tensor, Tensor]:
    """See `csa2_compiled.passes.kernels.hopper_attention.hopper_attention`."""
    from csa2_compiled.passes.kernels import hopper_attention as kernel

    use_triton_cache_of_inductor(q.device)
    sources = (window_kv, window_indices, compressed_kv, topk_indices)
    return kernel.hopper_attention(q, sink, *sources, rotations, rotate_q, rotate_output)


@hopper_attention.register_fake
def _(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None,
    topk_indices: Tensor | None,
    rotations: Tensor | None,
    rotate_q: bool,
    rotate_output: bool,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def kernels_outside_graphs() -> list[Any]:
    """The Triton kernels that ops launch where Inductor does not see them; none before one may have been launched."""
    module = sys.modules.get("csa2_compiled.passes.kernels.hopper_attention")
    return [] if module is None else [module.hopper_attention_kernel]


@dataclass
class _Match:
    """What the kernel needs of one FlexAttention call; last: the node whose value it makes.

    q: [B, S, H, D], or any view of that; heads, dim: H and D.
    """

    q: Any
    heads: int
    dim: int
    sink: Any
    sources: list[tuple[Any, Any]]  # (keys [B, N, D], indices int32 [B, S, slots])
    last: Any
    rotations: Any = None
    rotate_q: bool = False
    rotate_output: bool = False


class _NoMatchError(Exception):
    """Why a FlexAttention call is not the kernel's."""


class KVGather(CompilerPass):
    """Serves the slots layout on CUDA, up to 128 heads and 512 channels, in inference."""

    name = "kv_gather"

    def run(self, graph: fx.Graph) -> PassReport:
        report = PassReport(self.name)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention:
                try:
                    _check_device(node)
                    match = _match(graph, node)
                    _check_tiles(match)
                except _NoMatchError as error:
                    report.decline(_NAME, str(error))
                    continue
                reason = _why_not_hopper(match)
                if reason is None:
                    report.fire(HOPPER)
                else:
                    report.decline(HOPPER, reason)
                _rewrite(graph, match, on_hopper=reason is None)
                report.fire(_NAME)
                for _ in match.sources:
                    report.fire("csa2::gather_kv")
                for _ in range(match.rotate_q + match.rotate_output):
                    report.fire("csa2::apply_rope")
        return report


def _check_device(flex: Any) -> None:
    value = example_of(flex.args[0])
    if value.device.type != "cuda":
        raise _NoMatchError(f"the kernel is for CUDA, not {value.device.type}")
    if value.dtype not in FLOAT_DTYPES:
        raise _NoMatchError(f"the kernel does not take {value.dtype}")


def _match(graph: fx.Graph, flex: Any) -> _Match:
    q, keys, values, score_mod, block_mask, scale, _, score_buffers, mask_buffers = flex.args
    value = example_of(q)
    if _behind_views(keys) is not _behind_views(values):
        raise _NoMatchError("keys and values are not the same tensor")
    if scale != value.shape[-1] ** -0.5:
        raise _NoMatchError(f"the scale is {scale}, not 1 / sqrt(head_dim)")
    sources = _sources(_behind_views(keys))
    outputs = list(flex.users)
    if len(outputs) != 1 or not is_call(outputs[0], getitem) or outputs[0].args[1] != 0:
        raise _NoMatchError("more than the output is used")
    module = graph.owning_module
    if not _is_sink_score(getattr(module, score_mod.target).graph, score_buffers):
        raise _NoMatchError("the score mod is not that of the sink alone")
    mask_graph = getattr(module, block_mask[-1].target).graph
    if not _is_slot_mask(mask_graph, mask_buffers, [indices for _, indices in sources]):
        raise _NoMatchError("the mask mod is not that of the filled slots alone")
    heads, dim = value.shape[-2:]
    match = _Match(_behind_views(q), heads, dim, _behind_views(score_buffers[0]), sources, outputs[0])
    _take_rotations(match)
    return match


def _take_rotations(match: _Match) -> None:
    """Absorb RoPE of q and of the output where nothing else needs their results and both turn alike."""
    if is_call(match.q, csa2.apply_rope.default) and len(match.q.users) == 1:
        x, rotations, inverse = all_arguments(match.q)
        if not inverse:
            match.q, match.rotations, match.rotate_q = x, rotations, True
    output = match.last
    user: Any = next(iter(output.users), None)
    while len(output.users) == 1 and is_call(user, aten.reshape.default):
        output, user = user, next(iter(user.users), None)
    if len(output.users) == 1 and is_call(user, csa2.apply_rope.default):
        _, rotations, inverse = all_arguments(user)
        if inverse and rotations is (match.rotations or rotations):
            match.last, match.rotations, match.rotate_output = user, rotations, True


def _check_tiles(match: _Match) -> None:
    if match.heads > 128 or match.dim > 512:
        raise _NoMatchError(f"{match.heads} heads of {match.dim} channels; the kernel takes up to 128 of 512")
    if any(not isinstance(example_of(indices).shape[-1], int) for _, indices in match.sources):
        raise _NoMatchError("the number of slots is not known while compiling")
    try:
        _tiles(match)
    except ValueError as error:
        raise _NoMatchError(str(error)) from error


def _tiles(match: _Match) -> Any:
    from csa2_compiled.passes.kernels.sparse_attention import choose_tiles

    q, indices = example_of(match.q), [example_of(indices) for _, indices in match.sources]
    return choose_tiles(
        _num_tokens(match),
        match.heads,
        match.dim,
        q.element_size(),
        sum(i.shape[-1] for i in indices),
        shared_memory_per_block(q.device),
    )


def _num_tokens(match: _Match) -> int:
    indices = example_of(match.sources[0][1])
    tokens = indices.shape[0] * indices.shape[1]
    return tokens if isinstance(tokens, int) else _MANY_TOKENS


def _why_not_hopper(match: _Match) -> str | None:
    q = example_of(match.q)
    rotary = 0 if match.rotations is None else 2 * example_of(match.rotations).shape[2]
    if rotary not in (0, 16, 32, 64, 128, 256):
        return f"RoPE turns {rotary} channels; the kernel takes powers of two from 16 to 256"
    return why_not_hopper(q, match.heads, match.dim, _num_tokens(match))


def why_not_hopper(q: Tensor, heads: int, dim: int, tokens: int) -> str | None:
    """Why the Gluon kernel does not serve `tokens` queries of a dtype and device like q's; None when it does."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel does not take {q.dtype}"
    if dim != 512 or heads % 64 != 0:
        return f"{heads} heads of {dim} channels; the kernel takes multiples of 64, of 512"
    if tokens < _HOPPER_TOKENS:
        return f"fewer than {_HOPPER_TOKENS} tokens"
    return why_no_gluon_for_hopper(q.device)


def _rewrite(graph: fx.Graph, match: _Match, on_hopper: bool) -> None:
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention

    heads, dim, tiles = match.heads, match.dim, _tiles(match)
    rotate_q, rotate_output = match.rotate_q, match.rotate_output

    def body(
        q: Tensor,
        sink: Tensor,
        rotations: Tensor | None,
        window_kv: Tensor,
        window_indices: Tensor,
        compressed_kv: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        batch, tokens = window_indices.shape[:2]
        q = q.reshape(batch, tokens, heads, dim)
        sources = (window_kv, window_indices, compressed_kv, topk_indices)
        if on_hopper:
            out, _ = hopper_attention(q, sink, *sources, rotations, rotate_q, rotate_output)
        else:
            out = sparse_attention(
                q, sink, *sources, rotations, rotate_q=rotate_q, rotate_output=rotate_output, tiles=tiles
            )
        return out if rotate_output else out.flatten(0, 1).unsqueeze(1)  # FlexAttention's rows are tokens

    tensors = [tensor for source in match.sources for tensor in source]
    replace_by_trace(graph, match.last, body, (match.q, match.sink, match.rotations, *tensors))


def _sources(keys: Any) -> list[tuple[Any, Any]]:
    """(rows, slots) of each gather whose results, one after the other, are the keys."""
    parts = keys.args[0] if is_call(keys, aten.cat.default) else [keys]
    if is_call(keys, aten.cat.default) and keys.args[1:] != (2,):
        raise _NoMatchError("the keys are not gathered slots")
    sources = []
    for part in parts:
        gather = _behind_views(part)
        if not is_call(gather, csa2.gather_kv.default):
            raise _NoMatchError("the keys are not gathered slots: the layout is dense, or the gather has another user")
        rows, indices = gather.args
        sources.append((rows, _without_sink(indices)))
    if len(sources) > 2:
        raise _NoMatchError(f"the keys come from {len(sources)} sources; the kernel takes two")
    return sources


def _without_sink(indices: Any) -> Any:
    """The slots without the empty one in front of them that stands for the sink, where there is one."""
    parts = _flat(indices)
    return parts[1] if len(parts) == 2 and _is_empty_slot(parts[0]) else indices


def _flat(node: Any) -> list[Any]:
    """The parts of nested concatenations along the last dim."""
    if is_call(node, aten.cat.default) and node.args[1] in (-1, example_of(node).dim() - 1):
        return [leaf for part in node.args[0] for leaf in _flat(part)]
    return [node]


def _is_empty_slot(node: Any) -> bool:
    return is_call(node, aten.full.default) and node.args[1] == -1 and node.args[0][-1] == 1


def _behind_views(node: Any) -> Any:
    while is_call(node, csa2.own_buffer.default) or is_call(node, aten.reshape.default):
        node = node.args[0]
    return node


def _is_sink_score(graph: fx.Graph, buffers: Any) -> bool:
    """where(key == 0, sink[row], score)"""
    nodes: list[Any] = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(buffers) != 1 or len(inputs) != 6:
        return False
    score, _, _, row, key, sink = inputs
    chosen = _behind_casts(nodes[-1].args[0])
    if not is_call(chosen, aten.where.self):
        return False
    test, replacement, kept = chosen.args
    replacement = _behind_casts(replacement)
    return (
        is_call(test, aten.eq.Scalar)
        and tuple(test.args) == (key, 0)
        and is_call(replacement, aten.index.Tensor)
        and replacement.args[0] is sink
        and list(replacement.args[1]) == [row]
        and kept is score
    )


def _is_slot_mask(graph: fx.Graph, buffers: Any, slots: list[Any]) -> bool:
    """filled[batch row, key], where `filled` are the sink's slot and the non-negative ones of `slots`."""
    nodes: list[Any] = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    # Where lengths are symbolic they come along, unused.
    used = [(i, buffer) for i, buffer in zip(inputs[4:], buffers, strict=True) if i.users]
    if len(used) != 1:
        return False
    (row, _, _, key), (filled, mask) = inputs[:4], used[0]
    looked_up = nodes[-1].args[0]
    if not is_call(looked_up, aten.index.Tensor) or looked_up.args[0] is not filled:
        return False
    if list(looked_up.args[1]) != [row, key]:
        return False
    source = _behind_views(mask)
    if not is_call(source, aten.index_put.default):
        return False
    test, places = source.args[:2]
    if not is_call(test, aten.ge.Scalar) or test.args[1] != 0:
        return False
    if list(places[:2]) != [None, None] or not _is_zero(places[2]):
        return False
    empty, *rest = _flat(test.args[0])
    return _is_empty_slot(empty) and rest == [leaf for part in slots for leaf in _flat(part)]


def _is_zero(node: Any) -> bool:
    return is_call(node, aten.full.default) and node.args == ([1], 0)


def _behind_casts(node: Any) -> Any:
    casts = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
    while any(is_call(node, cast) for cast in casts):
        node = node.args[0]
    return node
