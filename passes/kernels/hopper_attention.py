"""The attention core for Hopper, in Gluon with specialized warps: what `sparse_attention` computes, in less time.

An item is one query token and 64 heads. One program per multiprocessor walks over the items with three warpgroups: a
producer gathers rows by cp.async and runs ahead, into the next item too; two consumers multiply, each for half of the
output's channels. Slots come in tiles of 64: tile n lies in buffer n % 2 and belongs to consumer n % 2, which computes
its logits and weights and adds it from registers. The other consumer adds it from shared memory, between the two
halves of the product for its own next tile's logits, so that one's softmax runs under the other's products. The
maximum is that of all tiles so far. Each consumer sums the weights of its own tiles, the first one the sink's too; the
sums meet at the end of an item. Rows, masks, sink, rotations and rounding are as in `sparse_attention`.

A buffer has two halves of channels: "near" that of its owner, "far" the other. Barriers, by who arrives:

    near_full(t)      the producer's copies, and once more when the tile's indices are there
    far_full(t)       the producer's copies
    near_free(t)      consumer t, when it has added its tile
    far_free(t)       the other consumer, when it has added the tile (consumer t has its logits by then)
    weights_ready(t)  consumer t: the tile's weights and maximum are in shared memory
    total_ready(t)    consumer t, after its last tile of an item: its part of the denominator is in shared memory. The
                      other reads it before it frees the far half of that tile, so that nobody gets two phases ahead
    q_full            the producer's copies, and once more when the count of tiles, the angles and the turned channels
                      of q are there
    q_free            both consumers, after their last logits of an item

RoPE: the producer turns q's last channels in registers and stores them to shared memory, while it waits for room; with
them go the angles, in turn to one of two places, with which consumer 1 turns the output's last channels in registers.

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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from csa2_compiled.passes.kernels.sparse_attention import batch_stride, source_of, source_strides

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_HEADS = gl.constexpr(64)
_TILE = gl.constexpr(64)
_DIM = gl.constexpr(512)
_HALF = gl.constexpr(256)
_WARPGROUP = gl.constexpr(4)  # warps
_WARPGROUP_THREADS = gl.constexpr(128)

# Places in the barrier array; those with a buffer take + buffer.
_NEAR_FULL = gl.constexpr(0)
_FAR_FULL = gl.constexpr(2)
_NEAR_FREE = gl.constexpr(4)
_FAR_FREE = gl.constexpr(6)
_WEIGHTS_READY = gl.constexpr(8)
_Q_FULL = gl.constexpr(10)
_Q_FREE = gl.constexpr(11)
_TOTAL_READY = gl.constexpr(12)
_BARRIERS = gl.constexpr(14)
_TURNED = gl.constexpr(64)  # channels of q that the producer turns at once

_CONSUMER_REGISTERS = gl.constexpr(208)
_PRODUCER_REGISTERS = gl.constexpr(88)


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
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B, S, H, 512] in q's dtype, and the natural logarithm of the denominators, float32 [B, S, H].

    programs: how many share the items, one per multiprocessor unless given; the output is the same. Other arguments as
    in `csa2_compiled.passes.kernels.sparse_attention.sparse_attention`.
    """
    batch, tokens, heads, dim = q.shape
    compressed_kv, topk_indices, topk = source_of(compressed_kv, topk_indices)
    out = torch.empty(batch, tokens, heads, dim, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device)
    if not (rotate_q or rotate_output):
        rotations = None
    window = window_indices.shape[2]
    items = batch * tokens * (heads // _HEADS.value)
    programs = programs or torch.cuda.get_device_properties(q.device).multi_processor_count
    hopper_attention_kernel[(min(items, programs),)](
        q,
        sink,
        window_kv,
        window_indices,
        compressed_kv,
        topk_indices,
        rotations,
        out,
        logsumexp,
        items,
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
        num_warps=_WARPGROUP.value,
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
    items,
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
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv = gl.allocate_shared_memory(
        dtype, [1, 2 * _TILE, _DIM], gl.NVMMASharedLayout.get_default_for([2 * _TILE, _DIM], dtype)
    )
    q = gl.allocate_shared_memory(dtype, [1, _HEADS, _DIM], gl.NVMMASharedLayout.get_default_for([_HEADS, _DIM], dtype))
    weights = gl.allocate_shared_memory(
        dtype, [1, _HEADS, 2 * _TILE], gl.NVMMASharedLayout.get_default_for([_HEADS, 2 * _TILE], dtype)
    )
    slots = gl.allocate_shared_memory(gl.int32, [2 * _TILE], row_layout)
    stats = gl.allocate_shared_memory(gl.float32, [4 * _HEADS], row_layout)
    count = gl.allocate_shared_memory(gl.int32, [1], row_layout)
    angles = gl.allocate_shared_memory(gl.float32, [2, max(ROTARY_DIM, 1)], row_layout)
    barriers = gl.allocate_shared_memory(gl.int64, [_BARRIERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(barriers.index(_NEAR_FULL + buffer), count=_WARPGROUP_THREADS + 1)
        mbarrier.init(barriers.index(_FAR_FULL + buffer), count=_WARPGROUP_THREADS)
        mbarrier.init(barriers.index(_NEAR_FREE + buffer), count=1)
        mbarrier.init(barriers.index(_FAR_FREE + buffer), count=1)
        mbarrier.init(barriers.index(_WEIGHTS_READY + buffer), count=1)
        mbarrier.init(barriers.index(_TOTAL_READY + buffer), count=1)
    mbarrier.init(barriers.index(_Q_FULL), count=_WARPGROUP_THREADS + 1)
    mbarrier.init(barriers.index(_Q_FREE), count=2)
    fence_async_shared()
    gl.thread_barrier()

    rotation = (rotations_ptr, rotation_batch_stride, rotation_token_stride)
    problem = (items, tokens, num_heads)
    memory = (kv, q, weights, slots, stats, count, angles, barriers)
    results = (sink_ptr, out_ptr, logsumexp_ptr)
    queries = (q_ptr, q_batch_stride, q_token_stride, q_head_stride)
    window_source = (window_kv_ptr, window_indices_ptr, window, window_batch_stride, window_row_stride)
    window_index_strides = (window_index_batch_stride, window_index_token_stride)
    compressed_source = (compressed_kv_ptr, topk_indices_ptr, topk, compressed_batch_stride, compressed_row_stride)
    topk_strides = (topk_batch_stride, topk_token_stride)
    gl.warp_specialize(
        [
            (_consumer, (memory, problem, results, 0, SCALE, ROTARY_DIM, ROTATE_OUTPUT)),
            (_consumer, (memory, problem, results, 1, SCALE, ROTARY_DIM, ROTATE_OUTPUT)),
            (
                _producer,
                (
                    memory,
                    problem,
                    rotation,
                    queries,
                    window_source,
                    window_index_strides,
                    compressed_source,
                    topk_strides,
                    ROTARY_DIM,
                    ROTATE_Q,
                    HAS_COMPRESSED,
                    PADDED_WINDOW,
                    PADDED_TOPK,
                ),
            ),
        ],
        [_WARPGROUP, _WARPGROUP],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


@gluon.jit
def _place_of(item, problem):
    """The token's place in [B, S], its batch and token, and the first head of an item."""
    _, tokens, num_heads = problem
    head_blocks = num_heads // _HEADS
    place = item // head_blocks
    return place, (place // tokens).to(gl.int64), (place % tokens).to(gl.int64), item % head_blocks * _HEADS


# ---- producer ----


@gluon.jit
def _producer(
    memory,
    problem,
    rotation,
    queries,
    window_source,
    window_index_strides,
    compressed_source,
    topk_strides,
    ROTARY_DIM: gl.constexpr,
    ROTATE_Q: gl.constexpr,
    HAS_COMPRESSED: gl.constexpr,
    PADDED_WINDOW: gl.constexpr,
    PADDED_TOPK: gl.constexpr,
):
    kv, q, _, slots, _, count, angles, barriers = memory
    items, _, _ = problem
    rotations_ptr, rotation_batch_stride, rotation_token_stride = rotation
    q_ptr, q_batch_stride, q_token_stride, q_head_stride = queries
    # 16 rows a warp; a warp copies half a row, 512 bytes, at a time
    row_layout: gl.constexpr = gl.BlockedLayout([16, 8], [1, 32], [_WARPGROUP, 1], [1, 0])
    slot_layout: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPGROUP], [0])
    slot = gl.arange(0, _TILE, slot_layout)
    channel = gl.arange(0, _HALF, gl.SliceLayout(0, row_layout))

    first_uses, second_uses, q_uses = 0, 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, batch, token, first_head = _place_of(item, problem)
        window_kv_ptr, window_indices_ptr, window, window_batch_stride, window_row_stride = window_source
        window_index_batch_stride, window_index_token_stride = window_index_strides
        compressed_kv_ptr, topk_indices_ptr, topk, compressed_batch_stride, compressed_row_stride = compressed_source
        topk_batch_stride, topk_token_stride = topk_strides
        window_kv_ptr += batch * window_batch_stride
        window_indices_ptr += batch * window_index_batch_stride + token * window_index_token_stride
        if HAS_COMPRESSED:
            compressed_kv_ptr += batch * compressed_batch_stride
            topk_indices_ptr += batch * topk_batch_stride + token * topk_token_stride

        # The loads of the first indices and of all indices for their count are under way before the wait for room.
        index = gl.load(window_indices_ptr + slot, mask=slot < window, other=-1)
        q_rows = q_ptr + batch * q_batch_stride + token * q_token_stride + first_head.to(gl.int64) * q_head_stride
        if ROTARY_DIM > 0:
            rotation_row = rotations_ptr + batch * rotation_batch_stride + token * rotation_token_stride
            new_angles = gl.load(rotation_row + gl.arange(0, ROTARY_DIM, slot_layout))
        if ROTATE_Q:
            turned = _turned_queries(q_rows, q_head_stride, rotation_row, _zero(q_uses), 0, ROTARY_DIM)
        filled_window = _filled_slots(window_indices_ptr, window, PADDED_WINDOW, slot_layout)
        filled_topk = 0
        if HAS_COMPRESSED:
            filled_topk = _filled_slots(topk_indices_ptr, topk, PADDED_TOPK, slot_layout)
        window_tiles = gl.maximum((filled_window + _TILE - 1) // _TILE, 1)
        tiles = window_tiles + (filled_topk + _TILE - 1) // _TILE

        mbarrier.wait(barriers.index(_Q_FREE), (q_uses & 1) ^ 1)
        if ROTARY_DIM > 0:
            angles.index(q_uses & 1).store(new_angles)
        q_room = q.index(_zero(q_uses))
        head = gl.arange(0, _HEADS, gl.SliceLayout(1, row_layout)) + _zero(q_uses)
        q_row = head.to(gl.int64) * q_head_stride
        if ROTATE_Q:
            plain: gl.constexpr = _DIM - max(ROTARY_DIM, _TURNED)  # channels that are copied
            q_room.slice(plain, _TURNED, 1).store(turned)
            async_copy.async_copy_global_to_shared(
                q_room.slice(0, _HALF, 1), q_rows + q_row[:, None] + channel[None, :]
            )
            if plain - _HALF >= 128:
                _copy_queries(q_room, q_rows, q_head_stride, _zero(q_uses), _HALF, 128)
            if plain - _HALF == 192:
                _copy_queries(q_room, q_rows, q_head_stride, _zero(q_uses), _HALF + 128, 64)
            async_copy.mbarrier_arrive(barriers.index(_Q_FULL), increment_count=False)
            for chunk in gl.static_range(1, (_DIM - plain) // _TURNED):
                turned = _turned_queries(q_rows, q_head_stride, rotation_row, _zero(q_uses), chunk, ROTARY_DIM)
                q_room.slice(plain + chunk * _TURNED, _TURNED, 1).store(turned)
            fence_async_shared()
        else:
            for half in gl.static_range(2):
                q_pointers = q_rows + q_row[:, None] + (half * _HALF + channel)[None, :]
                async_copy.async_copy_global_to_shared(q_room.slice(half * _HALF, _HALF, 1), q_pointers)
            async_copy.mbarrier_arrive(barriers.index(_Q_FULL), increment_count=False)
        count.store(gl.full([1], 0, gl.int32, slot_layout) + tiles)
        gl.thread_barrier()
        mbarrier.arrive(barriers.index(_Q_FULL), count=1)
        q_uses += 1  # noqa: SIM113

        for pair in range(0, (tiles + 1) // 2):
            first = pair * 2
            second_index = _index_of(
                first + 1, slot, window_tiles, filled_window, filled_topk, window_indices_ptr, topk_indices_ptr,
                HAS_COMPRESSED,
            )  # fmt: skip
            in_window = first < window_tiles
            kv_ptr, row_stride = window_kv_ptr, window_row_stride
            if HAS_COMPRESSED:
                kv_ptr = gl.where(in_window, window_kv_ptr, compressed_kv_ptr)
                row_stride = gl.where(in_window, window_row_stride, compressed_row_stride)
            _gather_tile(kv, slots, barriers, kv_ptr, row_stride, index, first_uses, 0, row_layout)
            first_uses += 1
            index = _index_of(
                first + 2, slot, window_tiles, filled_window, filled_topk, window_indices_ptr, topk_indices_ptr,
                HAS_COMPRESSED,
            )  # fmt: skip
            if first + 1 < tiles:
                in_window = first + 1 < window_tiles
                kv_ptr, row_stride = window_kv_ptr, window_row_stride
                if HAS_COMPRESSED:
                    kv_ptr = gl.where(in_window, window_kv_ptr, compressed_kv_ptr)
                    row_stride = gl.where(in_window, window_row_stride, compressed_row_stride)
                _gather_tile(kv, slots, barriers, kv_ptr, row_stride, second_index, second_uses, 1, row_layout)
                second_uses += 1


@gluon.jit
def _copy_queries(q_room, q_rows, q_head_stride, zero, FIRST: gl.constexpr, CHANNELS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CHANNELS, CHANNELS // 8], [_WARPGROUP, 1], [1, 0])
    head = (gl.arange(0, _HEADS, gl.SliceLayout(1, layout)) + zero).to(gl.int64)
    channel = FIRST + gl.arange(0, CHANNELS, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        q_room.slice(FIRST, CHANNELS, 1), q_rows + (head * q_head_stride)[:, None] + channel[None, :]
    )


@gluon.jit
def _turned_queries(q_rows, q_head_stride, rotation_row, zero, chunk: gl.constexpr, ROTARY_DIM: gl.constexpr):
    """Channels of q, in chunks of _TURNED that end with the last one, with RoPE."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPGROUP, 1], [1, 0])
    head = (gl.arange(0, _HEADS, gl.SliceLayout(1, layout)) + zero).to(gl.int64)
    channel = gl.arange(0, _TURNED, gl.SliceLayout(0, layout))
    first: gl.constexpr = _DIM - max(ROTARY_DIM, _TURNED) + chunk * _TURNED
    queries = gl.load(q_rows + (head * q_head_stride)[:, None] + (first + channel)[None, :])
    angle = first + channel - (_DIM - ROTARY_DIM)
    if ROTARY_DIM >= _TURNED:
        turned = _turn(queries, gl.load(rotation_row + angle), False)
    else:
        turned = _turn(queries, gl.load(rotation_row + angle, mask=angle >= 0, other=0.0), False)
        turned = gl.where((angle >= 0)[None, :], turned, queries)
    return turned


@gluon.jit
def _index_of(
    tile, slot, window_tiles, filled_window, filled_topk, window_indices_ptr, topk_indices_ptr,
    HAS_COMPRESSED: gl.constexpr,
):  # fmt: skip
    """The 64 indices of a tile, -1 behind the filled ones; all -1 behind the last tile."""
    in_window = tile < window_tiles
    first_slot = gl.where(in_window, tile, tile - window_tiles) * _TILE
    left = gl.where(in_window, filled_window, filled_topk) - first_slot
    indices_ptr = window_indices_ptr
    if HAS_COMPRESSED:
        indices_ptr = gl.where(in_window, window_indices_ptr, topk_indices_ptr)
    return gl.load(indices_ptr + first_slot + slot, mask=slot < left, other=-1)


@gluon.jit
def _gather_tile(kv, slots, barriers, kv_ptr, row_stride, index, uses, T: gl.constexpr, row_layout: gl.constexpr):
    """Start to copy rows into a buffer, half by half as they become free; rows of index -1 become zeros."""
    tile = kv.index(_zero(uses)).slice(T * _TILE, _TILE)
    tile_slots = slots.slice(T * _TILE, _TILE)
    phase = (uses & 1) ^ 1
    near: gl.constexpr = T * _HALF

    mbarrier.wait(barriers.index(_NEAR_FREE + T), phase)
    tile_slots.store(index)
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(_NEAR_FULL + T), count=1)
    _gather_half(tile.slice(near, _HALF, 1), tile_slots, kv_ptr + near, row_stride, row_layout)
    async_copy.mbarrier_arrive(barriers.index(_NEAR_FULL + T), increment_count=False)

    mbarrier.wait(barriers.index(_FAR_FREE + T), phase)
    far: gl.constexpr = (1 - T) * _HALF
    _gather_half(tile.slice(far, _HALF, 1), tile_slots, kv_ptr + far, row_stride, row_layout)
    async_copy.mbarrier_arrive(barriers.index(_FAR_FULL + T), increment_count=False)


@gluon.jit
def _gather_half(half, tile_slots, kv_ptr, row_stride, row_layout: gl.constexpr):
    index = tile_slots.load(gl.SliceLayout(1, row_layout))
    channel = gl.arange(0, _HALF, gl.SliceLayout(0, row_layout))
    exists = (index >= 0)[:, None] & (channel >= 0)[None, :]
    rows = gl.maximum(index, 0).to(gl.int64) * row_stride
    async_copy.async_copy_global_to_shared(half, kv_ptr + rows[:, None] + channel[None, :], mask=exists)


@gluon.jit
def _zero(uses):
    """0, but not to the compiler: it would compute a hundred addresses before the loop, and spill them."""
    return uses >> 30


@gluon.jit
def _filled_slots(indices_ptr, slots, PADDED_SLOTS: gl.constexpr, layout: gl.constexpr):
    """How many of the slots there are up to the last filled one."""
    slot = gl.arange(0, PADDED_SLOTS, layout)
    index = gl.load(indices_ptr + slot, mask=slot < slots, other=-1)
    return gl.max(gl.where(index >= 0, slot + 1, 0), axis=0)


# ---- consumers ----


@gluon.jit
def _consumer(
    memory,
    problem,
    results,
    T: gl.constexpr,
    SCALE: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    ROTATE_OUTPUT: gl.constexpr,
):
    kv, q, weights, slots, stats, count, angles, barriers = memory
    items, _, num_heads = problem
    sink_ptr, out_ptr, logsumexp_ptr = results
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    store_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [_HEADS, _HALF],
    )
    head_layout: gl.constexpr = gl.SliceLayout(1, logit_layout)
    own_uses, other_uses, other_totals, q_uses = 0, 0, 0, 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        place, _batch, _token, first_head = _place_of(item, problem)
        head = first_head + gl.arange(0, _HEADS, head_layout)
        # In powers of two, and finite, also where a sink of -inf should leave no trace.
        top = gl.maximum(gl.load(sink_ptr + head) * _LOG2_E, -1e30)
        total = gl.full([_HEADS], 1.0 if T == 0 else 0.0, gl.float32, head_layout)
        other_total = gl.full([_HEADS], 0.0, gl.float32, head_layout)
        values = gl.zeros([_HEADS, _HALF], gl.float32, value_layout)
        mbarrier.wait(barriers.index(_Q_FULL), q_uses & 1)
        q_uses += 1  # noqa: SIM113
        tiles = _read_count(count)
        own_tiles = (tiles + 1 - T) // 2
        ends_with_own = (tiles - 1) % 2 == T
        first_own = 0
        if T == 0:  # nothing to add before the first tile
            values, top, total, other_total = _own_tile(
                kv, q, weights, slots, stats, barriers, values, top, total, other_total, own_uses, other_uses,
                other_totals, own_tiles == 1, False, T, False, SCALE,
            )  # fmt: skip
            own_uses += 1
            first_own = 1
        else:
            gl.thread_barrier()  # all warps have read the count
            mbarrier.arrive(barriers.index(_Q_FREE), count=1, pred=own_tiles == 0)
        for own in range(first_own, own_tiles):
            last = own == own_tiles - 1
            values, top, total, other_total = _own_tile(
                kv, q, weights, slots, stats, barriers, values, top, total, other_total, own_uses, other_uses,
                other_totals, last, last & ends_with_own, T, True, SCALE,
            )  # fmt: skip
            own_uses += 1
            other_uses += 1
        if (tiles - 1) % 2 != T:  # the last tile is the other's
            values, top, total = _rescale_for_other(stats, barriers, values, top, total, other_uses, T, logit_layout)
            other_far = kv.index(_zero(other_uses)).slice((1 - T) * _TILE, _TILE).slice(T * _HALF, _HALF, 1)
            other_weights = weights.index(_zero(other_uses)).slice((1 - T) * _TILE, _TILE, 1)
            values = warpgroup_mma(other_weights, other_far, values)
            other_total = _free_other(stats, barriers, other_totals, tiles > 0, T, logit_layout)
            other_uses += 1
        other_totals += 1 if T == 1 else gl.minimum(tiles - 1, 1)  # consumer 1 has no tile of a single one
        total += other_total

        rows = place.to(gl.int64) * num_heads
        if T == 0:
            gl.store(logsumexp_ptr + rows + head, (top + gl.log2(total)) * _LN_2)
        values = values * gl.convert_layout(1.0 / total, gl.SliceLayout(1, value_layout))[:, None]
        if ROTATE_OUTPUT and T == 1:
            turns = angles.index((q_uses + 1) & 1)  # of this item: q_uses is one ahead
            values = _turn_tail_back(values.to(out_ptr.dtype.element_ty), turns, ROTARY_DIM)
        _store_values(out_ptr + (rows + first_head) * _DIM + T * _HALF, values, store_layout)


@gluon.jit
def _own_tile(
    kv, q, weights, slots, stats, barriers, values, top, total, other_total, own_uses, other_uses, other_totals, last,
    last_cross, T: gl.constexpr, CROSS: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Logits of an own tile; between their halves add the other's tile before it (CROSS); weights; add the own tile."""
    logit_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    value_layout: gl.constexpr = values.type.layout
    dtype: gl.constexpr = kv.dtype
    near: gl.constexpr = T * _HALF
    far: gl.constexpr = (1 - T) * _HALF
    kv = kv.index(_zero(own_uses))
    q = q.index(_zero(own_uses))
    weights = weights.index(_zero(own_uses))
    tile = kv.slice(T * _TILE, _TILE)
    no_logits = gl.zeros([_HEADS, _TILE], gl.float32, logit_layout)

    mbarrier.wait(barriers.index(_NEAR_FULL + T), own_uses & 1)
    fence_async_shared()
    logits = warpgroup_mma(
        q.slice(near, _HALF, 1), tile.slice(near, _HALF, 1).permute((1, 0)), no_logits, use_acc=False, is_async=True
    )
    if CROSS:
        logits = warpgroup_mma_wait(0, deps=[logits])
        values, top, total = _rescale_for_other(stats, barriers, values, top, total, other_uses, T, logit_layout)
        other_far = kv.slice((1 - T) * _TILE, _TILE).slice(near, _HALF, 1)
        values = warpgroup_mma(weights.slice((1 - T) * _TILE, _TILE, 1), other_far, values)
        other_total = _free_other(stats, barriers, other_totals, last_cross, T, logit_layout)
    mbarrier.wait(barriers.index(_FAR_FULL + T), own_uses & 1)
    fence_async_shared()
    logits = warpgroup_mma(q.slice(far, _HALF, 1), tile.slice(far, _HALF, 1).permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[logits])

    index = slots.slice(T * _TILE, _TILE).load(gl.SliceLayout(0, logit_layout))
    logits = logits * (SCALE * _LOG2_E) + gl.where(index >= 0, 0.0, -float("inf"))[None, :]
    new_top = gl.maximum(top, gl.max(logits, axis=1))
    weight = gl.exp2(logits - new_top[:, None])
    rounded = weight.to(dtype)
    weights.slice(T * _TILE, _TILE, 1).store(rounded)
    stats.slice(2 * T * _HEADS, _HEADS).store(new_top)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(_WEIGHTS_READY + T), count=1)
    mbarrier.arrive(barriers.index(_Q_FREE), count=1, pred=last)
    kept = gl.exp2(top - new_top)
    values = values * gl.convert_layout(kept, gl.SliceLayout(1, value_layout))[:, None]
    operand = gl.convert_layout(rounded, gl.DotOperandLayout(0, value_layout, 2))
    pending = warpgroup_mma(operand, tile.slice(near, _HALF, 1), values, is_async=True)
    total = total * kept + gl.sum(weight, axis=1)
    stats.slice((2 * T + 1) * _HEADS, _HEADS).store(total)
    values, operand = warpgroup_mma_wait(0, deps=[pending, operand])  # the product reads the operand's registers
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(_NEAR_FREE + T), count=1)
    mbarrier.arrive(barriers.index(_TOTAL_READY + T), count=1, pred=last)
    return values, new_top, total, other_total * kept


@gluon.jit
def _rescale_for_other(stats, barriers, values, top, total, other_uses, T: gl.constexpr, logit_layout: gl.constexpr):
    """When the other's weights are there: values, maximum and own part of the denominator, ready for its tile."""
    layout: gl.constexpr = gl.SliceLayout(1, logit_layout)
    value_layout: gl.constexpr = values.type.layout
    mbarrier.wait(barriers.index(_WEIGHTS_READY + 1 - T), other_uses & 1)
    fence_async_shared()
    new_top = stats.slice(2 * (1 - T) * _HEADS, _HEADS).load(layout)
    kept = gl.exp2(top - new_top)
    values = values * gl.convert_layout(kept, gl.SliceLayout(1, value_layout))[:, None]
    return values, new_top, total * kept


@gluon.jit
def _free_other(stats, barriers, other_totals, last_cross, T: gl.constexpr, logit_layout: gl.constexpr):
    """The other's tile is added. If it was its last, its part of the denominator, at the current maximum; else 0."""
    mbarrier.wait(barriers.index(_TOTAL_READY + 1 - T), other_totals & 1, pred=last_cross)
    other_total = stats.slice((2 * (1 - T) + 1) * _HEADS, _HEADS).load(gl.SliceLayout(1, logit_layout))
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(_FAR_FREE + 1 - T), count=1)
    return gl.where(last_cross, other_total, 0.0)


@gluon.jit
def _read_count(count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(count.load(layout), axis=0)


@gluon.jit
def _store_values(out_rows, values, layout: gl.constexpr):
    """To global memory, 16 bytes a thread: four lanes exchange channels, so that they write 64 bytes of a row."""
    dtype: gl.constexpr = out_rows.dtype.element_ty
    values = gl.convert_layout(values.to(dtype), layout)
    head = gl.arange(0, _HEADS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    gl.store(out_rows + (head * _DIM)[:, None] + channel[None, :], values)


@gluon.jit
def _turn_tail_back(values, turns, ROTARY_DIM: gl.constexpr):
    """The last ROTARY_DIM channels turned back by angles from shared memory; all stay in their registers."""
    rows: gl.constexpr = values.shape[0]
    channels: gl.constexpr = values.shape[1]
    layout: gl.constexpr = values.type.layout
    if channels == ROTARY_DIM:
        result = _turn(values, turns.load(gl.SliceLayout(0, layout)), True)
    else:
        first, last = gl.split(gl.permute(gl.reshape(values, [rows, 2, channels // 2]), (0, 2, 1)))
        last = _turn_tail_back(last, turns, ROTARY_DIM)
        result = gl.reshape(gl.permute(gl.join(first, last), (0, 2, 1)), [rows, channels])
    return gl.convert_layout(result, layout, assert_trivial=True)


@gluon.jit
def _turn(values, angles, INVERSE: gl.constexpr):
    """RoPE of rows by the cosines and sines of one token, interleaved as the channels of a pair are."""
    rows: gl.constexpr = values.shape[0]
    channels: gl.constexpr = values.shape[1]
    real, imaginary = gl.split(gl.reshape(values.to(gl.float32), [rows, channels // 2, 2]))
    cosine, sine = gl.split(gl.reshape(angles, [channels // 2, 2]))
    pair_layout: gl.constexpr = gl.SliceLayout(0, real.type.layout)
    cosine = gl.convert_layout(cosine, pair_layout, assert_trivial=True)[None, :]
    sine = gl.convert_layout(sine, pair_layout, assert_trivial=True)[None, :]
    if INVERSE:
        sine = sine * -1.0
    turned_real = gl.fma(real, cosine, (imaginary * sine) * -1.0)
    turned_imaginary = gl.fma(real, sine, imaginary * cosine)
    turned = gl.reshape(gl.join(turned_real, turned_imaginary), [rows, channels])
    return gl.convert_layout(turned.to(values.dtype), values.type.layout, assert_trivial=True)
