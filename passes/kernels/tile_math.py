"""Steps on tiles that several kernels share: rounding, matrix product, rotation of channel pairs.

Under TRITON_INTERPRET=1 (Triton's CPU interpreter, which the tests use where there is no GPU) bfloat16 casts
truncate and bfloat16 dots read raw bits; `round_to` and `dot_float32` mend both there, and cost nothing in a
compiled kernel.
"""

# Triton may be absent where types are checked, and its kernels annotate constants only.
# mypy: disable-error-code="import-not-found, no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 x in `dtype`, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits | 0x400000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_float32(a, b, accumulator):
    """accumulator + a @ b: operands of one dtype, exact products, float32 sums."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def rotate_pairs(
    real,
    imaginary,
    rotation_rows,
    rows_exist,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """RoPE of the last ROTARY_DIM of DIM channels, given as pairs; other pairs pass unchanged.

    real, imaginary: float32 [rows, PADDED_DIM / 2], the even and odd channels, values of `dtype`.
    rotation_rows: pointers [rows or 1, 1] to each row's cosines and sines, float32, interleaved.
    rows_exist: bool [rows or 1, 1]. Returns both parts, float32, rounded to `dtype`.

    The rounding is that of CUDA's complex product: fma(a, c, -(b * d)), fma(a, d, b * c). The inner product
    is rounded on its own: it is only ever the addend of an explicit fma or negated by a factor, and
    contraction merges a product into an addition that is left to the compiler, of which there is none.
    Unary minus would be such an addition (Triton writes 0 - x), and would lose the sign of zero.
    """
    channel = tl.arange(0, PADDED_DIM)[None, :]
    rotates = (channel >= DIM - ROTARY_DIM) & (channel < DIM)
    angles = tl.load(rotation_rows + (channel - (DIM - ROTARY_DIM)), mask=rotates & rows_exist, other=0.0)
    cosine, sine = tl.split(tl.reshape(angles, (angles.shape[0], PADDED_DIM // 2, 2)))
    pair = tl.arange(0, PADDED_DIM // 2)[None, :]
    rotates = (pair >= (DIM - ROTARY_DIM) // 2) & (pair < DIM // 2)
    if INVERSE:
        sine = sine * -1.0
    turned_real = tl.fma(real, cosine, (imaginary * sine) * -1.0)
    turned_imaginary = tl.fma(real, sine, imaginary * cosine)
    return (
        tl.where(rotates, round_to(turned_real, dtype).to(tl.float32), real),
        tl.where(rotates, round_to(turned_imaginary, dtype).to(tl.float32), imaginary),
    )
