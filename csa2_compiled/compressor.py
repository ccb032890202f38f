"""The compressor: groups of r tokens become one latent each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from csa2_compiled.config import CSA2Config
from csa2_compiled.norm import RMSNorm


class Compressor(nn.Module):
    """Latents of the complete groups of `ratio` consecutive tokens.

    ratio 1: a projection in the activation dtype. ratio > 1: values and gates with float32 weights, pooled a
    channel with softmax(gates) over the group, then cast to the activation dtype.
    """

    def __init__(
        self, cfg: CSA2Config, ratio: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.ratio = ratio
        weights: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype if ratio == 1 else torch.float32}
        self.wkv = nn.Linear(cfg.hidden_size, cfg.head_dim, **weights)
        if ratio > 1:
            self.wgate = nn.Linear(cfg.hidden_size, cfg.head_dim, **weights)
        self.norm = RMSNorm(cfg.head_dim, cfg.rms_norm_eps, device)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, hidden]. Returns [B, S // ratio, head_dim] in x's dtype; a trailing partial group drops."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        groups = x.shape[1] // self.ratio
        wide = x[:, : groups * self.ratio].to(torch.promote_types(x.dtype, torch.float32))
        values = F.linear(wide, self.wkv.weight.to(wide.dtype)).unflatten(1, (groups, self.ratio))
        gates = F.linear(wide, self.wgate.weight.to(wide.dtype)).unflatten(1, (groups, self.ratio))
        pooled = (values * gates.softmax(dim=2)).sum(dim=2)
        return self.norm(pooled.to(x.dtype))
