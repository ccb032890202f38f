"""Rows of a cache, [B, N, D]: as values, or packed into the bytes of a quantization format."""

from dataclasses import replace

import torch
from torch import Tensor

from csa2_compiled import ops
from csa2_compiled.quantization import FORMATS, PackedTensor, pack, unpack

Rows = Tensor | PackedTensor


def empty_rows(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, format_name: str | None) -> Rows:
    """Rows [B, N, D] of zeros; packed when a format is named."""
    if format_name is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    *leading, dim = shape
    quantization_format = FORMATS[format_name]
    codes, scales = dim // quantization_format.elements_per_byte, dim // quantization_format.group_size
    return PackedTensor(
        torch.zeros(*leading, codes, dtype=torch.uint8, device=device),
        torch.zeros(*leading, scales, dtype=torch.uint8, device=device),
        format_name,
        dtype,
    )


def buffers(rows: Rows) -> tuple[Tensor, ...]:
    """The tensors that hold the rows, [B, N, ...] each."""
    return (rows.codes, rows.scales) if isinstance(rows, PackedTensor) else (rows,)


def first_rows(rows: Rows, count: int) -> Rows:
    """A view of the first `count` rows."""
    if isinstance(rows, PackedTensor):
        return replace(rows, codes=rows.codes[:, :count], scales=rows.scales[:, :count])
    return rows[:, :count]


def read_rows(rows: Rows) -> Tensor:
    """All rows as values [B, N, D]."""
    return unpack(rows) if isinstance(rows, PackedTensor) else rows


def gather_rows(rows: Rows, indices: Tensor) -> Tensor:
    """The rows that each query names: indices int32 [B, S, slots], -1 gives zeros. Returns [B, S, slots, D]."""
    if not isinstance(rows, PackedTensor):
        return ops.gather_kv(rows, indices)
    codes, scales = ops.gather_kv(rows.codes, indices), ops.gather_kv(rows.scales, indices)
    return unpack(replace(rows, codes=codes, scales=scales))  # bytes of 0 are zeros in every format


def write_rows(rows: Rows, numbers: Tensor, values: Tensor) -> None:
    """Put values [B, n, D] into the rows of those numbers, int64 [B, n], in place.

    Packed rows take values that are already quantized to their format, and lose nothing.
    """
    batch = torch.arange(numbers.shape[0], device=numbers.device).unsqueeze(1)
    fresh = _pack_quantized(values, rows.format_name) if isinstance(rows, PackedTensor) else values
    for buffer, written in zip(buffers(rows), buffers(fresh), strict=True):
        buffer[batch, numbers] = written


def _pack_quantized(values: Tensor, format_name: str) -> PackedTensor:
    """The bytes of values that are already quantized; `pack` would quantize them once more."""
    if format_name != "nvfp4":
        return pack(values, format_name)  # finds the same values again
    # An nvfp4 group of scale 2^-8 may have 4 * 2^-8 as its largest value, which would get the scale 2^-9 and be cut
    # to 6 * 2^-9. Its half has the right codes under 2^-9, E4M3 code 1; code 2 is 2^-8.
    groups = values.unflatten(-1, (-1, FORMATS[format_name].group_size))
    halved = groups.abs().amax(-1) == 2.0**-6
    packed = pack(torch.where(halved.unsqueeze(-1), groups / 2, groups).flatten(-2), format_name)
    return replace(packed, scales=packed.scales + halved.to(torch.uint8))
