"""Distillation: what teaches the indexer to score positions as the attention does (SPEC section 5).

A hard selection gives the indexer no gradient, so it is frozen unless this loss is used:

    enable_distillation(model)
    losses = DistillationLosses(stage="dense")
    logits = model(ids, run_block=losses.run_block)
    (cross_entropy(logits, ...) + losses.total()).backward()

For each query the loss is KL(p || softmax(index scores)) over compressed positions. p are the layer's own attention
probabilities (window and sink are part of their softmax), summed over heads and normalized over these positions,
without a gradient. Stage "dense", for the warm-up, has all visible positions and lets the attention see all of them;
stage "sparse" has the selected ones. Only the indexer's parameters get a gradient: what goes into it is detached.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csa2_compiled import masks, ops
from csa2_compiled.attention import CSA2Attention
from csa2_compiled.config import CSA2Config, LayerRole
from csa2_compiled.indexer_math import positions_visible
from csa2_compiled.matmul import matmul_float32
from csa2_compiled.model import CSA2Block, RunBlock
from csa2_compiled.rows import read_rows
from csa2_compiled.state import CSA2Output, CSA2State, Publication
from csa2_compiled.tokens import CSA2InputError, Tokens

Stage = Literal["dense", "sparse"]
_CHUNK_VALUES = 2**27


def enable_distillation(model: nn.Module, enabled: bool = True) -> None:
    """Let the indexers of a model or layer be trained, or freeze them again (as they are made).

    To train nothing else, as in a warm-up, call ``model.requires_grad_(False)`` first. Raises CSA2InputError for a
    model that is no module, or enabled that is no bool.
    """
    if not isinstance(model, nn.Module):
        raise CSA2InputError(f"model is a {type(model).__name__}; it must be a model or a layer, an nn.Module")
    if not isinstance(enabled, bool):
        raise CSA2InputError(f"enabled is {enabled!r}; it must be True or False")
    for layer in model.modules():
        if isinstance(layer, CSA2Attention) and hasattr(layer, "indexer"):
            layer.indexer.requires_grad_(enabled)


def chunk_size_for(cfg: CSA2Config, batch_size: int, seq_len: int) -> int:
    """Queries at a time for which one tensor of the dense stage takes at most half a GiB; at least one.

    The largest has a float32 value a row, query, head and compressed position.
    """
    ratio = min((ratio for ratio in cfg.compress_ratios if ratio), default=1)
    heads = max(cfg.num_attention_heads, cfg.index_n_heads)
    return max(1, min(seq_len, _CHUNK_VALUES // (batch_size * heads * max(1, seq_len // ratio))))


class DistillationLosses:
    """Collects the losses of one model step: its `run_block` is the model's.

    stage, chunk_size: as in `distillation_loss`. inner: runs a block in place of calling it, for instance
    `checkpoint_block`. by_layer: a scalar an index source, by layer number. Make a new one a step: it takes each layer
    once. Raises CSA2InputError for a bad stage or chunk_size, or inner that cannot be called.
    """

    def __init__(self, stage: Stage = "dense", chunk_size: int = 128, inner: RunBlock | None = None) -> None:
        _check(stage, chunk_size)
        if inner is not None and not callable(inner):
            raise CSA2InputError(f"inner is {inner!r}; it must be a function that runs a block, or None")
        self.stage, self.chunk_size, self.inner = stage, chunk_size, inner
        self.by_layer: dict[int, Tensor] = {}

    def run_block(self, block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens, *args: Any) -> CSA2Output:
        """Run a block of a CSA2ForCausalLM, and add its loss if it selects.

        Raises CSA2InputError with a cache, and for a layer whose loss is there already.
        """
        if args:
            raise CSA2InputError("cache was given; distillation needs the whole sequence, so run without one")
        layer = block.attn
        if layer.layer_idx in self.by_layer:
            raise CSA2InputError(
                f"run_block has the loss of layer {layer.layer_idx} from an earlier call of the model; make a new "
                "DistillationLosses for each"
            )
        inputs = (x, state, tokens)
        output = block(*inputs) if self.inner is None else self.inner(block, *inputs)
        if layer.role in (LayerRole.FULL, LayerRole.REINDEX):
            with torch.no_grad():
                normed = block.attn_norm(x)
            loss = distillation_loss(layer, normed, output.state, tokens, self.stage, self.chunk_size)
            self.by_layer[layer.layer_idx] = loss
        return output

    def total(self) -> Tensor:
        """The sum over layers. Raises CSA2InputError when no index source has run."""
        if not self.by_layer:
            raise CSA2InputError("no index source ran with this object's run_block; give it to the model's call")
        return torch.stack(list(self.by_layer.values())).sum()


def distillation_loss(
    layer: CSA2Attention,
    x: Tensor,
    state: CSA2State,
    tokens: Tokens,
    stage: Stage = "dense",
    chunk_size: int = 128,
) -> Tensor:
    """The loss of one index source, a scalar of float32 or wider: the mean over the queries that see a position.

    x: [B, S, hidden_size], the layer's input; state: what the layer returned; tokens: from `lay_out_tokens`.
    chunk_size: queries at a time. The gradient is computed along with the loss, chunk by chunk, so that nothing of
    S x T elements is ever made or kept. Full layers train their index keys as well; reindex layers take the published
    ones as they are. Runs eagerly, also between compiled blocks; the attention is computed anew from x. Raises
    CSA2InputError for a layer that does not select, frozen indexers (while gradients are on), a bad stage or
    chunk_size, and a state without this layer's publication.
    """
    _check(stage, chunk_size)
    publication = _publication(layer, state)
    x = x.detach()
    rotations = layer.rotary(tokens.positions)
    with torch.no_grad():
        target = _target(layer, x, publication, tokens, rotations)
        latent = layer.compressor(x) if layer.role is LayerRole.FULL else None
    if latent is None:
        index_keys = read_rows(publication.index_keys)
    else:
        index_keys = layer.indexer.keys(latent, layer.rotary(tokens.compressed_positions(layer.ratio)))
    index_q, weights = layer.indexer.queries(x, target.q_latent, rotations)
    start, stop = (bound.expand(x.shape[0], -1) for bound in tokens.visible_range(layer.ratio))
    picks = None
    if stage == "sparse":  # positions are counted among the picks, which are ascending with -1 behind them
        picks = publication.topk_indices
        start, stop = torch.zeros_like(start), (picks >= 0).sum(-1).to(torch.int32)
    compared = _Compared(target, picks, start, stop, chunk_size)
    return _MeanDivergence.apply(index_q, index_keys, weights, compared)


@torch.no_grad()
def dense_attention(
    layer: CSA2Attention, x: Tensor, state: CSA2State, tokens: Tokens, chunk_size: int = 128
) -> Iterator[tuple[slice, Tensor]]:
    """What an index source's attention would give to each visible compressed position if it attended to all of them.

    Arguments as in `distillation_loss`. Yields, chunk_size queries at a time, which queries they are and the logarithms
    of their probabilities, summed over heads and normalized over visible positions: [B, n, T] in float32 or wider,
    -inf where not visible, NaN for a query that sees none. Raises CSA2InputError as `distillation_loss` does.
    """
    _check("dense", chunk_size)
    target = _target(layer, x, _publication(layer, state), tokens, layer.rotary(tokens.positions))
    start, stop = (bound.expand(x.shape[0], -1) for bound in tokens.visible_range(layer.ratio))
    for first in range(0, x.shape[1], chunk_size):
        queries = slice(first, first + chunk_size)
        visible = positions_visible(target.compressed_kv.shape[1], start[:, queries], stop[:, queries])
        yield queries, target.log_probabilities(queries, None, visible)


def _target(layer: CSA2Attention, x: Tensor, publication: Publication, tokens: Tokens, rotations: Tensor) -> "_Target":
    return _Target(
        layer,
        layer.q_norm(layer.wq_a(x)),
        rotations,
        layer.window_kv(x, rotations),
        masks.window_indices(x.shape[1], layer.cfg.sliding_window, x.device, tokens.starts),
        read_rows(publication.compressed_kv),
    )


@dataclass(frozen=True)
class _Target:
    """The layer's attention, for the probabilities it gives to compressed positions; used without gradients.

    q_latent: [B, S, q_lora_rank]; rotations: [B or 1, S, R / 2, 2]; window_kv: [B, S, D]; recent: int32 [B or 1, S, W],
    tokens in each query's window; compressed_kv: [B, T, D].
    """

    layer: CSA2Attention
    q_latent: Tensor
    rotations: Tensor
    window_kv: Tensor
    recent: Tensor
    compressed_kv: Tensor

    def log_probabilities(self, queries: slice, picks: Tensor | None, counts: Tensor) -> Tensor:
        """Log of the head-summed, normalized attention [B, n, T or K]; rows that count nothing hold NaN.

        picks: int32 [B, n, K], or None for all positions; counts: bool [B, n, T or K], which of them count.
        """
        cfg = self.layer.cfg
        batch, num_queries = counts.shape[:2]
        q = self.layer.wq_b(self.q_latent[:, queries]).unflatten(-1, (cfg.num_attention_heads, cfg.head_dim))
        q = ops.apply_rope(q, self.rotations[:, queries].contiguous(), False).flatten(0, 1)  # [B * n, H, D]
        recent = self.recent[:, queries].expand(batch, -1, -1).contiguous()
        in_window = self._logits(q, ops.gather_kv(self.window_kv, recent).flatten(0, 1), recent >= 0)
        if picks is None:
            per_row = q.view(batch, -1, cfg.head_dim)
            logits = self._logits(per_row, self.compressed_kv, None).view(*q.shape[:2], -1)
            logits = logits.masked_fill(~counts.flatten(0, 1).unsqueeze(1), float("-inf"))
        else:
            logits = self._logits(q, ops.gather_kv(self.compressed_kv, picks).flatten(0, 1), counts)
        sink = self.layer.attn_sink.to(logits.dtype).view(1, -1, 1).expand(q.shape[0], -1, 1)
        denominator = torch.cat([in_window, sink, logits], dim=-1).logsumexp(-1, keepdim=True)
        of_all_heads = (logits - denominator).logsumexp(1)
        return of_all_heads.log_softmax(-1).unflatten(0, (batch, num_queries))

    def _logits(self, q: Tensor, keys: Tensor, counts: Tensor | None) -> Tensor:
        logits = matmul_float32(q, keys.transpose(1, 2)) * q.shape[-1] ** -0.5
        return logits if counts is None else logits.masked_fill(~counts.flatten(0, 1).unsqueeze(1), float("-inf"))


@dataclass(frozen=True)
class _Compared:
    """Over which positions each query is compared: among all, or among its picks, those from start to stop.

    picks: int32 [B, S, K] or None; start, stop: int32 [B, S].
    """

    target: _Target
    picks: Tensor | None
    start: Tensor
    stop: Tensor
    chunk_size: int

    def divergence(self, queries: slice, q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """Sum over some queries: q [B, n, Hi, Di] and weights [B, n, Hi] are theirs, keys [B, T, Di] of all."""
        start, stop = self.start[:, queries].contiguous(), self.stop[:, queries].contiguous()
        if self.picks is None:
            picks, scores = None, ops.index_scores(q, keys, weights, start, stop)
        else:
            picks = self.picks[:, queries].contiguous()
            # Each query is a row of its own, with its own keys.
            rows = (tensor.flatten(0, 1).unsqueeze(1) for tensor in (q, weights, start, stop))
            own_q, own_weights, own_start, own_stop = (row.contiguous() for row in rows)
            own_keys = ops.gather_kv(keys, picks).flatten(0, 1)
            scores = ops.index_scores(own_q, own_keys, own_weights, own_start, own_stop).view(picks.shape)
        counts = positions_visible(scores.shape[-1], start, stop)
        with torch.no_grad():
            log_p = self.target.log_probabilities(queries, picks, counts).to(scores.dtype)
            p = torch.where(counts, log_p.exp(), 0)
            entropy = -torch.xlogy(p, p).sum()
        # Rows that count nothing would be -inf throughout, and their gradient NaN.
        scores = torch.where((stop > start).unsqueeze(-1), scores, 0)
        log_softmax = torch.where(counts, scores.log_softmax(-1), 0)
        return -(p * log_softmax).sum() - entropy


class _MeanDivergence(torch.autograd.Function):
    """The loss and, in the same pass over the chunks, its gradient for index queries, keys and weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, weights: Tensor, compared: _Compared) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        gradients = [torch.zeros_like(t, dtype=wide) for t in (q, keys, weights)]
        total = torch.zeros((), dtype=wide, device=q.device)
        for first in range(0, q.shape[1], compared.chunk_size):
            queries = slice(first, first + compared.chunk_size)
            wheres = (queries, slice(None), queries)  # each chunk has all keys
            leaves = [t.detach()[:, where].contiguous() for t, where in zip((q, keys, weights), wheres, strict=True)]
            leaves = [leaf.requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True)]
            with torch.enable_grad():
                divergence = compared.divergence(queries, *leaves)
            total += divergence.detach()
            if any(needed):
                trained = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(torch.autograd.grad(divergence, trained))
                for gradient, leaf, where in zip(gradients, leaves, wheres, strict=True):
                    if leaf.requires_grad:
                        gradient[:, where] += next(found)
        count = (compared.stop > compared.start).sum().clamp(min=1)
        ctx.save_for_backward(*((g / count).to(t.dtype) for g, t in zip(gradients, (q, keys, weights), strict=True)))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *((grad * gradient).to(gradient.dtype) for gradient in ctx.saved_tensors), None


def _check(stage: str, chunk_size: int) -> None:
    if stage not in get_args(Stage):
        raise CSA2InputError(f"stage is {stage!r}; it must be one of {', '.join(get_args(Stage))}")
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise CSA2InputError(f"chunk_size is {chunk_size!r}; it must be a positive integer")


def _publication(layer: CSA2Attention, state: CSA2State) -> Publication:
    for name, value, kind in (("layer", layer, CSA2Attention), ("state", state, CSA2State)):
        if not isinstance(value, kind):
            raise CSA2InputError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")
    if layer.role not in (LayerRole.FULL, LayerRole.REINDEX):
        raise CSA2InputError(
            f"layer {layer.layer_idx} is a {layer.role.value} layer, which has no indexer; take a full or reindex layer"
        )
    if torch.is_grad_enabled() and not any(p.requires_grad for p in layer.indexer.parameters()):
        raise CSA2InputError(
            f"layer {layer.layer_idx}'s indexer is frozen; call enable_distillation first, or use torch.no_grad() to "
            "measure only"
        )
    publication = state.of_ratio(layer.ratio)
    if publication is None:
        raise CSA2InputError(
            f"state holds no publication of compress ratio {layer.ratio}; pass the one that layer {layer.layer_idx} "
            "returned"
        )
    return publication
