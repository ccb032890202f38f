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

No step is a division: eager CUDA divides by a Python number through its reciprocal and Triton's division of
fp32 is not correctly rounded, so values near a tie would land in other bins. Every step is exact or one
correctly rounded fp32 operation, hence the same bits on every backend.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANTISSA_BITS, MANTISSA_MASK, EXPONENT_MASK = 23, 0x007FFFFF, 0x7F800000  # of fp32; its exponent bias is 127
# Ties between neighbouring E2M1 magnitudes and the distance of the two, by where the even code is.
E2M1_TIES_DOWN = ((0.25, 0.5), (1.25, 0.5), (2.5, 1.0), (5.0, 2.0))
E2M1_TIES_UP = ((0.75, 0.5), (1.75, 0.5), (3.5, 1.0))


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


class PackedTensor(NamedTuple):
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
        raise ValueError(
            f"{argument} is {dim}; allowed for {quantization_format.name}: multiples of {group_size}"
        )


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
    else:
        scales = _round_to_e4m3(_divide_by_six(amax))
    if quantization_format.element == "e4m3":
        # As good as a division: by a power of two, both round the same real number.
        return _round_to_e4m3(values * _power_of_two_reciprocal(scales)), scales
    return _round_to_e2m1(values, scales), scales


def _to_float32(x: Tensor) -> Tensor:
    """``x`` in fp32, with 16-bit rounding also where a compiler fuses the op that made ``x``."""
    if x.dtype.itemsize == 2:
        # Inductor drops a cast to 16 bits and back, and would quantize values that the model does not have.
        x = x.view(torch.int16).view(x.dtype)
    return x.to(torch.float32)


def _divide_by_six(value: Tensor) -> Tensor:
    """value / 6, correctly rounded; infinity gives NaN."""
    quotient = value * (1 / 6)
    # Both differences are exact, being of close numbers, also where a compiler fuses multiply and add.
    remainder = (value - 4 * quotient) - 2 * quotient
    return quotient + remainder * (1 / 6)


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


def _round_to_e4m3(value: Tensor) -> Tensor:
    """The nearest E4M3 value, ties to even code, clamped to ±448; NaN stays NaN.

    Equals a cast to float8_e4m3fn and back, without a dtype that Triton lacks before compute capability 8.9.
    """
    value = value.clamp(-448.0, 448.0)
    # Three mantissa bits; below 2^-6 the values are subnormal, 2^-9 apart.
    exponent_bits = (value.view(torch.int32) & EXPONENT_MASK).clamp(min=(127 - 6) << MANTISSA_BITS)
    step = (exponent_bits - (3 << MANTISSA_BITS)).view(torch.float32)
    return torch.round(value * _power_of_two_reciprocal(step)) * step


def _round_to_e2m1(value: Tensor, scales: Tensor) -> Tensor:
    """value / scales as the nearest E2M1 value, ties to even code, clamped to ±6, sign kept.

    Comparing |value| with tie * scale equals comparing fp32(|value| / scale) with tie: the product is exact
    (3 and 4 significant bits), and the quotients of its fp32 neighbours do not round onto the tie. The latter
    is tested for every scale; as rounding is monotone, the neighbours stand for all values.
    """
    magnitude = value.abs()
    element = torch.zeros_like(magnitude)
    for tie, distance in E2M1_TIES_DOWN:
        element = element + (magnitude > tie * scales).to(torch.float32) * distance
    for tie, distance in E2M1_TIES_UP:
        element = element + (magnitude >= tie * scales).to(torch.float32) * distance
    return torch.copysign(element, value)


def _e2m1_codes(elements: Tensor) -> Tensor:
    """E2M1 values to int32 codes: 0, .5, 1, 1.5, 2, 3, 4, 6 are 0 to 7, bit 3 is the sign."""
    magnitude = elements.abs()
    code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), 0.5 * magnitude + 4)
    return code.to(torch.int32) | (torch.signbit(elements).to(torch.int32) << 3)


def _e2m1_values(codes: Tensor) -> Tensor:
    """The inverse of :func:`_e2m1_codes`."""
    code = (codes & 7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(0.5 * code, code - 2), 2 * code - 8)
    return magnitude * (1.0 - 2.0 * (codes >> 3).to(torch.float32))
