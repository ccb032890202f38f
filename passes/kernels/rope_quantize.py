"""[RMSNorm ->] RoPE -> quantize-dequantize of rows, in one read and one write.

Serves `csa2::rms_norm`, `csa2::apply_rope` and `csa2::quantize_dequantize` in that order, each of which may be
left out. Between them values are rounded to the activation dtype, as the separate ops round. RoPE has the bits
of CUDA's complex product (`csa2_compiled.rope`), quantization those of `csa2_compiled.quantization`, whose
exact steps are copied here; given the same normalized values the result is bit-equal to the plain bodies, NaN
payloads aside. The norm's mean square is a tree sum in float32, in another order than torch.mean, so
normalized values can differ from the plain ones by one rounding.

Needs: x floating of 2 or 4 bytes, [B, S, D] or [B, S, heads, D], channels adjacent in memory; D a multiple of
the format's group; rotations float32 [B or 1, S, R/2, 2]; all on one device.
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csa2_compiled.passes.kernels.launch import traceable
from csa2_compiled.passes.kernels.tile_math import rotate_pairs, round_to

# Those of csa2_compiled.quantization: group size, least amax, element, scale.
FORMATS = {
    "fp8": (32, 1e-4, "e4m3", "e8m0"),
    "nvfp4": (16, 6 * 2.0**-9, "e2m1", "e4m3"),
    "mxfp4": (32, 6 * 2.0**-126, "e2m1", "e8m0"),
}

_EXPONENT_MASK = tl.constexpr(0x7F800000)
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_SIGN_MASK = tl.constexpr(-0x80000000)
_HEAD_MASK = tl.constexpr(-1 << 12)  # the upper 12 significant bits of a float32
_ROUNDS_TO_INTEGER = tl.constexpr(2.0**23)  # adding it leaves no fraction bits


@dataclass(frozen=True)
class RopeQuantizeTiles:
    """rows: rows of x a program takes, a power of two."""

    rows: int = 8
    num_warps: int = 4


def rope_quantize(
    x: Tensor,
    rotations: Tensor | None = None,
    *,
    inverse: bool = False,
    format_name: str | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    tiles: RopeQuantizeTiles | None = None,
) -> Tensor:
    """Normalize, rotate and quantize-dequantize x [B, S, D] or [B, S, heads, D]; returns it contiguous.

    rotations: float32 [B or 1, S, R/2, 2], for the last R channels, alike for all heads; None leaves RoPE out.
    format_name: "fp8", "nvfp4" or "mxfp4"; None leaves quantization out. norm_weight: float32 [D]; None leaves
    the norm out. eps: added to the mean square.
    """
    tiles = tiles or RopeQuantizeTiles()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, tokens, dim = x.shape[0], x.shape[1], x.shape[-1]
    heads, head_stride = (x.shape[2], x.stride(2)) if x.dim() == 4 else (1, 0)
    rows = batch * tokens * heads
    if rows == 0:
        return out
    group, amax_floor, element, scale = (0, 0.0, "", "") if format_name is None else FORMATS[format_name]
    traceable(rope_quantize_kernel)[(triton.cdiv(rows, tiles.rows),)](
        x,
        rotations,
        norm_weight,
        out,
        rows,
        tokens,
        heads,
        x.stride(0),
        x.stride(1),
        head_stride,
        0 if rotations is None or rotations.shape[0] == 1 else rotations.stride(0),
        0 if rotations is None else rotations.stride(1),
        EPS=eps,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        ROTARY_DIM=0 if rotations is None else 2 * rotations.shape[2],
        INVERSE=inverse,
        HAS_NORM=norm_weight is not None,
        GROUP=group,
        AMAX_FLOOR=amax_floor,
        ELEMENT=element,
        SCALE=scale,
        ROWS=tiles.rows,
        num_warps=tiles.num_warps,
    )
    return out


@triton.jit
def rope_quantize_kernel(
    x_ptr,
    rotations_ptr,
    norm_weight_ptr,
    out_ptr,
    num_rows,
    tokens,
    heads,
    batch_stride,
    token_stride,
    head_stride,
    rotation_batch_stride,
    rotation_token_stride,
    EPS: tl.constexpr,  # a float argument would be float64 in Inductor's launches
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = (row < num_rows)[:, None]
    head = (row % heads).to(tl.int64)
    token = ((row // heads) % tokens).to(tl.int64)
    batch = ((row // heads) // tokens).to(tl.int64)
    channel = tl.arange(0, PADDED_DIM)[None, :]
    exists = row_exists & (channel < DIM)

    row_offset = batch * batch_stride + token * token_stride + head * head_stride
    x = tl.load(x_ptr + row_offset[:, None] + channel, mask=exists, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / DIM) + EPS)
        # Loaded as a whole tile, a row would lay out x its own way and send it through shared memory.
        weight = tl.load(norm_weight_ptr + tl.broadcast_to(channel, (ROWS, PADDED_DIM)), mask=exists, other=0.0)
        x = round_to(weight * (x * scale[:, None]), dtype).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (ROWS, PADDED_DIM // 2, 2)))
    if ROTARY_DIM > 0:
        rotation_rows = rotations_ptr + (batch * rotation_batch_stride + token * rotation_token_stride)[:, None]
        real, imaginary = rotate_pairs(
            real, imaginary, rotation_rows, row_exists, dtype, DIM, PADDED_DIM, ROTARY_DIM, INVERSE
        )
    if GROUP > 0:
        real, imaginary = _quantize_dequantize(
            real, imaginary, ROWS, PADDED_DIM // GROUP, GROUP, AMAX_FLOOR, ELEMENT, SCALE
        )
    out = round_to(tl.reshape(tl.join(real, imaginary), (ROWS, PADDED_DIM)), dtype)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * DIM + channel, out, mask=exists)


@triton.jit
def _quantize_dequantize(
    real,
    imaginary,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Even and odd channels, float32 [ROWS, GROUPS * GROUP / 2] each, rounded to what the format can hold."""
    largest: tl.constexpr = 448.0 if ELEMENT == "e4m3" else 6.0
    shape: tl.constexpr = (ROWS, GROUPS, GROUP // 2)
    real, imaginary = tl.reshape(real, shape), tl.reshape(imaginary, shape)
    # Magnitudes compare like their bits, and NaN above infinity, which a float maximum would drop.
    magnitude = tl.maximum(real.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, _magnitude_bits(imaginary))
    amax = tl.max(magnitude, axis=2, keep_dims=True).to(tl.float32, bitcast=True)
    amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    if SCALE == "e8m0":
        scale = _power_of_two_ceiling(amax * (1 / largest))
        inverse = _power_of_two_reciprocal(scale)
        real, imaginary = real * inverse, imaginary * inverse
    else:
        scale = _round_to_minifloat(_divide(amax, largest, 1 / largest), "e4m3")
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        inverse = 1.0 / scale
        real, imaginary = _divide(real, scale, inverse), _divide(imaginary, scale, inverse)
    flat: tl.constexpr = (ROWS, GROUPS * GROUP // 2)
    return (
        tl.reshape(_round_to_minifloat(real, ELEMENT) * scale, flat),
        tl.reshape(_round_to_minifloat(imaginary, ELEMENT) * scale, flat),
    )


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK


@triton.jit
def _power_of_two_ceiling(value):
    """The least power of two that is not below `value`, positive and normal; NaN for NaN and infinity."""
    bits = value.to(tl.int32, bitcast=True)
    exponent = ((bits & _EXPONENT_MASK) >> 23) + tl.where((bits & 0x007FFFFF) != 0, 1, 0)
    return tl.where(exponent < 255, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two_reciprocal(value):
    return ((254 << 23) - value.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _divide(value, divisor, inverse):
    """value / divisor, correctly rounded whatever the last bits of `inverse`; infinity gives NaN."""
    head = ((value * inverse).to(tl.int32, bitcast=True) & _HEAD_MASK).to(tl.float32, bitcast=True)
    # The remainder is exact, fused or not: a product of at most 24 bits, the difference of close numbers.
    quotient = head + (value - head * divisor) * inverse
    sign = value.to(tl.int32, bitcast=True) & _SIGN_MASK  # the sum loses the sign of -0.0
    return (_magnitude_bits(quotient) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_minifloat(value, minifloat: tl.constexpr):
    """The nearest E4M3 or E2M1 value, ties to even code, clamped to the largest. A NaN must be in the scale too."""
    mantissa_bits: tl.constexpr = 3 if minifloat == "e4m3" else 1
    least_exponent: tl.constexpr = -6 if minifloat == "e4m3" else 0
    largest: tl.constexpr = 448.0 if minifloat == "e4m3" else 6.0
    sign = value.to(tl.int32, bitcast=True) & _SIGN_MASK
    magnitude = tl.minimum(_magnitude_bits(value).to(tl.float32, bitcast=True), largest)
    exponent_bits = magnitude.to(tl.int32, bitcast=True) & _EXPONENT_MASK
    step_bits = tl.maximum(exponent_bits, (127 + least_exponent) << 23) - (mantissa_bits << 23)
    step = step_bits.to(tl.float32, bitcast=True)
    # Steps are powers of two, so the quotient is exact, also where it is fused into the sum.
    steps = magnitude * _power_of_two_reciprocal(step)
    rounded = ((steps + _ROUNDS_TO_INTEGER) - _ROUNDS_TO_INTEGER) * step
    return (_magnitude_bits(rounded) | sign).to(tl.float32, bitcast=True)
