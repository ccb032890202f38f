"""The attention core with the gather inside: window, selected compressed positions and sink, K = V.

One program serves one query token and a block of its heads, which are the rows of both dots. Slots come in
tiles, the window's and then the selected ones; the rows of a tile are gathered once and serve as keys and as
values. RoPE of q at its load and the inverse RoPE of the output at its store are optional; q is rounded to its
dtype after RoPE, the output before and after, as separate ops would round, and with the same bits.

The softmax runs online in float32, tile by tile; the sink is its initial state (maximum = sink, sum = 1,
values = 0). Probabilities are rounded to the value dtype for the second dot, relative to the running maximum;
the sum takes them unrounded. Both dots accumulate in float32; float32 inputs are multiplied in full float32.
A slot of index -1 is not read and weighs nothing. Tiles behind a source's last filled slot are not visited, so
both sources should put their filled slots first. (Empty tiles in between are visited: a branch around the
gather would keep the compiler from prefetching it.)

With `splits` above 1 (decode, where tokens are too few to fill the device) a token's tiles are divided among
that many programs; each leaves its maximum, sum and float32 values in a workspace, and a second kernel merges
them in ascending order. Every split starts at the sink, the first one alone counts it.

Needs: one dtype (float32, bfloat16, float16) for q and both sources, channels adjacent in memory, D even;
indices int32, adjacent in memory; sink float32; rotations float32 [B or 1, S, R/2, 2]. Any W and K. D is padded
to a power of two in registers, so other D waste work.
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.tile_math import dot_float32, rotate_pairs, round_to

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FILLING_PROGRAMS = 128  # splits bring a call to about that many
_HOPPER_SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class SparseAttentionTiles:
    """heads, slots: of a tile, powers of two from 16; splits: programs that share a token's slots.

    logits_once: keeps the compiler from laying all warps along the heads of the first dot. Without it, 8 warps
    compute a tile of 64 heads twice; with it, row maxima and sums cross warps. merged_heads: heads that a
    program of the merging kernel takes, a power of two.
    """

    heads: int = 64
    slots: int = 64
    num_warps: int = 8
    num_stages: int = 2
    splits: int = 1
    logits_once: bool = True
    merged_heads: int = 4

    def shared_bytes(self, dim: int, element_bytes: int) -> int:
        """Shared memory of a program, an upper bound: q, the tiles in flight, probabilities."""
        tiles = max(min(self.num_stages, 2), (self.num_stages + 1) // 2)
        padded_dim = triton.next_power_of_2(dim)
        elements = (self.heads + tiles * self.slots) * padded_dim + 2 * self.heads * self.slots
        return elements * element_bytes + 2048


# (heads, slots, warps, stages), widest first.
_TILES = ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1))
_FLOAT32_TILES = ((16, 32, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1))  # without tensor cores, wider ones spill
_FEW_TOKENS_TILES = ((16, 64, 4, 2), *_TILES[3:])


def choose_tiles(
    tokens: int, heads: int, dim: int, element_bytes: int, slots: int, shared_memory: int = _HOPPER_SHARED_MEMORY
) -> SparseAttentionTiles:
    """Tiles for `tokens` query tokens in all, each with that many slots; ValueError where none fit.

    shared_memory: bytes that one program may use.
    """
    rows = max(16, triton.next_power_of_2(heads))
    few = tokens * triton.cdiv(heads, 64) <= 16
    for tile_heads, tile_slots, num_warps, num_stages in (
        _FLOAT32_TILES if element_bytes == 4 else _FEW_TOKENS_TILES if few else _TILES
    ):
        wide = tile_heads == 64 and dim > 128  # then 4 warps have too few registers for the values
        tiles = SparseAttentionTiles(
            heads=tile_heads,
            slots=tile_slots,
            num_warps=num_warps if wide or element_bytes == 4 else 4,
            num_stages=num_stages,
            splits=max(
                1,
                min(triton.cdiv(slots, tile_slots), _FILLING_PROGRAMS // (tokens * triton.cdiv(heads, tile_heads))),
            ),
            logits_once=wide,
        )
        if tile_heads <= rows and tiles.shared_bytes(dim, element_bytes) <= shared_memory:
            return tiles
    raise ValueError(
        f"no tiles of {dim} channels with {element_bytes} bytes fit {shared_memory} bytes of shared memory"
    )


def sparse_attention(
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor | None,
    window_indices: Tensor | None,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
    rotations: Tensor | None = None,
    *,
    rotate_q: bool = False,
    rotate_output: bool = False,
    logsumexp: Tensor | None = None,
    tiles: SparseAttentionTiles | None = None,
) -> Tensor:
    """Attend from every query to its window, its selection and the sink; [B, S, H, D] in q's dtype.

    q: [B, S, H, D]; sink: float32 [H]; window_kv: [B, N, D] with window_indices int32 [B, S, W];
    compressed_kv: [B, T, D] with topk_indices int32 [B, S, K]; -1 where a slot is empty; either pair may be
    None. Logits are q . k / sqrt(D). rotations: float32 [B or 1, S, R/2, 2], for the last R channels:
    rotate_q turns q forward first, rotate_output turns the output back. logsumexp: float32 [B, S, H], contiguous,
    takes the natural logarithm of the softmax's denominator, sink included, for a backward pass.
    """
    batch, tokens, heads, dim = q.shape
    window_kv, window_indices, window = source_of(window_kv, window_indices)
    compressed_kv, topk_indices, topk = source_of(compressed_kv, topk_indices)
    out = torch.empty(batch, tokens, heads, dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if window + topk == 0:
        if logsumexp is not None:
            logsumexp.copy_(sink.expand_as(logsumexp))
        return out.zero_()  # the sink has all the weight, and no value
    tiles = tiles or choose_tiles(batch * tokens, heads, dim, q.element_size(), window + topk)
    if not (rotate_q or rotate_output):
        rotations = None
    rotation_strides = (0, 0) if rotations is None else (batch_stride(rotations), rotations.stride(1))
    rotary_dim = 0 if rotations is None else 2 * rotations.shape[2]
    splits = tiles.splits
    states = values = None
    if splits > 1:
        states = torch.empty(2, batch * tokens, splits, heads, dtype=torch.float32, device=q.device)
        values = torch.empty(batch * tokens, splits, heads, dim, dtype=torch.float32, device=q.device)
    padded_dim = triton.next_power_of_2(dim)
    traceable(sparse_attention_kernel)[(batch * tokens * triton.cdiv(heads, tiles.heads), splits)](
        q,
        sink,
        window_kv,
        window_indices,
        compressed_kv,
        topk_indices,
        rotations,
        out,
        states,
        values,
        logsumexp,
        tokens,
        heads,
        window,
        topk,
        *q.stride()[:3],
        *source_strides(window_kv, window_indices),
        *source_strides(compressed_kv, topk_indices),
        *rotation_strides,
        SCALE=dim**-0.5,
        DIM=dim,
        PADDED_DIM=padded_dim,
        ROTARY_DIM=rotary_dim,
        PADDED_ROTARY_DIM=triton.next_power_of_2(max(rotary_dim, 1)),
        ROTATE_Q=rotate_q,
        ROTATE_OUTPUT=rotate_output,
        HAS_WINDOW=window > 0,
        HAS_COMPRESSED=topk > 0,
        SPLITS=splits,
        PADDED_WINDOW=triton.next_power_of_2(max(window, 1)),
        PADDED_TOPK=triton.next_power_of_2(max(topk, 1)),
        LOGITS_ONCE=tiles.logits_once,
        HEADS=tiles.heads,
        SLOTS=tiles.slots,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    if splits > 1:
        traceable(merge_splits_kernel)[(batch * tokens, triton.cdiv(heads, tiles.merged_heads))](
            states,
            values,
            rotations,
            out,
            logsumexp,
            tokens,
            heads,
            *rotation_strides,
            DIM=dim,
            PADDED_DIM=padded_dim,
            ROTARY_DIM=rotary_dim,
            PADDED_ROTARY_DIM=triton.next_power_of_2(max(rotary_dim, 1)),
            ROTATE_OUTPUT=rotate_output,
            SPLITS=splits,
            HEADS=tiles.merged_heads,
            num_warps=4,
        )
    return out


def source_of(kv: Tensor | None, indices: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """A source and its number of slots; without rows or without slots it is left out."""
    if kv is None or indices is None or kv.shape[1] == 0 or indices.shape[2] == 0:
        return None, None, 0
    return kv, indices, indices.shape[2]


def source_strides(kv: Tensor | None, indices: Tensor | None) -> tuple[int, int, int, int]:
    if kv is None or indices is None:
        return 0, 0, 0, 0
    return batch_stride(kv), kv.stride(1), batch_stride(indices), indices.stride(1)


def batch_stride(x: Tensor) -> int:
    return 0 if x.shape[0] == 1 else x.stride(0)


@triton.jit
def sparse_attention_kernel(
    q_ptr,
    sink_ptr,
    window_kv_ptr,
    window_indices_ptr,
    compressed_kv_ptr,
    topk_indices_ptr,
    rotations_ptr,
    out_ptr,
    states_ptr,
    values_ptr,
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
    SCALE: tl.constexpr,  # a float argument would be float64 in Inductor's launches
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_ROTARY_DIM: tl.constexpr,
    ROTATE_Q: tl.constexpr,
    ROTATE_OUTPUT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_COMPRESSED: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_WINDOW: tl.constexpr,
    PADDED_TOPK: tl.constexpr,
    LOGITS_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    head_blocks = tl.cdiv(num_heads, HEADS)
    place = tl.program_id(0) // head_blocks
    batch, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    head_exists = head < num_heads
    channel = tl.arange(0, PADDED_DIM)
    exists = head_exists[:, None] & (channel < DIM)[None, :]
    if ROTARY_DIM > 0:
        rotation_row = rotations_ptr + batch * rotation_batch_stride + token * rotation_token_stride

    q_rows = (q_ptr + batch * q_batch_stride + token * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    out_rows = out_ptr + (place.to(tl.int64) * num_heads + head)[:, None] * DIM
    q_pointers = q_rows + channel[None, :]
    if ROTATE_Q:
        # Turned channels wait in the output's rows, which this program fills last. Read back from there, q is a
        # loaded tile that the tensor cores take from shared memory; a computed one would be sent through
        # registers again for every tile of slots.
        _rotate_tail(q_rows, out_rows, rotation_row, head_exists, HEADS, DIM, ROTARY_DIM, PADDED_ROTARY_DIM, False)
        q_pointers = tl.where(channel[None, :] < DIM - ROTARY_DIM, q_pointers, out_rows + channel[None, :])
    q = tl.load(q_pointers, mask=exists, other=0.0)

    window_tiles, filled_window, filled_topk = 0, 0, 0
    if HAS_WINDOW:
        window_kv_ptr += batch * window_batch_stride
        window_indices_ptr += batch * window_index_batch_stride + token * window_index_token_stride
        filled_window = _filled_slots(window_indices_ptr, window, PADDED_WINDOW)
        window_tiles = tl.cdiv(filled_window, SLOTS)
    if HAS_COMPRESSED:
        compressed_kv_ptr += batch * compressed_batch_stride
        topk_indices_ptr += batch * topk_batch_stride + token * topk_token_stride
        filled_topk = _filled_slots(topk_indices_ptr, topk, PADDED_TOPK)
    first, last = 0, window_tiles + tl.cdiv(filled_topk, SLOTS)
    if SPLITS > 1:
        share = tl.cdiv(last, SPLITS)
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, last)

    # In powers of two, and finite, also where a sink of -inf should leave no trace.
    top = tl.maximum(tl.load(sink_ptr + head, mask=head_exists, other=0.0) * _LOG2_E, -1e30)
    total = tl.full((HEADS,), 1.0, tl.float32)
    if SPLITS > 1:
        total = tl.where(tl.program_id(1) == 0, total, 0.0)
    values = tl.zeros((HEADS, PADDED_DIM), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        if HAS_WINDOW and HAS_COMPRESSED:
            in_window = tile < window_tiles
            slot = tl.where(in_window, tile, tile - window_tiles) * SLOTS + tl.arange(0, SLOTS)
            indices_ptr = tl.where(in_window, window_indices_ptr, topk_indices_ptr)
            kv_ptr = tl.where(in_window, window_kv_ptr, compressed_kv_ptr)
            row_stride = tl.where(in_window, window_row_stride, compressed_row_stride)
            filled = tl.where(in_window, filled_window, filled_topk)
        else:
            slot = tile * SLOTS + tl.arange(0, SLOTS)
            indices_ptr = window_indices_ptr if HAS_WINDOW else topk_indices_ptr
            kv_ptr = window_kv_ptr if HAS_WINDOW else compressed_kv_ptr
            row_stride = window_row_stride if HAS_WINDOW else compressed_row_stride
            filled = filled_window if HAS_WINDOW else filled_topk
        index = tl.load(indices_ptr + slot, mask=slot < filled, other=-1)
        kv_rows = kv_ptr + index.to(tl.int64)[:, None] * row_stride
        kv_exists = (index >= 0)[:, None] & (channel < DIM)[None, :]
        kv = tl.load(kv_rows + channel[None, :], mask=kv_exists, other=0.0)
        logits = dot_float32(q, tl.trans(kv), tl.zeros((HEADS, SLOTS), tl.float32)) * (SCALE * _LOG2_E)
        logits = tl.where((index >= 0)[None, :], logits, -float("inf"))
        weights = tl.zeros((HEADS, SLOTS), dtype)
        kept = tl.full((HEADS,), 1.0, tl.float32)
        if LOGITS_ONCE:
            # Always true. Where Triton sees one dot feed another, it lays all warps along the rows of the first,
            # and 8 warps compute 64 rows twice; it does not see through a branch.
            if tile < last:
                weights, kept, top, total = _softmax_step(logits, top, total, dtype)
        else:
            weights, kept, top, total = _softmax_step(logits, top, total, dtype)
        values = dot_float32(weights, kv, values * kept[:, None])

    if SPLITS > 1:
        split = place.to(tl.int64) * SPLITS + tl.program_id(1)
        state = states_ptr + split * num_heads + head
        tl.store(state, top, mask=head_exists)
        tl.store(state + (tl.num_programs(0) // head_blocks).to(tl.int64) * SPLITS * num_heads, total, mask=head_exists)
        value_rows = values_ptr + (split * num_heads + head)[:, None] * DIM
        tl.store(value_rows + channel[None, :], values, mask=exists)
    else:
        tl.store(out_rows + channel[None, :], round_to(values / total[:, None], dtype), mask=exists)
        if logsumexp_ptr is not None:
            _store_logsumexp(logsumexp_ptr + place.to(tl.int64) * num_heads + head, top, total, head_exists)
        if ROTATE_OUTPUT:
            _rotate_tail(out_rows, out_rows, rotation_row, head_exists, HEADS, DIM, ROTARY_DIM, PADDED_ROTARY_DIM, True)


@triton.jit
def merge_splits_kernel(
    states_ptr,
    values_ptr,
    rotations_ptr,
    out_ptr,
    logsumexp_ptr,
    tokens,
    num_heads,
    rotation_batch_stride,
    rotation_token_stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_ROTARY_DIM: tl.constexpr,
    ROTATE_OUTPUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """out [tokens, heads, DIM] from every split's maxima and sums [2, tokens, splits, heads] and values."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_exists = head < num_heads
    channel = tl.arange(0, PADDED_DIM)[None, :]
    exists = head_exists[:, None] & (channel < DIM)

    states = states_ptr + place * SPLITS * num_heads + head
    sums = states + tl.num_programs(0).to(tl.int64) * SPLITS * num_heads
    top = tl.load(states, mask=head_exists, other=0.0)
    for split in range(1, SPLITS):
        top = tl.maximum(top, tl.load(states + split * num_heads, mask=head_exists, other=0.0))
    total = tl.zeros((HEADS,), tl.float32)
    values = tl.zeros((HEADS, PADDED_DIM), tl.float32)
    for split in range(0, SPLITS):
        kept = tl.exp2(tl.load(states + split * num_heads, mask=head_exists, other=0.0) - top)
        total += tl.load(sums + split * num_heads, mask=head_exists, other=1.0) * kept
        value_rows = values_ptr + ((place * SPLITS + split) * num_heads + head)[:, None] * DIM
        values += tl.load(value_rows + channel, mask=exists, other=0.0) * kept[:, None]
    out_rows = out_ptr + (place * num_heads + head)[:, None] * DIM
    tl.store(out_rows + channel, round_to(values / total[:, None], dtype), mask=exists)
    if logsumexp_ptr is not None:
        _store_logsumexp(logsumexp_ptr + place * num_heads + head, top, total, head_exists)
    if ROTATE_OUTPUT:
        rotation_row = rotations_ptr + (place // tokens) * rotation_batch_stride
        rotation_row += (place % tokens) * rotation_token_stride
        _rotate_tail(out_rows, out_rows, rotation_row, head_exists, HEADS, DIM, ROTARY_DIM, PADDED_ROTARY_DIM, True)


@triton.jit
def _filled_slots(indices_ptr, slots, PADDED_SLOTS: tl.constexpr):
    """How many of the slots there are up to the last filled one."""
    slot = tl.arange(0, PADDED_SLOTS)
    index = tl.load(indices_ptr + slot, mask=slot < slots, other=-1)
    return tl.max(tl.where(index >= 0, slot + 1, 0), axis=0)


@triton.jit
def _softmax_step(logits, top, total, dtype: tl.constexpr):
    """Weights of one tile in `dtype`, what is kept of earlier tiles, and the new maximum and sum."""
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    kept = tl.exp2(top - new_top)
    weights = tl.exp2(logits - new_top[:, None])
    return round_to(weights, dtype), kept, new_top, total * kept + tl.sum(weights, axis=1)


@triton.jit
def _store_logsumexp(pointers, top, total, exists):
    """The natural logarithm of each head's denominator, from its maximum in powers of two and its sum."""
    tl.store(pointers, (top + tl.log2(total)) * _LN_2, mask=exists)


@triton.jit
def _rotate_tail(
    from_rows,
    to_rows,
    rotation_row,
    rows_exist,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_ROTARY_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """RoPE of the last ROTARY_DIM channels of one token's rows, memory to memory, visible to all threads after.

    from_rows, to_rows: pointers [ROWS, 1] to the rows, which may be the same; rows_exist: bool [ROWS].
    """
    dtype: tl.constexpr = to_rows.dtype.element_ty
    tl.debug_barrier()  # the rows may have been written just now
    channel = tl.arange(0, PADDED_ROTARY_DIM)[None, :]
    exists = rows_exist[:, None] & (channel < ROTARY_DIM)
    tail = tl.load(from_rows + (DIM - ROTARY_DIM) + channel, mask=exists, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(tail, (ROWS, PADDED_ROTARY_DIM // 2, 2)))
    rotation_rows = rotation_row + tl.zeros((ROWS, 1), tl.int32)
    real, imaginary = rotate_pairs(
        real, imaginary, rotation_rows, rows_exist[:, None], dtype, ROTARY_DIM, PADDED_ROTARY_DIM, ROTARY_DIM, INVERSE
    )
    turned = tl.reshape(tl.join(real, imaginary), (ROWS, PADDED_ROTARY_DIM))
    tl.store(to_rows + (DIM - ROTARY_DIM) + channel, round_to(turned, dtype), mask=exists)
    tl.debug_barrier()
