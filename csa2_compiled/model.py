"""A compact host model around the attention: embedding, pre-norm blocks, head. Byte-level by default.

It is there to be compiled, trained and generated from; it is not all of V4.1 (no mixture of experts).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from csa2_compiled.attention import CSA2Attention
from csa2_compiled.cache import CSA2Cache, LayerCache, check_cache
from csa2_compiled.config import CSA2Config
from csa2_compiled.masks.layout import AttentionLayout
from csa2_compiled.norm import RMSNorm
from csa2_compiled.selection import SelectionRecord
from csa2_compiled.state import CSA2Output, CSA2State
from csa2_compiled.tokens import (
    CSA2InputError,
    Tokens,
    check_token_arguments,
    group_alignment,
    is_capturing,
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

    def forward(
        self,
        x: Tensor,
        state: CSA2State,
        tokens: Tokens,
        cache: LayerCache | None = None,
        record: SelectionRecord | None = None,
    ) -> CSA2Output:
        """x: [B, S, hidden_size] and what the layer before published; returns the same for the next.

        record: as in `CSA2Attention.forward`.
        """
        attended = self.attn(self.attn_norm(x), state, cache=cache, tokens=tokens, record=record)
        x = x + attended.hidden_states
        return CSA2Output(x + self.ffn(self.ffn_norm(x)), attended.state)


RunBlock = Callable[..., CSA2Output]  # (block, and what it is called with)


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
        cache: CSA2Cache | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        run_block: RunBlock | None = None,
    ) -> Tensor:
        """Next-token logits [B, S, vocab_size] of input_ids, int [B, S].

        cache: what came before; it then holds these tokens too (``cache.advance`` can give some back), and nothing
        has a gradient. attention_mask, document_ids: see `CSA2Attention.forward`. run_block: runs one block in place
        of calling it, for those who compile or record blocks one by one. Raises CSA2InputError.
        """
        if torch.compiler.is_compiling():
            return self._logits(input_ids, cache, attention_mask, document_ids, run_block)
        with self.begin(input_ids, cache, attention_mask, document_ids):
            return self._logits(input_ids, cache, attention_mask, document_ids, run_block)

    @contextmanager
    def begin(
        self,
        input_ids: Tensor,
        cache: CSA2Cache | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Iterator[None]:
        """What a call needs around it on the host: checked inputs, and a cache's step without gradients."""
        self.check_inputs(input_ids, cache, attention_mask, document_ids)
        step = nullcontext() if cache is None else cache.step(input_ids.shape[1], attention_mask)
        with step, torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            yield

    def _logits(
        self,
        input_ids: Tensor,
        cache: CSA2Cache | None,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        run_block: RunBlock | None,
    ) -> Tensor:
        past = None if cache is None else cache.lengths
        tokens = lay_out_tokens(input_ids.shape[1], input_ids.device, attention_mask, document_ids, past)
        layer_caches = (None,) * len(self.layers) if cache is None else cache.layers
        x, state = self.embed(input_ids), CSA2State()
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            block = cast(CSA2Block, layer)
            inputs = (x, state, tokens) if layer_cache is None else (x, state, tokens, layer_cache)
            output = block(*inputs) if run_block is None else run_block(block, *inputs)
            x, state = output.hidden_states, output.state
        return self.head(self.norm(x))

    def check_inputs(
        self,
        input_ids: Tensor,
        cache: CSA2Cache | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> None:
        """Raise CSA2InputError for inputs that `forward` cannot take; reads their values.

        While a CUDA graph is captured values cannot be read, and only shapes and dtypes are checked.
        """
        if not isinstance(input_ids, Tensor):
            raise CSA2InputError(
                f"input_ids is a {type(input_ids).__name__}; it must be an integer tensor [batch, tokens]"
            )
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
        if not is_capturing(input_ids.device):
            self._check_values(input_ids, attention_mask, document_ids)
        if cache is None:
            self._check_layouts()
        else:
            self._check_cache(cache, input_ids, attention_mask, document_ids)

    def _check_values(self, input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None) -> None:
        if input_ids.min() < 0 or input_ids.max() >= self.cfg.vocab_size:
            raise CSA2InputError(
                f"input_ids holds {int(input_ids.min())} to {int(input_ids.max())}; token ids must be within "
                f"0 and vocab_size - 1 = {self.cfg.vocab_size - 1}"
            )
        alignment = group_alignment(self.cfg.compress_ratios)
        check_token_arguments(input_ids.shape[0], input_ids.shape[1], alignment, attention_mask, document_ids)

    def _check_layouts(self) -> None:
        """What every layer checks of its own layout, before anything is computed or compiled."""
        blocks = [cast(CSA2Block, layer) for layer in self.layers]
        if all(block.attn.layout in (AttentionLayout.AUTO, AttentionLayout.PLAIN) for block in blocks):
            return
        before: list[Tensor] = [self.embed.weight]
        for block in blocks:
            block.attn.check_layout(*before, block.attn_norm.weight)
            before += (parameter for name, parameter in block.named_parameters() if ".indexer." not in name)

    def _check_cache(
        self, cache: CSA2Cache, input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None
    ) -> None:
        if not isinstance(cache, CSA2Cache):
            raise CSA2InputError(f"cache is a {type(cache).__name__}; it must be a CSA2Cache")
        check_cache(cache, self.cfg, input_ids, self.embed.weight.dtype, document_ids)
        for layer in self.layers:
            if cast(CSA2Block, layer).attn.layout is AttentionLayout.DENSE:
                raise CSA2InputError(
                    "cache was given and a layer's layout is dense, which has no cached form; use auto, slots or plain"
                )
        cache.check_step(input_ids.shape[1], attention_mask)
