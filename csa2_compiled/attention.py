"""One CSA2 attention layer, for all four roles."""

from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from csa2_compiled import ops
from csa2_compiled.compressor import Compressor
from csa2_compiled.config import CSA2Config, LayerRole
from csa2_compiled.indexer import Indexer
from csa2_compiled.masks.layout import AttentionLayout, LayoutChoice
from csa2_compiled.norm import RMSNorm
from csa2_compiled.rope import RotaryEmbedding
from csa2_compiled.sparse_attention import layout_for, sparse_attention
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.tokens import (
    CSA2InputError,
    Tokens,
    check_token_arguments,
    group_alignment,
    lay_out_tokens,
)


class CSA2Attention(nn.Module):
    """Attention of layer `layer_idx`: sliding window, selected compressed positions and sink, one softmax.

    ``state_dict()`` has the released names without prefix. dtype: of the activations and dense matrices
    (norms, sink and the pooling of groups stay float32); None is torch's default dtype.
    """

    def __init__(
        self,
        cfg: CSA2Config,
        layer_idx: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.layer_idx = cfg, layer_idx
        self.role = cfg.role(layer_idx)
        self.ratio = cfg.compress_ratios[layer_idx]
        self.publishes_candidates = cfg.publishes_candidates(layer_idx)
        self.selects_within_candidates = cfg.selects_within_candidates(layer_idx)
        self._layout = AttentionLayout.AUTO
        heads, dim = cfg.num_attention_heads, cfg.head_dim
        weights: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.wq_a = nn.Linear(cfg.hidden_size, cfg.q_lora_rank, **weights)
        self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.rms_norm_eps, device)
        self.wq_b = nn.Linear(cfg.q_lora_rank, heads * dim, **weights)
        self.wkv = nn.Linear(cfg.hidden_size, dim, **weights)
        self.kv_norm = RMSNorm(dim, cfg.rms_norm_eps, device)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device))
        self.wo_a = nn.Linear(heads * dim // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank, **weights)
        self.wo_b = nn.Linear(cfg.o_groups * cfg.o_lora_rank, cfg.hidden_size, **weights)
        self.rotary = RotaryEmbedding(
            cfg.qk_rope_head_dim, cfg.rotary_parameters(layer_idx), cfg.max_position_embeddings, device
        )
        if self.role is LayerRole.FULL:
            self.compressor = Compressor(cfg, self.ratio, dtype, device)
        if self.role in (LayerRole.FULL, LayerRole.REINDEX):
            self.indexer = Indexer(cfg, self.role is LayerRole.FULL, dtype, device)
            self.indexer.requires_grad_(False)  # a hard selection gives it no gradient

    def forward(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        tokens: Tokens | None = None,
    ) -> CSA2Output:
        """Attend over a whole sequence.

        x: [B, S, hidden_size]. state: from the layer before; a fresh ``CSA2State()`` (or None) for the first.
        attention_mask: int or bool [B, S], 1 token, 0 right padding; padded queries give 0. document_ids:
        int [B, S], 0 pad, for packed rows. tokens: what a model made of these two, once for all its layers;
        given instead of them. Raises CSA2InputError (a ValueError) before anything is computed.
        """
        state = CSA2State() if state is None else state
        if torch.compiler.is_compiling():
            self._check(x, state)  # a graph cannot read values
        else:
            self.check_inputs(x, state, attention_mask, document_ids, tokens)
        if tokens is None:
            tokens = lay_out_tokens(x.shape[1], x.device, attention_mask, document_ids)

        if self._layout is AttentionLayout.DENSE:
            _make_sizes_static(x, state)
        rotations = self.rotary(tokens.positions)
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).unflatten(-1, (self.cfg.num_attention_heads, self.cfg.head_dim))
        q = ops.apply_rope(q, rotations, False)
        window_kv = self.window_kv(x, rotations)
        state = self._publish(x, q_latent, rotations, state, tokens)

        read = state.of_ratio(self.ratio)
        compressed_kv = None if read is None else read.compressed_kv
        inputs = (q, window_kv, self.attn_sink, *(() if compressed_kv is None else (compressed_kv,)))
        choice = self.choose_layout(
            q, 0 if compressed_kv is None else compressed_kv.shape[1], any(t.requires_grad for t in inputs)
        )
        attended = sparse_attention(
            q,
            window_kv,
            compressed_kv,
            None if read is None else read.topk_indices,
            self.attn_sink,
            self.cfg.sliding_window,
            self.cfg.index_topk,
            tokens.starts,
            choice.layout,
        )
        return CSA2Output(self._project_output(attended, rotations, tokens), state)

    @property
    def layout(self) -> AttentionLayout:
        """How the attention core lays out its keys: "auto", "dense", "slots" or "plain"; may be assigned."""
        return self._layout

    @layout.setter
    def layout(self, layout: AttentionLayout | str) -> None:
        allowed = [choice.value for choice in AttentionLayout]
        if layout not in allowed:
            raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(allowed)}")
        self._layout = AttentionLayout(layout)

    @property
    def kind(self) -> tuple[str, int, bool, bool, str]:
        """Layers of the same kind do the same with other weights, so one compiled region serves them."""
        role, within = self.role.value, self.selects_within_candidates
        return role, self.ratio, self.publishes_candidates, within, self._layout.value

    def check_inputs(
        self,
        x: Tensor,
        state: CSA2State | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Raise CSA2InputError for inputs that `forward` cannot take; reads the values of mask and ids."""
        self._check(x, CSA2State() if state is None else state)
        if tokens is None:
            alignment = group_alignment(self.cfg.compress_ratios)
            check_token_arguments(x.shape[0], x.shape[1], alignment, attention_mask, document_ids)
        elif attention_mask is not None or document_ids is not None:
            name = "document_ids" if attention_mask is None else "attention_mask"
            raise CSA2InputError(f"{name} came besides tokens; tokens stands for both and goes without them")

    def window_kv(self, x: Tensor, rotations: Tensor) -> Tensor:
        """The window key (and value) of each token, after RoPE and fp8: x [B, S, hidden] -> [B, S, D]."""
        kv = ops.apply_rope(self.kv_norm(self.wkv(x)), rotations, False)
        return ops.quantize_dequantize(kv, "fp8")

    def choose_layout(self, q: Tensor, num_compressed: int, trains: bool = False) -> LayoutChoice:
        """The layout this layer takes for q [B, S, H, D] and T compressed positions, with the reason.

        trains: whether any input of the attention core requires a gradient.
        """
        topk = self.cfg.index_topk if self.ratio else 0
        return layout_for(q, num_compressed, topk, self.cfg.sliding_window, self.layout, trains)

    def compiled_layout(self, num_tokens: int) -> LayoutChoice:
        """The layout a compiled call over `num_tokens` tokens takes without gradients; runs nothing."""
        cfg, topk = self.cfg, self.cfg.index_topk if self.ratio else 0
        shape = (1, num_tokens, cfg.num_attention_heads, cfg.head_dim)
        q = torch.empty(shape, dtype=self.wq_a.weight.dtype, device="meta")
        compressed = num_tokens // self.ratio if self.ratio else 0
        device_type = self.wq_a.weight.device.type
        return layout_for(q, compressed, topk, cfg.sliding_window, self.layout, compiling=True, device_type=device_type)

    def _publish(self, x: Tensor, q_latent: Tensor, rotations: Tensor, state: CSA2State, tokens: Tokens) -> CSA2State:
        before = state.of_ratio(self.ratio)
        if self.role is LayerRole.FULL:
            latent = self.compressor(x)
            group_rotations = self.rotary(tokens.compressed_positions(self.ratio))
            compressed_kv = ops.apply_rope(latent, group_rotations, False)
            compressed_kv = ops.quantize_dequantize(compressed_kv, "nvfp4")
            with torch.no_grad():
                index_keys = self.indexer.keys(latent, group_rotations)
        elif self.role is LayerRole.REINDEX and before is not None:
            compressed_kv, index_keys = before.compressed_kv, before.index_keys
        else:
            return state
        candidates = None if before is None else before.candidates
        with torch.no_grad():
            start, stop = tokens.visible_range(self.ratio)
            start, stop = start.expand(x.shape[0], -1), stop.expand(x.shape[0], -1)
            scores = self.indexer.scores(x, q_latent, rotations, index_keys, start, stop)
            within = candidates if self.selects_within_candidates else None
            topk_indices = ops.select_topk(scores, within, self.cfg.index_topk)
            if self.publishes_candidates:
                blocks, size = self.cfg.candidate_topk_blocks, self.cfg.candidate_block_size
                candidates = ops.candidate_blocks(scores, stop, tokens.group_starts(self.ratio), blocks, size)
        return state.publish(Publication(self.ratio, compressed_kv, index_keys, topk_indices, candidates))

    def _project_output(self, attended: Tensor, rotations: Tensor, tokens: Tokens) -> Tensor:
        cfg = self.cfg
        grouped = ops.apply_rope(attended, rotations, True).flatten(2).unflatten(-1, (cfg.o_groups, -1))
        wo_a = self.wo_a.weight.view(cfg.o_groups, cfg.o_lora_rank, -1)
        output = self.wo_b(torch.einsum("bsgd,grd->bsgr", grouped, wo_a).flatten(2))
        if tokens.is_real is None:
            return output
        return torch.where(tokens.is_real.unsqueeze(-1), output, 0)

    def _check(self, x: Tensor, state: CSA2State) -> None:
        cfg = self.cfg
        if x.dim() != 3 or x.shape[-1] != cfg.hidden_size:
            raise CSA2InputError(
                f"x has shape {tuple(x.shape)}; it must be [batch, tokens, hidden_size {cfg.hidden_size}]"
            )
        if x.dtype != self.wq_a.weight.dtype:
            raise CSA2InputError(f"x has dtype {x.dtype}; the layer's is {self.wq_a.weight.dtype}")
        if not 1 <= x.shape[1] <= cfg.max_position_embeddings:
            raise CSA2InputError(
                f"x has {x.shape[1]} tokens; 1 to max_position_embeddings {cfg.max_position_embeddings} are allowed"
            )
        if not isinstance(state, CSA2State):
            raise CSA2InputError(f"state is a {type(state).__name__}; it must be a CSA2State")
        if self.role in (LayerRole.REINDEX, LayerRole.REUSE):
            self._check_source(x, state)
        if self.selects_within_candidates:
            self._check_candidates(x, state)

    def _check_source(self, x: Tensor, state: CSA2State) -> None:
        read = state.of_ratio(self.ratio)
        if read is None:
            had = [p.compress_ratio for p in state.publications]
            found = f"it has ratio {had} only" if had else "it is empty"
            raise CSA2InputError(
                f"state holds no source of compress ratio {self.ratio} for {self._name()}; {found}. Run layer "
                f"{self.cfg.kv_source(self.layer_idx)} first and pass its state on"
            )
        expected = (x.shape[0], x.shape[1] // self.ratio, self.cfg.head_dim)
        if read.compressed_kv.dtype != x.dtype or read.compressed_kv.device != x.device:
            raise CSA2InputError(
                f"state's compressed_kv is {read.compressed_kv.dtype} on {read.compressed_kv.device}; x is {x.dtype} "
                f"on {x.device}, and both must be alike"
            )
        if tuple(read.compressed_kv.shape) != expected:
            raise CSA2InputError(
                f"state's compressed_kv has shape {tuple(read.compressed_kv.shape)}; {self._name()} needs "
                f"{list(expected)} for this x: the state is of another batch or length"
            )
        if read.topk_indices.shape[1] != x.shape[1]:  # lengths that differ in a partial group only
            raise CSA2InputError(
                f"state's topk_indices are of {read.topk_indices.shape[1]} tokens; {self._name()} needs "
                f"{x.shape[1]} for this x: the state is of another length"
            )

    def _check_candidates(self, x: Tensor, state: CSA2State) -> None:
        read = state.of_ratio(self.ratio)
        if read is None or read.candidates is None:
            raise CSA2InputError(
                f"state holds no candidates for {self._name()}; run layer {self.cfg.candidate_source_layer_id} first"
            )
        expected = (x.shape[0], x.shape[1], x.shape[1] // self.ratio)
        if tuple(read.candidates.shape) != expected:
            raise CSA2InputError(
                f"state's candidates have shape {tuple(read.candidates.shape)}; {self._name()} needs "
                f"{list(expected)} for this x: the state is of another batch or length"
            )

    def _name(self) -> str:
        # Called for errors only: reading layer_idx in a compiled region would compile it once a layer.
        return f"layer {self.layer_idx} ({self.role.value}, compress ratio {self.ratio})"


def _make_sizes_static(x: Tensor, state: CSA2State) -> None:
    """Turn symbolic sizes into numbers before anything is traced: dense masks capture them, so a graph a length."""
    for tensor in (x, *(t for p in state.publications for t in (p.compressed_kv, p.index_keys, p.topk_indices))):
        for size in tensor.shape:
            index(size)
