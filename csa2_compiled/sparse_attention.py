"""The attention core: window, selected compressed positions and sink under one softmax, K = V.

Written with FlexAttention in two exact layouts, and once as plain matrix products, which gradients use
(see `csa2_compiled.masks.layout`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention, or_masks

from csa2_compiled import masks, ops
from csa2_compiled.attention_math import attend_plain
from csa2_compiled.kernel_options import forward_tiles
from csa2_compiled.masks.block_mask import slot_block_counts
from csa2_compiled.masks.layout import KEY_BLOCK, AttentionLayout, LayoutChoice
from csa2_compiled.passes.inductor import FLEX_CPU_NEEDS_OWN_VALUES, has_static_value, shared_memory_per_block
from csa2_compiled.rows import Rows, buffers, gather_rows, read_rows, write_rows
from csa2_compiled.tokens import Tokens

SLOT_KEY_BLOCK = 64  # a narrower block wastes less of the last one
_FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layout_for(
    q: Tensor,
    num_compressed: int,
    topk: int,
    window: int,
    requested: AttentionLayout,
    trains: bool = False,
    compiling: bool | None = None,
    device_type: str | None = None,
    cached: bool = False,
) -> LayoutChoice:
    """The layout that serves a call with q [B, S, H, D]; see `csa2_compiled.masks.choose_layout`.

    trains: whether any input of the core requires a gradient. compiling: None asks whether a compiler is
    looking now. device_type: None is q's. cached: whether the call has a cache.
    """
    return masks.choose_layout(
        requested,
        num_tokens=q.shape[1],
        num_compressed=num_compressed,
        topk=topk,
        window=window,
        device_type=q.device.type if device_type is None else device_type,
        needs_gradient=torch.is_grad_enabled() and trains,
        flex_takes_dtype=q.dtype in _FLEX_DTYPES,
        compiling=torch.compiler.is_compiling() if compiling is None else compiling,
        cached=cached,
    )


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    topk_indices: Tensor | None,
    sink: Tensor,
    window: int,
    topk: int,
    starts: Tensor | None,
    layout: AttentionLayout,
) -> Tensor:
    """Attend from every query to its window, its selection and the sink.

    q: [B, S, H, D]; window_kv: [B, S, D], keys and values at once; compressed_kv: [B, T, D] and
    topk_indices: int32 [B, S, K], -1 where absent, or None for a window layer; sink: float32 [H];
    topk: K at most; starts: see `Tokens`. Logits are q . k / sqrt(D). Returns [B, S, H, D] in q's dtype.
    """
    if compressed_kv is None or topk_indices is None:
        compressed_kv = topk_indices = None
    recent = masks.window_indices(q.shape[1], window, q.device, starts).expand(q.shape[0], -1, -1).contiguous()
    if layout is AttentionLayout.DENSE:
        keys = window_kv if compressed_kv is None else torch.cat([window_kv, compressed_kv], dim=1)
        return _attend_dense(q, keys, visible_keys(recent, topk_indices), topk_indices, sink, window, starts)
    if layout is AttentionLayout.PLAIN and _trains_on_cuda(q, window_kv, compressed_kv, sink):
        return ops.attend(q, sink, window_kv, recent, compressed_kv, topk_indices)[0]
    return _attend_slots_of(q, window_kv, recent, compressed_kv, topk_indices, sink, topk, layout)


def cached_sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    ring: Rows,
    compressed_kv: Rows | None,
    topk_indices: Tensor | None,
    sink: Tensor,
    window: int,
    topk: int,
    tokens: Tokens,
    layout: AttentionLayout,
) -> Tensor:
    """The same after the past of a cache, in the plain or the slots layout; puts the new window keys into its ring.

    window_kv: [B, S, D], this step's own; ring: the window rows of a `LayerCache`; compressed_kv: [B, T, D] or more
    rows; the others as in `sparse_attention`.
    """
    assert tokens.past is not None
    num_tokens, ring_rows = q.shape[1], buffers(ring)[0].shape[1]
    kept = tokens.ring_rows(ring_rows - 1)
    # A short step's keys overwrite none that its own queries see; then the ring alone has all of them.
    written = num_tokens <= ring_rows - window
    if written:
        write_rows(ring, kept, window_kv)
        keys = read_rows(ring)
    else:
        keys = torch.cat([read_rows(ring), window_kv], dim=1)
        write_rows(ring, kept, window_kv)
    recent = masks.cached_window_indices(tokens.past, num_tokens, window, ring_rows, tokens.starts, written)
    return _attend_slots_of(q, keys, recent, compressed_kv, topk_indices, sink, topk, layout)


def _attend_slots_of(
    q: Tensor,
    window_kv: Tensor,
    recent: Tensor,
    compressed_kv: Rows | None,
    topk_indices: Tensor | None,
    sink: Tensor,
    topk: int,
    layout: AttentionLayout,
) -> Tensor:
    """Gather the slots of both sources, and attend: recent int32 [B, S, W] are rows of window_kv [B, N, D]."""
    if topk_indices is not None and layout is AttentionLayout.SLOTS and not has_static_value(topk_indices.shape[-1]):
        # A symbolic number of slots would be the stride of a captured mask, which Inductor's CPU template
        # garbles when one symbol's name begins with another's (torch 2.13); padded, it is a constant.
        topk_indices = F.pad(topk_indices, (0, topk - topk_indices.shape[-1]), value=-1)
    # A slot of zeros before all others is the sink's key.
    slots = with_sink_slot(recent) if layout is AttentionLayout.SLOTS else recent
    gathered, visible = ops.gather_kv(window_kv, slots), recent
    if compressed_kv is not None and topk_indices is not None:
        gathered = torch.cat([gathered, gather_rows(compressed_kv, topk_indices)], dim=2)
        visible = torch.cat([recent, topk_indices], dim=-1)
    if layout is AttentionLayout.SLOTS:
        return _attend_slots(q, gathered, visible, sink)
    return attend_plain(q, gathered, visible, sink)[0]


def visible_keys(recent: Tensor, topk_indices: Tensor | None) -> Tensor:
    """Keys that every query sees, as indices into the tokens followed by the compressed positions.

    recent: int32 [B, S, W] from `masks.window_indices`; topk_indices: int32 [B, S, K] or None; both -1 where
    a slot is empty, and so is the result, int32 [B, S, W + K].
    """
    if topk_indices is None:
        return recent
    selected = torch.where(topk_indices >= 0, topk_indices + recent.shape[1], -1)
    return torch.cat([recent, selected], dim=-1)


def dense_block_mask(
    visible: Tensor, topk_indices: Tensor | None, num_compressed: int, window: int, starts: Tensor | None
) -> BlockMask:
    """The dense layout's BlockMask, mask mod included: keys are tokens, compressed positions and the sink.

    visible: int32 [B, S, slots], the keys that every query sees besides the sink, -1 where a slot is empty;
    the others as in `sparse_attention`. Nothing of queries x keys elements is made.
    """
    tokens = visible.shape[1]
    sink_key = tokens + num_compressed
    mask = masks.generate_window_mask(window, tokens)
    if starts is not None:
        mask = and_masks(mask, masks.generate_document_mask(masks.own_buffer(starts), tokens))
    if topk_indices is not None and num_compressed > 0:
        bits = masks.own_buffer(masks.pack_selection(topk_indices, num_compressed))
        mask = or_masks(mask, masks.generate_selection_mask(bits, tokens, num_compressed))
    mask = or_masks(mask, masks.generate_sink_mask(sink_key))
    seen = torch.cat([visible, torch.full_like(visible[..., :1], sink_key)], dim=-1)
    return masks.block_mask_from_counts(
        masks.block_pair_counts(seen, sink_key + 1, KEY_BLOCK, KEY_BLOCK),
        mask,
        num_queries=tokens,
        num_keys=sink_key + 1,
        query_block=KEY_BLOCK,
        key_block=KEY_BLOCK,
    )


def slot_block_mask(slots: Tensor, heads: int) -> BlockMask:
    """The slots layout's BlockMask, mask mod included: B * S rows, the heads as queries, the slots as keys.

    slots: int32 [B, S, slots], -1 where a slot is empty; slot 0 is the sink, which is always visible.
    """
    rows, num_slots = slots.shape[0] * slots.shape[1], slots.shape[2]
    filled = masks.own_buffer((slots >= 0).index_fill(-1, _first(slots), True).view(rows, num_slots))
    return masks.block_mask_from_counts(
        slot_block_counts(filled, SLOT_KEY_BLOCK),
        masks.generate_slot_mask(filled),
        num_queries=heads,
        num_keys=num_slots,
        query_block=-(-heads // KEY_BLOCK) * KEY_BLOCK,  # all heads in one block
        key_block=SLOT_KEY_BLOCK,
    )


def _attend_dense(
    q: Tensor,
    keys: Tensor,
    visible: Tensor,
    topk_indices: Tensor | None,
    sink: Tensor,
    window: int,
    starts: Tensor | None,
) -> Tensor:
    batch, _, _, dim = q.shape
    tokens, sink_key = q.shape[1], keys.shape[1]
    # The sink's key is zeros: as a value it must add nothing.
    all_keys = masks.own_buffer(torch.cat([keys, keys.new_zeros(batch, 1, dim)], dim=1).unsqueeze(1))
    attended = flex_attention(
        masks.own_buffer(q.transpose(1, 2)),
        all_keys,
        _as_values(all_keys),
        score_mod=masks.generate_sink_score(masks.own_buffer(sink), sink_key),
        block_mask=dense_block_mask(visible, topk_indices, sink_key - tokens, window, starts),
        scale=dim**-0.5,
        enable_gqa=True,
        kernel_options=_tiles(q, query_rows=KEY_BLOCK),
    )
    return attended.transpose(1, 2)


def _attend_slots(q: Tensor, gathered: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    batch, tokens, heads, dim = q.shape
    rows, num_slots = batch * tokens, gathered.shape[2]
    gathered = masks.own_buffer(gathered.view(rows, 1, num_slots, dim))
    attended = flex_attention(
        masks.own_buffer(q.reshape(rows, 1, heads, dim)),
        gathered,
        _as_values(gathered),
        score_mod=masks.generate_sink_score(masks.own_buffer(sink), 0, heads_are_rows=True),
        block_mask=slot_block_mask(with_sink_slot(visible), heads),
        scale=dim**-0.5,
        kernel_options=_tiles(q, query_rows=heads),
    )
    return attended.view(batch, tokens, heads, dim)


def _trains_on_cuda(q: Tensor, *others: Tensor | None) -> bool:
    """Whether one op serves the core and its gradients, so that a pass can put kernels in place of both."""
    trains = any(x is not None and x.requires_grad for x in (q, *others))
    return q.device.type == "cuda" and torch.is_grad_enabled() and trains


def _as_values(keys: Tensor) -> Tensor:
    # K = V, one buffer wherever FlexAttention takes one.
    return masks.own_buffer(keys, copy=1) if FLEX_CPU_NEEDS_OWN_VALUES and keys.device.type == "cpu" else keys


def with_sink_slot(visible: Tensor) -> Tensor:
    """Put the sink before the visible keys: as an empty slot (-1), so that its key is gathered as zeros."""
    return torch.cat([torch.full_like(visible[..., :1], -1), visible], dim=-1)


def _first(slots: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=slots.device)


def _tiles(q: Tensor, query_rows: int) -> Any:
    if q.device.type != "cuda":
        return None
    limit = shared_memory_per_block(q.device)
    return forward_tiles(q.shape[-1], q.element_size(), limit, query_rows).as_kernel_options()
