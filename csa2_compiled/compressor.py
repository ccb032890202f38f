"""The compressor: groups of r tokens become one latent each."""

from typing import Any

import torch
from torch import Tensor, nn

from csa2_compiled.config import CSA2Config
from csa2_compiled.masks.window import ring_and_fresh
from csa2_compiled.matmul import linear_float32
from csa2_compiled.norm import RMSNorm
from csa2_compiled.rows import write_rows
from csa2_compiled.tokens import Tokens


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
        return self._pool(self._values_and_gates(x[:, : groups * self.ratio]), x.dtype)

    def extend(self, x: Tensor, tokens: Tokens, ring: Tensor | None) -> Tensor:
        """Latents [B, n, head_dim] of `tokens.new_groups`; those that stay incomplete hold nothing of use.

        x: [B, S, hidden], after the tokens of a cache. ring: its values and gates, [B, ring + 1, 2 head_dim], which
        these tokens' own join; None for ratio 1.
        """
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        assert ring is not None
        assert tokens.past is not None
        fresh = self._values_and_gates(x)
        groups, complete = tokens.new_groups(self.ratio)
        members = groups.unsqueeze(-1) * self.ratio + torch.arange(self.ratio, device=x.device)  # [B, n, r]
        source = ring_and_fresh(members, tokens.past[:, None, None], ring.shape[1])
        rows = torch.where(complete.unsqueeze(-1), source, 0).flatten(1)
        together = torch.cat([ring, fresh], dim=1).gather(1, rows.unsqueeze(-1).expand(-1, -1, fresh.shape[-1]))
        write_rows(ring, tokens.ring_rows(ring.shape[1] - 1), fresh)
        return self._pool(together, x.dtype)

    def _values_and_gates(self, x: Tensor) -> Tensor:
        """[B, S, 2 head_dim], at least float32."""
        return linear_float32(x, (self.wkv.weight, self.wgate.weight))

    def _pool(self, values_and_gates: Tensor, dtype: torch.dtype) -> Tensor:
        """Softmax pooling of each `ratio` consecutive rows, then cast and norm."""
        groups = values_and_gates.shape[1] // self.ratio
        values, gates = values_and_gates.unflatten(1, (groups, self.ratio)).chunk(2, dim=-1)
        return self.norm((values * gates.softmax(dim=2)).sum(dim=2).to(dtype))
