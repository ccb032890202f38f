"""The attention core for Hopper, in Gluon: what `sparse_attention` computes for the released shapes, in less time.

One program serves one query token and 64 heads. Slots come in pairs of tiles of 64, gathered by cp.async into one
buffer of 128 rows. The logits of a pair are one product in which each of the two warpgroups has a tile of its own; in
the Triton kernel both share a tile, and read q twice as often. The values of the first tile are added before those of
the second, so that the gather of the next pair's first tile runs under the second product. Rows, masks, sink,
rotations and rounding are as in `sparse_attention`, except that weights are rounded relative to the maximum so far of
128 slots instead of 64.

Inductor of the known versions cannot write a Gluon kernel into its code, so a launch is one opaque op,
`csa2::hopper_attention` (see `csa2_compiled.passes.kv_gather`).

Needs: compute capability 9.0; q and both sources of one dtype, bfloat16 or float16; 512 channels, the last 16 to 256 of
them turned, a power of two, or none; a multiple of 64 heads; otherwise what `sparse_attention` needs.
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, misc"

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from csa2_compiled.passes.kernels.sparse_attention import batch_stride, source_of, source_strides

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_HEADS = gl.constexpr(64)
_TILE = gl.constexpr(64)
_DIM = gl.constexpr(512)
_WARPS = gl.constexpr(8)


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
    """The output [B, S, H, 512] in q's dtype, and the natural logarithm of the denominators, float32 [B, S, H].

    Arguments as in `csa2_compiled.passes.kernels.sparse_attention.sparse_attention`.
    """
    batch, tokens, heads, dim = q.shape
    compressed_kv, topk_indices, topk = source_of(compressed_kv, topk_indices)
    out = torch.empty(batch, tokens, heads, dim, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device)
    if not (rotate_q or rotate_output):
        rotations = None
    window = window_indices.shape[2]
    hopper_attention_kernel[(batch * tokens * (heads // _HEADS.value),)](
        q,
        sink,
        window_kv,
        window_indices,
        compressed_kv,
        topk_indices,
        rotations,
        out,
        logsumexp,
        tokens,
        heads,
        window,
        topk,
        *q.stride()[:3],
        *source_strides(window_kv, window_indices),
        *source_strides(compressed_kv, topk_indices),
        *((0, 0) if rotations is None else (batch_stride(rotations), rotations.stride(1))),
        SCALE=dim**-0.5,
        ROTARY_DIM=0 if rotations is None else 2 * rotations.shape[2],
        ROTATE_Q=rotate_q,
        ROTATE_OUTPUT=rotate_output,
        HAS_COMPRESSED=topk > 0,
        PADDED_WINDOW=triton.next_power_of_2(window),
        PADDED_TOPK=triton.next_power_of_2(max(topk, 1)),
        num_warps=_WARPS.value,
    )
    return out, logsumexp


@gluon.jit
def hopper_attention_kernel(
    q_ptr,
    sink_ptr,
    window_kv_ptr,
    window_indices_ptr,
    compressed_kv_ptr,
    topk_indices_ptr,
    rotations_ptr,
    out_ptr,
    logsumexp_ptr,
    tokens,
    num_heads,
    window,
    topk,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    window_batch_stride,
    window_row_stride,
    window_index_batch_stride,
    window_index_token_stride,
    compressed_batch_stride,
    compressed_row_stride,
    topk_batch_stride,
    topk_token_stride,
    rotation_batch_stride,
    rotation_token_stride,
    SCALE: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    ROTATE_Q: gl.constexpr,
    ROTATE_OUTPUT: gl.constexpr,
    HAS_COMPRESSED: gl.constexpr,
    PADDED_WINDOW: gl.constexpr,
    PADDED_TOPK: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PAIR: gl.constexpr = 2 * _TILE
    # Logits: a tile of slots a warpgroup. Values: half of the channels a warpgroup.
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, _TILE, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HEADS, _DIM], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIR, _DIM], dtype)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HEADS, PAIR], dtype)

    head_blocks = num_heads // _HEADS
    place = gl.program_id(0) // head_blocks
    batch, token = (place // tokens).to(gl.int64), (place % tokens).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * _HEADS
    window_kv_ptr += batch * window_batch_stride
    window_indices_ptr += batch * window_index_batch_stride + token * window_index_token_stride
    if HAS_COMPRESSED:
        compressed_kv_ptr += batch * compressed_batch_stride
        topk_indices_ptr += batch * topk_batch_stride + token * topk_token_stride

    kv = gl.allocate_shared_memory(dtype, [PAIR, _DIM], kv_layout)
    first_tile, second_tile = kv.slice(0, _TILE), kv.slice(_TILE, _TILE)
    q = gl.allocate_shared_memory(dtype, [_HEADS, _DIM], q_layout)
    weights = gl.allocate_shared_memory(dtype, [_HEADS, PAIR], weight_layout)
    slot = gl.arange(0, _TILE, gl.SliceLayout(1, row_layout))
    channel = gl.arange(0, _DIM, gl.SliceLayout(0, row_layout))

    # The window's first pair of tiles is always visited, so that its gather need not wait for a count.
    index = gl.load(window_indices_ptr + slot, mask=slot < window, other=-1)
    _gather(first_tile, window_kv_ptr, window_row_stride, index, channel)
    index = gl.load(window_indices_ptr + _TILE + slot, mask=_TILE + slot < window, other=-1)
    _gather(second_tile, window_kv_ptr, window_row_stride, index, channel)

    head = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, row_layout))
    q_rows = q_ptr + batch * q_batch_stride + token * q_token_stride + head.to(gl.int64) * q_head_stride
    out_rows = out_ptr + (place.to(gl.int64) * num_heads + head) * _DIM
    q_pointers = q_rows[:, None] + channel[None, :]
    if ROTARY_DIM > 0:
        rotation_row = rotations_ptr + batch * rotation_batch_stride + token * rotation_token_stride
        q_tail = q_ptr + batch * q_batch_stride + token * q_token_stride + first_head.to(gl.int64) * q_head_stride
        out_tail = out_ptr + (place.to(gl.int64) * num_heads + first_head) * _DIM
    if ROTATE_Q:
        # Turned channels wait in the output's rows, which this program fills last.
        _rotate_tail(q_tail, q_head_stride, out_tail, rotation_row, ROTARY_DIM, False)
        out_pointers = out_rows[:, None] + channel[None, :]
        q_pointers = gl.where((channel < _DIM - ROTARY_DIM)[None, :], q_pointers, out_pointers)
    async_copy.async_copy_global_to_shared(q, q_pointers)
    async_copy.commit_group()

    filled_window = _filled_slots(window_indices_ptr, window, PADDED_WINDOW)
    window_pairs = gl.maximum((filled_window + PAIR - 1) // PAIR, 1)
    pairs, filled_topk = window_pairs, 0
    if HAS_COMPRESSED:
        filled_topk = _filled_slots(topk_indices_ptr, topk, PADDED_TOPK)
        pairs += (filled_topk + PAIR - 1) // PAIR

    slot_of_pair = gl.arange(0, PAIR, gl.SliceLayout(0, logit_layout))
    pair_index = gl.load(window_indices_ptr + slot_of_pair, mask=slot_of_pair < window, other=-1)
    head_of_row = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, logit_layout))
    # In powers of two, and finite, also where a sink of -inf should leave no trace.
    top = gl.maximum(gl.load(sink_ptr + head_of_row) * _LOG2_E, -1e30)
    total = gl.full([_HEADS], 1.0, gl.float32, gl.SliceLayout(1, logit_layout))
    values = gl.zeros([_HEADS, _DIM], gl.float32, value_layout)
    no_logits = gl.zeros([_HEADS, PAIR], gl.float32, logit_layout)
    for pair in range(0, pairs):
        following = pair + 1
        in_window = following < window_pairs
        first_slot = gl.where(in_window, following, following - window_pairs) * PAIR
        indices_ptr, kv_ptr, row_stride = window_indices_ptr, window_kv_ptr, window_row_stride
        filled = gl.where(in_window, filled_window, filled_topk)
        if HAS_COMPRESSED:
            indices_ptr = gl.where(in_window, window_indices_ptr, topk_indices_ptr)
            kv_ptr = gl.where(in_window, window_kv_ptr, compressed_kv_ptr)
            row_stride = gl.where(in_window, window_row_stride, compressed_row_stride)
        indices_ptr += first_slot
        left = gl.where(following < pairs, filled - first_slot, 0)
        first_index = gl.load(indices_ptr + slot, mask=slot < left, other=-1)
        second_index = gl.load(indices_ptr + _TILE + slot, mask=_TILE + slot < left, other=-1)

        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        logits = warpgroup_mma(q, kv.permute((1, 0)), no_logits, use_acc=False) * (SCALE * _LOG2_E)
        logits = gl.where((pair_index >= 0)[None, :], logits, -float("inf"))
        new_top = gl.maximum(top, gl.max(logits, axis=1))
        kept = gl.exp2(top - new_top)
        weight = gl.exp2(logits - new_top[:, None])
        total = total * kept + gl.sum(weight, axis=1)
        top = new_top
        pair_index = gl.load(indices_ptr + slot_of_pair, mask=slot_of_pair < left, other=-1)
        weights.store(weight.to(dtype))
        values = values * gl.convert_layout(kept, gl.SliceLayout(1, value_layout))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        pending = warpgroup_mma(weights.slice(0, _TILE, 1), first_tile, values, is_async=True)
        pending = warpgroup_mma(weights.slice(_TILE, _TILE, 1), second_tile, pending, is_async=True)
        values = warpgroup_mma_wait(1, deps=[pending])
        gl.thread_barrier()  # all warps are done with the first tile
        if following < pairs:
            _gather(first_tile, kv_ptr, row_stride, first_index, channel)
        values = warpgroup_mma_wait(0, deps=[values])
        gl.thread_barrier()
        if following < pairs:
            _gather(second_tile, kv_ptr, row_stride, second_index, channel)
        async_copy.commit_group()

    rows = place.to(gl.int64) * num_heads + head_of_row
    gl.store(logsumexp_ptr + rows, (top + gl.log2(total)) * _LN_2)
    values = values / gl.convert_layout(total, gl.SliceLayout(1, value_layout))[:, None]
    head = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, value_layout))
    channel = gl.arange(0, _DIM, gl.SliceLayout(0, value_layout))
    out_rows = out_ptr + (place.to(gl.int64) * num_heads + head) * _DIM
    gl.store(out_rows[:, None] + channel[None, :], values.to(dtype))
    if ROTATE_OUTPUT:
        _rotate_tail(out_tail, _DIM, out_tail, rotation_row, ROTARY_DIM, True)


@gluon.jit
def _gather(tile, kv_ptr, row_stride, index, channel):
    """Start to copy the rows of `index` [_TILE] into the tile; a row of index -1 becomes zeros."""
    rows = gl.maximum(index, 0).to(gl.int64) * row_stride
    exists = (index >= 0)[:, None] & (channel >= 0)[None, :]
    async_copy.async_copy_global_to_shared(tile, kv_ptr + rows[:, None] + channel[None, :], mask=exists)


@gluon.jit
def _filled_slots(indices_ptr, slots, PADDED_SLOTS: gl.constexpr):
    """How many of the slots there are up to the last filled one."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    slot = gl.arange(0, PADDED_SLOTS, layout)
    index = gl.load(indices_ptr + slot, mask=slot < slots, other=-1)
    return gl.max(gl.where(index >= 0, slot + 1, 0), axis=0)


@gluon.jit
def _rotate_tail(from_ptr, from_stride, to_ptr, rotation_row, ROTARY_DIM: gl.constexpr, INVERSE: gl.constexpr):
    """RoPE of the last channels of _HEADS rows, memory to memory, visible to all threads after; as `rotate_pairs`."""
    dtype: gl.constexpr = to_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [_WARPS, 1], [1, 0])
    gl.thread_barrier()  # the rows may have been written just now
    head = gl.arange(0, _HEADS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, ROTARY_DIM, gl.SliceLayout(0, layout))
    at = (_DIM - ROTARY_DIM) + channel[None, :]
    tail = gl.load(from_ptr + (head.to(gl.int64) * from_stride)[:, None] + at).to(gl.float32)
    angles = gl.load(rotation_row + channel[None, :] + (head * 0)[:, None])
    real, imaginary = gl.split(gl.reshape(tail, [_HEADS, ROTARY_DIM // 2, 2]))
    cosine, sine = gl.split(gl.reshape(angles, [_HEADS, ROTARY_DIM // 2, 2]))
    if INVERSE:
        sine = sine * -1.0
    turned_real = gl.fma(real, cosine, (imaginary * sine) * -1.0)
    turned_imaginary = gl.fma(real, sine, imaginary * cosine)
    turned = gl.reshape(gl.join(turned_real, turned_imaginary), [_HEADS, ROTARY_DIM])
    turned = gl.convert_layout(turned, layout)
    gl.store(to_ptr + (head * _DIM)[:, None] + at, turned.to(dtype))
    gl.thread_barrier()
