"""Quantize-dequantize boundaries of CSA2's keys and index queries, and their packed storage (SPEC section 2).

| name  | used on                   | group | scale                                               | element |
| ----- | ------------------------- | ----- | --------------------------------------------------- | ------- |
| fp8   | window keys               | 32    | E8M0: 2^ceil(log2(max(amax, 1e-4) * (1/448)))       | E4M3    |
| nvfp4 | compressed keys           | 16    | E4M3: max(amax, 6 * 2^-9) / 6, rounded, at most 448 | E2M1    |
| mxfp4 | index queries, index keys | 32    | E8M0: 2^ceil(log2(max(amax, 6 * 2^-126) * (1/6)))   | E2M1    |

``amax`` is the largest magnitude of a group of consecutive values along the last dimension. An element is
value / scale rounded to nearest, ties to even code. Outside of what the formats can hold:

- The sign is always kept: -0.0, and a negative value that rounds to zero, leave as -0.0.
- A NaN or an infinity in a group turns the whole group into NaN; nothing is raised.
- nvfp4 has no scale above 448, so its magnitudes saturate at 6 * 448 = 2688.
- In fp8 and mxfp4 the top of the input dtype's range can round up to a power of two beyond it: to infinity.

No quotient is left to ``/``: eager CUDA divides by a Python number through its reciprocal and Triton's fp32
division is not correctly rounded, so values near a tie would land in other bins. The steps here are exact or
correctly rounded, also where a compiler fuses multiply and add, hence the same bits on every backend.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANTISSA_BITS, MANTISSA_MASK, EXPONENT_MASK = 23, 0x007FFFFF, 0x7F800000  # of fp32; its exponent bias is 127
HEAD_MASK = -1 << 12  # the upper 12 significant bits of an fp32
# Stored mantissa bits, least exponent of a normal value, largest value.
MINIFLOATS = {"e4m3": (3, -6, 448.0), "e2m1": (1, 0, 6.0)}


@dataclass(frozen=True)
class QuantizationFormat:
    """``group_size`` values share a one-byte scale, made from their amax, but at least ``amax_floor``."""

    name: str
    group_size: int
    element: Literal["e4m3", "e2m1"]
    element_max: float
    elements_per_byte: int
    scale: Literal["e8m0", "e4m3"]
    amax_floor: float


FORMATS: dict[str, QuantizationFormat] = {
    "fp8": QuantizationFormat("fp8", 32, "e4m3", 448.0, 1, "e8m0", 1e-4),
    "nvfp4": QuantizationFormat("nvfp4", 16, "e2m1", 6.0, 2, "e4m3", 6 * 2.0**-9),
    "mxfp4": QuantizationFormat("mxfp4", 32, "e2m1", 6.0, 2, "e8m0", 6 * 2.0**-126),
}


@dataclass(frozen=True)
class PackedTensor:
    """A tensor [..., D] as bytes: ``codes`` [..., D or D / 2], ``scales`` [..., D / group_size], both uint8.

    E2M1 codes lie two in a byte, the even index in the low nibble. E8M0 is 2^(byte - 127), 255 is NaN.
    ``dtype`` is what :func:`unpack` returns.
    """

    codes: Tensor
    scales: Tensor
    format_name: str
    dtype: torch.dtype


def quantize_dequantize_body(x: Tensor, format_name: str) -> Tensor:
    """Round ``x`` to what the format can hold (SPEC section 2), as plain tensor code without autograd.

    Args:
        x: [..., D], fp16, bf16, fp32 or fp64; D a multiple of the format's group size. Arithmetic is fp32.
        format_name: "fp8", "nvfp4" or "mxfp4".

    Returns:
        [..., D], contiguous, in the dtype of ``x``; for NaN, infinity and -0.0 see the module's docstring.

    Raises:
        ValueError: unknown format, D not a multiple of the group size, or a dtype not in ``DTYPES``.
    """
    elements, scales = _quantize(x, format_name)
    return (elements * scales).flatten(-2).to(x.dtype).contiguous()


def pack(x: Tensor, format_name: str) -> PackedTensor:
    """Quantize ``x`` [..., D] into bytes. Arguments and errors as in :func:`quantize_dequantize_body`."""
    quantization_format = _find_format(format_name)
    grouped_elements, grouped_scales = _quantize(x, format_name)
    elements, scales = grouped_elements.flatten(-2), grouped_scales.squeeze(-1)
    if quantization_format.scale == "e8m0":
        scale_codes = (scales.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)
    else:
        scale_codes = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    if quantization_format.element == "e4m3":
        codes = elements.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        nibbles = _e2m1_codes(elements).unflatten(-1, (x.shape[-1] // 2, 2))
        codes = (nibbles[..., 0] | (nibbles[..., 1] << 4)).to(torch.uint8)
    return PackedTensor(codes, scale_codes, format_name, x.dtype)


def unpack(packed: PackedTensor) -> Tensor:
    """The values of a packed tensor, [..., D] in ``packed.dtype``.

    ``unpack(pack(x, name))`` has the bits of ``quantize_dequantize_body(x, name)``, NaN payloads aside.

    Raises:
        ValueError: unknown format, or shapes of codes and scales that do not fit together.
    """
    quantization_format = _find_format(packed.format_name)
    *rows, groups = packed.scales.shape
    shape = (*rows, groups * quantization_format.group_size // quantization_format.elements_per_byte)
    if packed.codes.shape != shape:
        raise ValueError(
            f"packed.codes has shape {tuple(packed.codes.shape)}; allowed for {packed.format_name} with "
            f"packed.scales of shape {tuple(packed.scales.shape)}: {shape}"
        )
    if quantization_format.scale == "e8m0":
        scales = _power_of_two(packed.scales.to(torch.int32))
    else:
        scales = packed.scales.view(torch.float8_e4m3fn).to(torch.float32)
    if quantization_format.element == "e4m3":
        elements = packed.codes.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        codes = packed.codes.to(torch.int32)
        elements = _e2m1_values(torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2))
    elements = elements.unflatten(-1, (groups, quantization_format.group_size))
    return (elements * scales.unsqueeze(-1)).flatten(-2).to(packed.dtype)


def row_bytes(dim: int, format_name: str) -> int:
    """Bytes that ``dim`` values take when packed, scales included: 528 for 512 values in fp8.

    Raises:
        ValueError: unknown format, or ``dim`` not a multiple of its group size.
    """
    quantization_format = _find_format(format_name)
    _check_groups("dim", dim, quantization_format)
    return dim // quantization_format.elements_per_byte + dim // quantization_format.group_size


def _find_format(format_name: str) -> QuantizationFormat:
    if format_name not in FORMATS:
        raise ValueError(f"format_name is {format_name!r}; allowed: {', '.join(map(repr, FORMATS))}")
    return FORMATS[format_name]


def _check_groups(argument: str, dim: int, quantization_format: QuantizationFormat) -> None:
    group_size = quantization_format.group_size
    if dim % group_size != 0:
        raise ValueError(f"{argument} is {dim}; allowed for {quantization_format.name}: multiples of {group_size}")


def _quantize(x: Tensor, format_name: str) -> tuple[Tensor, Tensor]:
    """Elements [..., D / group_size, group_size] and scales [..., D / group_size, 1], both as fp32 values."""
    quantization_format = _find_format(format_name)
    if x.dtype not in DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if x.ndim == 0:
        raise ValueError("x has no dimensions; allowed: [..., D]")
    _check_groups("x.shape[-1]", x.shape[-1], quantization_format)

    groups = x.shape[-1] // quantization_format.group_size
    values = _to_float32(x).unflatten(-1, (groups, quantization_format.group_size))
    amax = values.abs().amax(dim=-1, keepdim=True).clamp(min=quantization_format.amax_floor)
    if quantization_format.scale == "e8m0":
        scales = _power_of_two_ceiling(amax * (1 / quantization_format.element_max))
        # As good as a division: by a power of two, both round the same real number.
        quotients = values * _power_of_two_reciprocal(scales)
    else:
        scales = _round_to_minifloat(_divide(amax, quantization_format.element_max), "e4m3")
        quotients = _divide(values, scales)
    return _round_to_minifloat(quotients, quantization_format.element), scales


def _to_float32(x: Tensor) -> Tensor:
    """``x`` in fp32, with 16-bit rounding also where a compiler fuses the op that made ``x``."""
    if x.dtype.itemsize == 2:
        # Inductor drops a cast to 16 bits and back (a bare view and back too), and would quantize values that
        # the model does not have. It keeps integer casts.
        x = x.view(torch.int16).to(torch.int32).to(torch.int16).view(x.dtype)
    return x.to(torch.float32)


def _divide(value: Tensor, divisor: Tensor | float) -> Tensor:
    """value / divisor, correctly rounded; infinity gives NaN. divisor > 0 has at most 12 significant bits."""
    inverse = 1 / divisor
    # Only bits of this product are used, since a compiler may fuse it, unrounded, into a following sum.
    head = ((value * inverse).view(torch.int32) & HEAD_MASK).view(torch.float32)
    # The remainder is exact: a product of at most 24 bits, the difference of close numbers.
    quotient = head + (value - head * divisor) * inverse
    return torch.copysign(quotient, value)  # the sum loses the sign of -0.0


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) for int32 biased exponents; NaN from 255 on."""
    return torch.where(exponents < 255, (exponents << MANTISSA_BITS).view(torch.float32), float("nan"))


def _power_of_two_ceiling(value: Tensor) -> Tensor:
    """The least power of two that is not below ``value``, positive and normal; NaN for NaN and infinity."""
    bits = value.view(torch.int32)
    exponents = (bits & EXPONENT_MASK) >> MANTISSA_BITS  # masked, since vectorized maxima set the sign of NaN
    return _power_of_two(exponents + ((bits & MANTISSA_MASK) != 0).to(torch.int32))


def _power_of_two_reciprocal(value: Tensor) -> Tensor:
    """1 / value for powers of two in [2^-126, 2^126]: biased exponents e and 254 - e."""
    return ((254 << MANTISSA_BITS) - value.view(torch.int32)).view(torch.float32)


def _round_to_minifloat(value: Tensor, minifloat: Literal["e4m3", "e2m1"]) -> Tensor:
    """The nearest E4M3 or E2M1 value, ties to even code, clamped to the largest; NaN stays NaN.

    For E4M3 this equals a cast to float8_e4m3fn, which Triton lacks before compute capability 8.9.
    """
    mantissa_bits, least_exponent, largest = MINIFLOATS[minifloat]
    value = value.clamp(-largest, largest)
    # A binade's values are 2^(exponent - mantissa_bits) apart, subnormal ones as those of the least exponent.
    exponent_bits = (value.view(torch.int32) & EXPONENT_MASK).clamp(min=(127 + least_exponent) << MANTISSA_BITS)
    step = (exponent_bits - (mantissa_bits << MANTISSA_BITS)).view(torch.float32)
    return torch.round(value * _power_of_two_reciprocal(step)) * step


def _e2m1_codes(elements: Tensor) -> Tensor:
    """E2M1 values to int32 codes: 0, .5, 1, 1.5, 2, 3, 4, 6 are 0 to 7, bit 3 is the sign."""
    magnitude = elements.abs()
    code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), 0.5 * magnitude + 4)
    return code.to(torch.int32) | ((elements.view(torch.int32) >> 28) & 8)


def _e2m1_values(codes: Tensor) -> Tensor:
    """The inverse of :func:`_e2m1_codes`."""
    code = (codes & 7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(0.5 * code, code - 2), 2 * code - 8)
    return (magnitude.view(torch.int32) | ((codes & 8) << 28)).view(torch.float32)
