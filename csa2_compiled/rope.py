"""Rotary position embedding with YaRN frequencies, as the released code computes it.

Adjacent pairs of the last ``rotary_dim`` channels are complex numbers, multiplied by exp(i * position *
frequency) in float32. Rounding follows torch's complex product: quantization comes next, and another
rounding can land in another FP4 or FP8 bin.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from csa2_compiled.config import RotaryParameters, YarnScaling


def rope_frequencies(rotary_dim: int, base: float, yarn: YarnScaling | None = None) -> Tensor:
    """Rotation frequencies in radians per position, float32 [rotary_dim / 2].

    With YaRN (Peng et al., 2023) frequencies that turn less than beta_slow times over the original length
    are divided by the factor, those that turn more than beta_fast times are kept, with a linear ramp in
    between. There is no attention temperature.
    """
    frequencies = 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if yarn is None:
        return frequencies

    def channel_turning(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return rotary_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(channel_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(channel_turning(yarn.beta_slow)), rotary_dim - 1)
    channel = torch.arange(rotary_dim // 2, dtype=torch.float32)
    keep = 1 - ((channel - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * (1 - keep) + frequencies * keep


@dataclass(frozen=True)
class _TableKey:
    rotary_dim: int
    parameters: RotaryParameters
    length: int
    device: torch.device
    fake_mode: object  # of fake tensors, which no real module may get; None otherwise


_TABLES: "weakref.WeakValueDictionary[_TableKey, Tensor]" = weakref.WeakValueDictionary()


def rotary_table(rotary_dim: int, parameters: RotaryParameters, length: int, device: torch.device) -> Tensor:
    """Cosine and sine of every position's angles, float32 [length, rotary_dim / 2, 2].

    Layers that rotate alike on one device share one table (at a million positions and 64 channels it takes
    256 MiB); it is freed with the last of them.
    """
    fake_mode = getattr(torch.empty(0, device=device), "fake_mode", None)
    key = _TableKey(rotary_dim, parameters, length, device, fake_mode)
    table = _TABLES.get(key)
    if table is None:
        # On CPU first, whatever the default device: CUDA's sine and cosine round otherwise (in 18% of the
        # entries), and the same positions should turn alike everywhere.
        with torch.device("meta" if device.type == "meta" else "cpu"):
            frequencies = rope_frequencies(rotary_dim, parameters.base, parameters.yarn)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
            table = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).to(device)
        _TABLES[key] = table
    return table


class RotaryEmbedding(nn.Module):
    """Looks up the rotations of given positions in the shared table."""

    table: Tensor

    def __init__(
        self,
        rotary_dim: int,
        parameters: RotaryParameters,
        length: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.parameters_of_rotation = parameters
        self.length = length
        place = torch.empty(0, device=device).device
        self.register_buffer("table", rotary_table(rotary_dim, parameters, length, place), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """positions: int [B, S] below the table's length. Returns float32 [B, S, rotary_dim / 2, 2]."""
        return self.table[positions]

    def _apply(self, fn, recurse=True):
        # Moving a module moves its table; sharing it and keeping it float32 need the table fetched anew.
        device = fn(torch.empty(0, device=self.table.device)).device
        self.table = rotary_table(self.rotary_dim, self.parameters_of_rotation, self.length, device)
        return self


def apply_rope_body(x: Tensor, rotations: Tensor, inverse: bool) -> Tensor:
    """Rotate the last channels of x (see `csa2_compiled.ops.apply_rope`)."""
    rotary_dim = 2 * rotations.shape[-2]
    kept, rotated = x[..., :-rotary_dim], x[..., -rotary_dim:]
    pairs = torch.view_as_complex(_at_least_float32(rotated).unflatten(-1, (-1, 2)).contiguous())
    turn = torch.view_as_complex(_over_heads(rotations, x).contiguous())
    # Not the lazy conj(): PyTorch ignores its mark in a custom op during the first call of a compiled graph.
    product = pairs * (torch.conj_physical(turn) if inverse else turn)
    return torch.cat([kept, torch.view_as_real(product).flatten(-2).to(x.dtype)], dim=-1)


def apply_rope_real_body(
    x: Tensor,
    rotations: Tensor,
    inverse: bool,
    multiply_add: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The same in real arithmetic, which Inductor can fuse.

    On CPU the complex product rounds each real product separately, and so does this body. On CUDA the second
    product is rounded and the first one fused into the addition: `multiply_add` (a * b + c, rounded once)
    says so. Either way bit-equal to `apply_rope_body` on that device.
    """
    rotary_dim = 2 * rotations.shape[-2]
    if multiply_add is None and rotary_dim % 16 != 0:
        # Only the vectorized loop of CPUs rounds like this. What it leaves of a row goes to a scalar loop,
        # which contracts one product, as CUDA does, on x86 with AVX2.
        return apply_rope_body(x, rotations, inverse)
    kept, rotated = x[..., :-rotary_dim], x[..., -rotary_dim:]
    real, imaginary = _at_least_float32(rotated).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = _over_heads(rotations, x).unbind(-1)
    sine = -sine if inverse else sine
    if multiply_add is None:
        turned = real * cosine - imaginary * sine, real * sine + imaginary * cosine
    else:
        turned = multiply_add(real, cosine, -(imaginary * sine)), multiply_add(real, sine, imaginary * cosine)
    return torch.cat([kept, torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)], dim=-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _over_heads(rotations: Tensor, x: Tensor) -> Tensor:
    # [B, S, R/2, 2] against x [B, S, D] or [B, S, heads, D]
    return rotations.unsqueeze(2) if x.dim() == 4 else rotations
