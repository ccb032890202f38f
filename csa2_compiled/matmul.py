"""Products of low-precision tensors with float32 accumulation and float32 results."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MANY_ROWS = 256  # from here on a float32 product costs more than splitting its weight


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of operands of one dtype [N, M, P] x [N, P, Q], accumulated and returned in float32.

    On CUDA tensor cores multiply 16-bit operands, exactly. float64 operands stay float64.
    """
    if _takes_tensor_cores(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(wide), b.to(wide))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Batched weights [N, M, P], float32 or wider, times values [N, P, Q]; the result has the weights' dtype.

    Where tensor cores multiply 16-bit values, each weight goes in as the sum of two 16-bit numbers: of bfloat16 they
    keep 16 of its 24 bits, of float16 all but 2^-25.
    """
    if not _takes_tensor_cores(values, weights):
        return torch.bmm(weights, values.to(weights.dtype))
    high = weights.to(values.dtype)
    halves = torch.cat([high, (weights - high).to(values.dtype)], dim=1)
    return matmul_float32(halves, values).unflatten(1, (2, weights.shape[1])).sum(1)


def linear_float32(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [B, S, K] times the transposes of float32 weights [N, K], in float32 or wider: [B, S, N of all together].

    Where tensor cores multiply bfloat16 activations, a weight goes in as the sum of three bfloat16 numbers, which
    keep all of its 24 bits, so that every product is exact, as in float32, and only sums round. For a few rows that
    costs more than it saves.
    """
    rows = x.shape[0] * x.shape[1]
    if x.dtype is not torch.bfloat16 or not _takes_tensor_cores(x, weights[0]) or rows < _MANY_ROWS:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.cat([F.linear(wide, weight.to(wide.dtype)) for weight in weights], dim=-1)
    parts, rest = [], torch.cat(list(weights))
    for _ in range(3):
        parts.append(rest.to(x.dtype))
        rest = rest - parts[-1]
    products = torch.mm(x.flatten(0, 1), torch.cat(parts).t(), out_dtype=torch.float32)
    return products.unflatten(1, (3, rest.shape[0])).sum(1).view(*x.shape[:2], rest.shape[0])


def _takes_tensor_cores(a: Tensor, b: Tensor) -> bool:
    # A product with another output dtype has no gradient.
    trains = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return a.dtype in _LOW_PRECISION and a.device.type == "cuda" and not trains
