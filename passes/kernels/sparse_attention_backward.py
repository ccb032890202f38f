"""The backward pass of the attention core: gradients of q, of the sink and of the rows that slots name, K = V.

Queries go in chunks, each through three kernels:

1. one program a query and a block of its heads, as in the forward pass: tile by tile of slots it computes the weights
   anew (from the logsumexp) and the gradients of the logits, keeps both in q's dtype, and adds up the gradient of q;
2. one program a query and a block of channels: a tile's gradients of rows are two products of those weights and
   logit gradients, transposed, with the queries and the output's gradients, and go to a workspace in float32;
3. one program a row of keys and a block of channels: the sum of the row's slots in the workspace.

So every product is computed once (five in all), and nothing is added atomically: a row's slots are found by a stable
sort of the indices, and are summed in ascending order of queries and slots, in float32, chunk after chunk.
Runs are bit for bit alike. The workspace of a chunk holds queries x slots x D float32 values and bounds the memory,
beside the numbers of all slots in their order: 16 bytes a slot while they are sorted, 8 after.

Dots accumulate in float32; weights and logit gradients are rounded to q's dtype for the dots they go into, and so
are the results at the end. A window's row is named by many queries in a row and its gradient is nearest to exact in
eager code, so the weights of the window's slots keep a second part, what their rounding left, which goes into a dot of
its own. float32 inputs are multiplied in full float32. Tiles behind a query's last filled slot are not visited.

Needs: one dtype (float32, bfloat16, float16) for q, keys, the output and its gradient; up to 128 heads.
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.sparse_attention import _filled_slots
from csa2_compiled.passes.kernels.tile_math import dot_float32, round_to

_LOG2_E = tl.constexpr(1.4426950408889634)
_HOPPER_SHARED_MEMORY = 227 * 1024
_WORKSPACE_BYTES = 1_900_000_000
_SLOT_MULTIPLE = 64  # slots are padded to it, so that any tile divides them


@dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the three kernels, all powers of two (slots to 64).

    heads, slots, num_warps, num_stages: of the first kernel, as in `SparseAttentionTiles`, logits_once too. row_*: of
    the second, whose programs take row_channels channels of all heads. sum_*: of the third, which loads sum_entries
    slots at once. queries: in a chunk; None takes as many as a workspace of 1.9 GB holds.
    """

    heads: int = 64
    slots: int = 64
    num_warps: int = 8
    num_stages: int = 1
    logits_once: bool = True
    row_slots: int = 64
    row_channels: int = 128
    row_warps: int = 4
    row_stages: int = 1
    sum_channels: int = 256
    sum_entries: int = 16
    sum_warps: int = 4
    queries: int | None = None

    def shared_bytes(self, dim: int, element_bytes: int) -> int:
        """Shared memory of a program of the first kernel, an upper bound: q, the output's gradient, rows, weights."""
        padded_dim = triton.next_power_of_2(dim)
        elements = (2 * self.heads + self.num_stages * self.slots) * padded_dim + 2 * self.heads * self.slots
        return elements * element_bytes + 2048

    def row_shared_bytes(self, heads: int, element_bytes: int) -> int:
        """The same of the second kernel: q, the output's gradient, weights and logit gradients in flight."""
        padded_heads = max(16, triton.next_power_of_2(heads))
        elements = 2 * padded_heads * (self.row_channels + self.row_stages * self.row_slots)
        return elements * element_bytes + 2048


# (heads, slots, warps, stages) of the first kernel and (slots, channels, stages) of the second, widest first.
_TILES = ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))
_ROW_TILES = ((64, 128, 1), (64, 64, 1), (32, 32, 1))
_FLOAT32_TILES, _FLOAT32_ROW_TILES = ((16, 16, 8, 1),), ((16, 64, 1),)  # without tensor cores, wider ones spill


def choose_backward_tiles(
    heads: int, dim: int, element_bytes: int, shared_memory: int = _HOPPER_SHARED_MEMORY
) -> BackwardTiles:
    """Tiles for so many heads of `dim` channels; ValueError where none fit into `shared_memory` bytes a program."""
    rows = max(16, triton.next_power_of_2(heads))
    float32 = element_bytes == 4
    first, second = (_FLOAT32_TILES, _FLOAT32_ROW_TILES) if float32 else (_TILES, _ROW_TILES)
    for (tile_heads, slots, num_warps, num_stages), (row_slots, row_channels, row_stages) in product(first, second):
        wide = tile_heads == 64 and dim > 128  # then 4 warps have too few registers for q's gradient
        tiles = BackwardTiles(
            heads=tile_heads,
            slots=slots,
            num_warps=num_warps if wide or float32 else 4,
            num_stages=num_stages,
            logits_once=wide,
            row_slots=row_slots,
            row_channels=min(row_channels, triton.next_power_of_2(dim)),
            sum_channels=min(BackwardTiles.sum_channels, triton.next_power_of_2(dim)),
            row_stages=row_stages,
        )
        needed = max(tiles.shared_bytes(dim, element_bytes), tiles.row_shared_bytes(heads, element_bytes))
        if tile_heads <= rows and needed <= shared_memory:
            return tiles
    raise ValueError(
        f"no tiles of the backward pass with {dim} channels of {element_bytes} bytes fit {shared_memory} bytes of "
        "shared memory"
    )


def sparse_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    q: Tensor,
    sink: Tensor,
    window_kv: Tensor,
    window_indices: Tensor,
    compressed_kv: Tensor | None = None,
    topk_indices: Tensor | None = None,
    *,
    tiles: BackwardTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, sink, window_kv and compressed_kv, in their shapes and dtypes; empty without compressed_kv.

    grad_out, out, q: [B, S, H, D]; logsumexp: float32 [B, S, H], natural; sink: float32 [H]; window_kv: [B, N, D] with
    window_indices int32 [B, S, W]; compressed_kv: [B, T, D] with topk_indices int32 [B, S, K]; -1 where a slot is
    empty, anywhere. All sizes are numbers.
    """
    batch, tokens, heads, dim = q.shape
    tiles = tiles or choose_backward_tiles(heads, dim, q.element_size())
    keys, rows = one_source(window_kv, window_indices, compressed_kv, topk_indices)
    grad_q = torch.empty(batch, tokens, heads, dim, dtype=q.dtype, device=q.device)
    mean = torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device)
    sums = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
    places, slots = rows.shape
    if places * slots == 0:
        grad_q.zero_()
        mean.zero_()
    else:
        inputs = (grad_out.contiguous(), q.contiguous(), out.contiguous(), logsumexp.contiguous())
        _run_chunks(inputs, keys, rows, grad_q, mean, sums, split_slots(window_indices, q.dtype), tiles)
    grad_sink = -(torch.exp(sink - logsumexp) * mean).sum((0, 1)).to(sink.dtype)
    num_window = window_kv.shape[1]
    by_batch = sums.view(batch, -1, dim)
    grad_window = by_batch[:, :num_window].to(window_kv.dtype).contiguous()
    if compressed_kv is None:
        return grad_q, grad_sink, grad_window, window_kv.new_empty(0)
    return grad_q, grad_sink, grad_window, by_batch[:, num_window:].to(compressed_kv.dtype).contiguous()


def one_source(
    window_kv: Tensor, window_indices: Tensor, compressed_kv: Tensor | None, topk_indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys of both sources and all batch rows, [B * (N + T), D], and the slots that name them, int32 [B * S, slots]."""
    keys, indices = window_kv, window_indices
    if compressed_kv is not None and topk_indices is not None:
        keys = torch.cat([window_kv, compressed_kv], dim=1)
        selected = torch.where(topk_indices >= 0, topk_indices + window_kv.shape[1], -1)
        indices = torch.cat([window_indices, selected], dim=-1)
    batch, num_keys, _ = keys.shape
    first = torch.arange(batch, dtype=torch.int32, device=keys.device).view(batch, 1, 1) * num_keys
    rows = torch.where(indices >= 0, indices + first, -1).to(torch.int32)
    padding = -rows.shape[-1] % _SLOT_MULTIPLE
    return keys.reshape(batch * num_keys, -1).contiguous(), F.pad(rows, (0, padding), value=-1).flatten(
        0, 1
    ).contiguous()


def _run_chunks(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    rows: Tensor,
    grad_q: Tensor,
    mean: Tensor,
    sums: Tensor,
    split: int,
    tiles: BackwardTiles,
) -> None:
    """Fill grad_q [B, S, H, D] and mean [B, S, H], the means of probabilities' gradients; add to sums [rows, D].

    split: the first slots, whose weights keep what their rounding left.
    """
    heads, dim = grad_q.shape[2:]
    places, slots = rows.shape
    most = tiles.queries or max(1, _WORKSPACE_BYTES // (torch.float32.itemsize * slots * dim))
    queries = triton.cdiv(places, triton.cdiv(places, most))  # chunks of about one size
    weights = torch.empty(queries, heads, slots, dtype=grad_q.dtype, device=grad_q.device)
    gradients = torch.empty_like(weights)
    rests = weights.new_empty(queries, heads, split)
    entries, bounds = slots_by_row(rows, keys.shape[0], queries)
    workspace = torch.empty(queries, slots, dim, dtype=torch.float32, device=grad_q.device)
    for chunk, first in enumerate(range(0, places, queries)):
        count = min(queries, places - first)
        run_grad_q(inputs, keys, rows, grad_q, mean, weights, rests, gradients, first, count, tiles)
        run_grad_slots(inputs, rows, weights, rests, gradients, workspace, first, count, tiles)
        run_sum_slots(workspace, entries, bounds[chunk], first, sums, tiles)


def split_slots(window_indices: Tensor, dtype: torch.dtype) -> int:
    """How many of the first slots have weights of two parts: the window's, in whole tiles; none in float32."""
    return 0 if dtype == torch.float32 else triton.cdiv(window_indices.shape[2], _SLOT_MULTIPLE) * _SLOT_MULTIPLE


def run_grad_q(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    rows: Tensor,
    grad_q: Tensor,
    mean: Tensor,
    weights: Tensor,
    rests: Tensor,
    gradients: Tensor,
    first: int,
    count: int,
    tiles: BackwardTiles,
) -> None:
    """The first kernel for `count` queries from `first` on.

    inputs: grad_out, q, out and logsumexp, contiguous; weights, gradients: [at least count, H, slots], for the second;
    rests: [at least count, H, some of the first slots], what rounding left of weights.
    """
    heads, dim = grad_q.shape[2:]
    slots = rows.shape[1]
    traceable(grad_q_kernel)[(count * triton.cdiv(heads, tiles.heads),)](
        *inputs,
        keys,
        rows,
        grad_q,
        mean,
        weights,
        rests,
        gradients,
        first,
        heads,
        slots,
        SCALE=dim**-0.5,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        PADDED_SLOTS=triton.next_power_of_2(slots),
        SPLIT_SLOTS=rests.shape[2],
        LOGITS_ONCE=tiles.logits_once,
        HEADS=tiles.heads,
        SLOTS=tiles.slots,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def run_grad_slots(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: Tensor,
    weights: Tensor,
    rests: Tensor,
    gradients: Tensor,
    workspace: Tensor,
    first: int,
    count: int,
    tiles: BackwardTiles,
) -> None:
    """The second kernel for the same queries."""
    grad_out, q = inputs[:2]
    heads, dim = q.shape[2:]
    slots = rows.shape[1]
    traceable(grad_slots_kernel)[(count, triton.cdiv(dim, tiles.row_channels))](
        grad_out,
        q,
        rows,
        weights,
        rests,
        gradients,
        workspace,
        first,
        heads,
        slots,
        SCALE=dim**-0.5,
        DIM=dim,
        PADDED_SLOTS=triton.next_power_of_2(slots),
        SPLIT_SLOTS=rests.shape[2],
        HEADS=max(16, triton.next_power_of_2(heads)),
        CHANNELS=tiles.row_channels,
        SLOTS=tiles.row_slots,
        STAGES=tiles.row_stages,
        num_warps=tiles.row_warps,
    )


def run_sum_slots(
    workspace: Tensor, entries: Tensor, bounds: Tensor, first: int, sums: Tensor, tiles: BackwardTiles
) -> None:
    """The third kernel, for the chunk from query `first` on; entries and the chunk's bounds: from `slots_by_row`."""
    num_rows, dim = sums.shape
    traceable(sum_slots_kernel)[(num_rows, triton.cdiv(dim, tiles.sum_channels))](
        workspace,
        entries,
        bounds,
        sums,
        first * workspace.shape[1],
        DIM=dim,
        CHANNELS=tiles.sum_channels,
        ENTRIES=tiles.sum_entries,
        num_warps=tiles.sum_warps,
    )


def slots_by_row(rows: Tensor, num_rows: int, queries: int) -> tuple[Tensor, Tensor]:
    """Where each row is named: numbers of the elements of `rows` [places, slots], by chunk, row and number, int64.

    A chunk has so many queries. Those of row n in chunk c stand at bounds[c, n] to bounds[c, n + 1], int64
    [chunks, num_rows + 1]. One sort serves all chunks: it costs little more than that of one.
    """
    places, chunks = rows.shape[0], triton.cdiv(rows.shape[0], queries)
    first_keys = torch.arange(places, dtype=torch.int32, device=rows.device) // queries * (num_rows + 1)
    named = torch.where(rows >= 0, rows, num_rows) + first_keys.unsqueeze(1)
    keys = torch.arange(chunks * (num_rows + 1), dtype=torch.int32, device=rows.device)
    if keys.numel() <= 1 << 16:
        least = torch.iinfo(torch.int16).min
        named, keys = (named + least).to(torch.int16), (keys + least).to(torch.int16)  # half the digits to sort by
    ordered, entries = torch.sort(named.flatten(), stable=True)
    return entries, torch.searchsorted(ordered, keys).view(chunks, num_rows + 1)


@triton.jit
def grad_q_kernel(
    grad_out_ptr,
    q_ptr,
    out_ptr,
    logsumexp_ptr,
    keys_ptr,
    rows_ptr,
    grad_q_ptr,
    mean_ptr,
    weights_ptr,
    rests_ptr,
    gradients_ptr,
    first,
    num_heads,
    slots,
    SCALE: tl.constexpr,  # a float argument would be float64 in Inductor's launches
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    LOGITS_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of q, means of probabilities' gradients; and each slot's weight and logit gradient."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    head_blocks = tl.cdiv(num_heads, HEADS)
    query = (tl.program_id(0) // head_blocks).to(tl.int64)  # of the chunk
    place = query + first
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    head_exists = head < num_heads
    channel = tl.arange(0, PADDED_DIM)
    exists = head_exists[:, None] & (channel < DIM)[None, :]
    state = place * num_heads + head
    offsets = state[:, None] * DIM + channel[None, :]
    q = tl.load(q_ptr + offsets, mask=exists, other=0.0)
    grad_out = tl.load(grad_out_ptr + offsets, mask=exists, other=0.0)
    out = tl.load(out_ptr + offsets, mask=exists, other=0.0)
    mean = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(mean_ptr + state, mean, mask=head_exists)
    logsumexp = tl.load(logsumexp_ptr + state, mask=head_exists, other=0.0) * _LOG2_E

    rows_ptr += place * slots
    kept_offsets = (query * num_heads + head)[:, None] * slots
    tiles = tl.cdiv(_filled_slots(rows_ptr, slots, PADDED_SLOTS), SLOTS)
    grad_q = tl.zeros((HEADS, PADDED_DIM), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        slot = tile * SLOTS + tl.arange(0, SLOTS)
        row = tl.load(rows_ptr + slot)
        row_pointers = keys_ptr + row.to(tl.int64)[:, None] * DIM + channel[None, :]
        kv = tl.load(row_pointers, mask=(row >= 0)[:, None] & (channel < DIM)[None, :], other=0.0)
        logits = dot_float32(q, tl.trans(kv), tl.zeros((HEADS, SLOTS), tl.float32))
        gradients = dot_float32(grad_out, tl.trans(kv), tl.zeros((HEADS, SLOTS), tl.float32)) - mean[:, None]
        logits = tl.where((row >= 0)[None, :], logits * (SCALE * _LOG2_E) - logsumexp[:, None], -float("inf"))
        weights, logit_gradients = tl.zeros((HEADS, SLOTS), dtype), tl.zeros((HEADS, SLOTS), dtype)
        rests = tl.zeros((HEADS, SLOTS), dtype)
        if LOGITS_ONCE:
            # Always true: it hides from Triton that dots feed a dot (see the forward kernel). Triton cannot pipeline a
            # loop in which a dot's result is first used inside the branch, so the means are taken off before it.
            if tile < tiles:
                weights, rests, logit_gradients = _tile_gradients(logits, gradients, dtype)
        else:
            weights, rests, logit_gradients = _tile_gradients(logits, gradients, dtype)
        tl.store(weights_ptr + kept_offsets + slot[None, :], weights, mask=head_exists[:, None])
        if SPLIT_SLOTS > 0:
            pointers = rests_ptr + (query * num_heads + head)[:, None] * SPLIT_SLOTS + slot[None, :]
            tl.store(pointers, rests, mask=head_exists[:, None] & (slot < SPLIT_SLOTS)[None, :])
        tl.store(gradients_ptr + kept_offsets + slot[None, :], logit_gradients, mask=head_exists[:, None])
        grad_q = dot_float32(logit_gradients, kv, grad_q)
    tl.store(grad_q_ptr + offsets, round_to(grad_q * SCALE, dtype), mask=exists)


@triton.jit
def _tile_gradients(logits, gradients, dtype: tl.constexpr):
    """A tile's weights, what rounding left of them, and logit gradients, in `dtype`.

    logits: in powers of two, less the logsumexp.
    """
    weights = tl.exp2(logits)
    rounded = round_to(weights, dtype)
    return rounded, round_to(weights - rounded.to(tl.float32), dtype), round_to(weights * gradients, dtype)


@triton.jit
def grad_slots_kernel(
    grad_out_ptr,
    q_ptr,
    rows_ptr,
    weights_ptr,
    rests_ptr,
    gradients_ptr,
    workspace_ptr,
    first,
    num_heads,
    slots,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """workspace [queries, slots, DIM]: what each filled slot adds to its row's gradient, as key and as value."""
    query = tl.program_id(0).to(tl.int64)
    place = query + first
    head = tl.arange(0, HEADS)
    head_exists = head < num_heads
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = head_exists[:, None] & (channel < DIM)[None, :]
    offsets = (place * num_heads + head)[:, None] * DIM + channel[None, :]
    q = tl.load(q_ptr + offsets, mask=exists, other=0.0)
    grad_out = tl.load(grad_out_ptr + offsets, mask=exists, other=0.0)

    rows_ptr += place * slots
    kept_offsets = (query * num_heads + head)[:, None] * slots
    workspace_ptr += query * slots * DIM
    filled = _filled_slots(rows_ptr, slots, PADDED_SLOTS)
    for tile in tl.range(0, tl.cdiv(filled, SLOTS), num_stages=STAGES):
        slot = tile * SLOTS + tl.arange(0, SLOTS)
        row = tl.load(rows_ptr + slot)
        kept = head_exists[:, None] & (slot < filled)[None, :]
        gradients = tl.load(gradients_ptr + kept_offsets + slot[None, :], mask=kept, other=0.0)
        weights = tl.load(weights_ptr + kept_offsets + slot[None, :], mask=kept, other=0.0)
        sums = dot_float32(tl.trans(gradients), q, tl.zeros((SLOTS, CHANNELS), tl.float32)) * SCALE
        sums = dot_float32(tl.trans(weights), grad_out, sums)
        if tile * SLOTS < SPLIT_SLOTS:
            pointers = rests_ptr + (query * num_heads + head)[:, None] * SPLIT_SLOTS + slot[None, :]
            sums = dot_float32(tl.trans(tl.load(pointers, mask=kept, other=0.0)), grad_out, sums)
        pointers = workspace_ptr + slot.to(tl.int64)[:, None] * DIM + channel[None, :]
        tl.store(pointers, sums, mask=(row >= 0)[:, None] & (channel < DIM)[None, :])


@triton.jit
def sum_slots_kernel(
    workspace_ptr,
    entries_ptr,
    bounds_ptr,
    sums_ptr,
    first_entry,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Add to sums [rows, DIM] what a chunk's slots have for each row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first, last = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    total = tl.load(sums_ptr + row * DIM + channel, mask=channel < DIM, other=0.0)
    for start in range(first, last, ENTRIES):
        number = start + tl.arange(0, ENTRIES)
        entry = tl.load(entries_ptr + number, mask=number < last, other=first_entry) - first_entry
        exists = (number < last)[:, None] & (channel < DIM)[None, :]
        values = tl.load(workspace_ptr + entry[:, None] * DIM + channel[None, :], mask=exists, other=0.0)
        total += tl.sum(values, axis=0)
    tl.store(sums_ptr + row * DIM + channel, total, mask=channel < DIM)
