"""The indexer: scores compressed positions for every query and selects the best."""

from typing import Any

import torch
from torch import Tensor, nn

from csa2_compiled import ops
from csa2_compiled.config import CSA2Config
from csa2_compiled.norm import RMSNorm


class Indexer(nn.Module):
    """Index queries and head weights; on layers that publish index keys also those.

    The selection is discrete and gives no gradient, so the layer runs all of this without one; the distillation loss
    (`csa2_compiled.distillation`) gives one.
    """

    def __init__(
        self,
        cfg: CSA2Config,
        makes_keys: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.heads, self.dim = cfg.index_n_heads, cfg.index_head_dim
        weights: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.wq_b = nn.Linear(cfg.q_lora_rank, self.heads * self.dim, **weights)
        self.weights_proj = nn.Linear(cfg.hidden_size, self.heads, **weights)
        if makes_keys:
            self.wk = nn.Linear(cfg.head_dim, self.dim, **weights)
            self.k_norm = RMSNorm(self.dim, cfg.rms_norm_eps, device)

    def keys(self, latent: Tensor, rotations: Tensor) -> Tensor:
        """Index keys of latents [B, T, D] before their RoPE: [B, T, Di], rotated and in mxfp4."""
        rotated = ops.apply_rope(self.k_norm(self.wk(latent)), rotations, False)
        return ops.quantize_dequantize(rotated, "mxfp4")

    def scores(
        self,
        x: Tensor,
        q_latent: Tensor,
        rotations: Tensor,
        index_keys: Tensor,
        visible_start: Tensor,
        visible_stop: Tensor,
    ) -> Tensor:
        """Index scores float32 [B, S, T] of x [B, S, hidden] and the query latent [B, S, q_lora_rank].

        Position t is visible when visible_start <= t < visible_stop (int32 [B, S]); -inf elsewhere.
        """
        q, weights = self.queries(x, q_latent, rotations)
        return ops.index_scores(q, index_keys, weights, visible_start, visible_stop)

    def queries(self, x: Tensor, q_latent: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [B, S, Hi, Di], rotated and in mxfp4, and scaled head weights, float32 [B, S, Hi]."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        q = ops.quantize_dequantize(ops.apply_rope(q, rotations, False), "mxfp4")
        weights = self.weights_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, weights * (self.dim**-0.5 * self.heads**-0.5)
