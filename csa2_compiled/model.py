"""A compact host model around the attention: embedding, pre-norm blocks, head. Byte-level by default.

It is there to be compiled, trained and generated from; it is not all of V4.1 (no mixture of experts).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.config import CSA2Config
from csa2_compiled.norm import RMSNorm
from csa2_compiled.state import CSA2Output, CSA2State
from csa2_compiled.tokens import (
    CSA2InputError,
    Tokens,
    check_token_arguments,
    group_alignment,
    lay_out_tokens,
)


class SwiGLU(nn.Module):
    """Feed-forward network: w2(silu(w1 x) * w3 x)."""

    def __init__(
        self, cfg: CSA2Config, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        weights: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.w1 = nn.Linear(cfg.hidden_size, cfg.intermediate_size, **weights)
        self.w2 = nn.Linear(cfg.intermediate_size, cfg.hidden_size, **weights)
        self.w3 = nn.Linear(cfg.hidden_size, cfg.intermediate_size, **weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class CSA2Block(nn.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(
        self,
        cfg: CSA2Config,
        layer_idx: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, device)
        self.attn = CSA2Attention(cfg, layer_idx, dtype, device)
        self.ffn_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, device)
        self.ffn = SwiGLU(cfg, dtype, device)

    @property
    def kind(self) -> tuple[str, int, bool, bool, str]:
        """See `CSA2Attention.kind`."""
        return self.attn.kind

    def forward(self, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        """x: [B, S, hidden_size] and what the layer before published; returns the same for the next."""
        attended = self.attn(self.attn_norm(x), state, tokens=tokens)
        x = x + attended.hidden_states
        return CSA2Output(x + self.ffn(self.ffn_norm(x)), attended.state)


RunBlock = Callable[[CSA2Block, Tensor, CSA2State, Tokens], CSA2Output]


class CSA2ForCausalLM(nn.Module):
    """Language model over `cfg.vocab_size` tokens (256: bytes).

    Weights are drawn from a normal distribution of `cfg.initializer_range`. dtype, device: as in
    `CSA2Attention`.
    """

    def __init__(
        self, cfg: CSA2Config, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(CSA2Block(cfg, i, dtype, device) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, device)
        self.head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False, dtype=dtype, device=device)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=cfg.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        run_block: RunBlock | None = None,
    ) -> Tensor:
        """Next-token logits [B, S, vocab_size] of input_ids, int [B, S].

        attention_mask, document_ids: see `CSA2Attention.forward`. run_block: runs one block in place of
        calling it, for those who compile or record blocks one by one. Raises CSA2InputError.
        """
        if not torch.compiler.is_compiling():
            self.check_inputs(input_ids, attention_mask, document_ids)
        tokens = lay_out_tokens(input_ids.shape[1], input_ids.device, attention_mask, document_ids)
        x, state = self.embed(input_ids), CSA2State()
        for layer in self.layers:
            block = cast(CSA2Block, layer)
            output = block(x, state, tokens) if run_block is None else run_block(block, x, state, tokens)
            x, state = output.hidden_states, output.state
        return self.head(self.norm(x))

    def check_inputs(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> None:
        """Raise CSA2InputError for inputs that `forward` cannot take; reads their values."""
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise CSA2InputError(
                f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; it must be an int64 or "
                "int32 tensor [batch, tokens]"
            )
        if not 1 <= input_ids.shape[1] <= self.cfg.max_position_embeddings or input_ids.shape[0] < 1:
            raise CSA2InputError(
                f"input_ids has shape {tuple(input_ids.shape)}; it needs at least one row and 1 to "
                f"max_position_embeddings {self.cfg.max_position_embeddings} tokens"
            )
        if input_ids.min() < 0 or input_ids.max() >= self.cfg.vocab_size:
            raise CSA2InputError(
                f"input_ids holds {int(input_ids.min())} to {int(input_ids.max())}; token ids must be within "
                f"0 and vocab_size - 1 = {self.cfg.vocab_size - 1}"
            )
        alignment = group_alignment(self.cfg.compress_ratios)
        check_token_arguments(input_ids.shape[0], input_ids.shape[1], alignment, attention_mask, document_ids)
