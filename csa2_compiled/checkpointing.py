"""Activation checkpointing that replays a layer's selection instead of computing it again.

Eager: ``model(ids, run_block=checkpoint_block)``. A block keeps its inputs and its selection; in the backward pass it
runs again, with the recorded selection, so that neither index keys nor scores nor candidate blocks are made twice.

Compiled, the same function is traced into the graph. There the partitioner decides what to recompute, within
`selective_contexts`: selections are saved, and what leads to them has no use in the backward graph.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.cache import CSA2Cache, LayerCache
from csa2_compiled.model import CSA2Block
from csa2_compiled.selection import SelectionRecord
from csa2_compiled.state import CSA2Output, CSA2State
from csa2_compiled.tokens import CSA2InputError

SELECTIONS = (torch.ops.csa2.select_topk.default, torch.ops.csa2.candidate_blocks.default)
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_block(
    block: CSA2Block | CSA2Attention,
    *args: Any,
    must_save: Iterable[torch._ops.OpOverload] = (),
    **kwargs: Any,
) -> CSA2Output:
    """Run a block of a CSA2ForCausalLM, or one CSA2Attention, and recompute it in the backward pass.

    args, kwargs: what the block is called with. must_save: ops whose results are kept besides the selection, for
    instance ``torch.ops.aten.mm.default`` (``partial(checkpoint_block, must_save=[...])`` as the model's run_block);
    they must return one tensor. With a cache, or without gradients, the block just runs. Gradients are those of the
    block itself, bit for bit when eager. Raises CSA2InputError for something else in must_save, and the backward pass
    RuntimeError for inputs that were modified in place.
    """
    must_save = _check_ops(must_save)
    if not torch.is_grad_enabled() or any(_is_cache(value) for value in (*args, *kwargs.values())):
        return block(*args, **kwargs)
    if torch.compiler.is_compiling():
        # A compiler needs the whole block as one function; ops that it must save it finds by their name.
        contexts = partial(selective_contexts, must_save) if must_save else selective_contexts
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    record, versions = SelectionRecord(), _versions(args, kwargs)

    def run(*args: Any, **kwargs: Any) -> CSA2Output:
        if _versions(args, kwargs) != versions:
            raise RuntimeError(
                "an input of a checkpointed block, or its state, was modified in place before its backward"
            )
        return block(*args, record=record, **kwargs)

    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
    if must_save:
        settings["context_fn"] = partial(_saving_contexts, must_save, record)
    return checkpoint(run, *args, **settings, **kwargs)


def selective_contexts(must_save: Iterable[torch._ops.OpOverload] = ()) -> Contexts:
    """A ``context_fn`` for torch.utils.checkpoint that saves selections, and must_save besides; for torch.compile.

    Eager checkpoints that use it would still compute index scores a second time; `checkpoint_block` does not.
    """
    return create_selective_checkpoint_contexts([*SELECTIONS, *must_save])


def _is_cache(value: Any) -> bool:
    return isinstance(value, CSA2Cache | LayerCache)


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often each tensor among a block's arguments was written in place, which nothing else notices here."""
    versions = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, CSA2State):
            read = [getattr(p, name) for p in value.publications for name in ("compressed_kv", "topk_indices")]
            versions += [tensor._version for tensor in read]
        elif isinstance(value, Tensor):
            versions.append(value._version)
    return versions


def _check_ops(must_save: Iterable[torch._ops.OpOverload]) -> tuple[torch._ops.OpOverload, ...]:
    ops = tuple(must_save)
    for op in ops:
        if not isinstance(op, torch._ops.OpOverload):
            raise CSA2InputError(
                f"must_save holds {op!r}, a {type(op).__name__}; it must hold OpOverloads, such as "
                "torch.ops.aten.mm.default"
            )
    return ops


def _saving_contexts(ops: tuple[torch._ops.OpOverload, ...], record: SelectionRecord) -> Contexts:
    saved: _Saved = defaultdict(list)
    return _Save(frozenset(ops), record, saved), _Replay(frozenset(ops), record, saved)


_Saved = dict[torch._ops.OpOverload, list[tuple[Tensor, int]]]


class _Save(TorchDispatchMode):
    """Keeps the results of some ops, in order; torch's own would count the ops that a replay leaves out."""

    def __init__(self, ops: frozenset[torch._ops.OpOverload], record: SelectionRecord, saved: _Saved) -> None:
        super().__init__()
        self.ops, self.record, self.saved = ops, record, saved

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.ops and not self.record.selecting:
            self.saved[func].append((result.detach(), result._version))
        return result


class _Replay(_Save):
    """Hands out what `_Save` kept."""

    def __enter__(self) -> "_Replay":
        self.next: dict[Any, int] = defaultdict(int)
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.ops:
            return func(*args, **(kwargs or {}))
        result, version = self.saved[func][self.next[func]]
        self.next[func] += 1
        if result._version != version:
            raise RuntimeError(f"a result of {func} that must be saved was modified in place")
        return result.detach()
