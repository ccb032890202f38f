"""RMSNorm in float32."""

import torch
from torch import Tensor, nn

from csa2_compiled import ops


class RMSNorm(nn.Module):
    """Scale a vector to unit mean square, times a weight: float32 inside, cast back last.

    The weight is float32 also in a bfloat16 model.
    """

    def __init__(self, dim: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x: floating [..., dim]. Returns x's shape and dtype."""
        return ops.rms_norm(x, self.weight, self.eps)
