"""The parts of the attention that `attention.py` times: inputs, ways to compute each, and what judges a result."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from flops import attention_flops, filled_slots, index_score_flops, visible_pairs
from torch import Tensor

from csa2_compiled import AttentionLayout, CSA2Config, masks, ops
from csa2_compiled.compiled import compile_function
from csa2_compiled.passes.inductor import shared_memory_per_block, why_no_gluon_for_hopper
from csa2_compiled.rope import RotaryEmbedding, apply_rope_body
from csa2_compiled.sparse_attention import sparse_attention
from csa2_compiled.tokens import lay_out_tokens

CORE, TURNED_CORE = "attention core", "attention core with RoPE"
SCORES, SELECTION, BOTH, CANDIDATES = "index scores", "selection", "scores + selection", "candidate blocks"
ERROR, AGREEMENT = "error", "agreement"
_RATIO = 1
_SAMPLED_QUERIES = 256
_QUERIES_AT_ONCE = 1024  # of the plain scores, which make [queries, index heads, positions]

Call = partial[Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a layer of ratio 1 hands to the parts, batch 1, quantized as there; scores and topk_indices are plain."""

    cfg: CSA2Config
    q: Tensor  # [1, S, H, D]
    window_kv: Tensor  # [1, S, D]
    recent: Tensor  # int32 [1, S, W]
    compressed_kv: Tensor  # [1, T, D]
    sink: Tensor  # float32 [H]
    rotations: Tensor  # float32 [1, S, R / 2, 2]
    index_q: Tensor  # [1, S, Hi, Di]
    index_k: Tensor  # [1, T, Di]
    weights: Tensor  # float32 [1, S, Hi]
    start: Tensor  # int32 [1, S]
    stop: Tensor  # int32 [1, S]
    scores: Tensor  # float32 [1, S, T]
    topk_indices: Tensor  # int32 [1, S, min(K, T)]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def sampled(self) -> Tensor:
        """Some queries, spread evenly, the first and the last included."""
        last = self.tokens - 1
        return torch.linspace(0, last, min(_SAMPLED_QUERIES, self.tokens), device=self.q.device).round().long()

    @property
    def flops(self) -> tuple[int, int]:
        """Operations of the attention core, counting every slot and counting the filled ones."""
        slots = filled_slots(self.tokens, self.cfg.sliding_window, self.topk_indices)
        every = (self.cfg.sliding_window + self.cfg.index_topk) * self.tokens
        return attention_flops(self.cfg, every), attention_flops(self.cfg, slots)


@dataclass(frozen=True)
class Part:
    """One thing to compute, and the ways to do it by name: eager, to compile with named ops inlined, kernels.

    judge: of a result, its relative error or its agreement with the plain one, as `figure` says. flops: counting
    every slot or pair, and those that are filled or visible; None where nothing multiplies.
    """

    name: str
    eager: Call
    figure: str
    judge: Callable[[Tensor], float]
    flops: tuple[int, int] | None = None
    to_inline: dict[str, Call] = field(default_factory=dict)
    kernels: dict[str, Call] = field(default_factory=dict)


def make_inputs(cfg: CSA2Config, tokens: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random inputs of a layer with `tokens` tokens, the same at every call."""
    torch.manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, dtype=dtype, device=device)

    layout = lay_out_tokens(tokens, device)
    start, stop = (bound.contiguous() for bound in layout.visible_range(_RATIO))
    layer = max(cfg.kv_source_layer_ids)  # one with compressed KV
    rotary = RotaryEmbedding(
        cfg.qk_rope_head_dim, cfg.rotary_parameters(layer), max(tokens, cfg.sliding_window), device
    )
    index_q = ops.quantize_dequantize(random(cfg.index_n_heads, cfg.index_head_dim), "mxfp4")
    index_k = ops.quantize_dequantize(random(cfg.index_head_dim), "mxfp4")
    weights = random(cfg.index_n_heads).float() * (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
    scores = plain_scores(index_q, index_k, weights, start, stop)
    return Inputs(
        cfg=cfg,
        q=random(cfg.num_attention_heads, cfg.head_dim),
        window_kv=ops.quantize_dequantize(random(cfg.head_dim), "fp8"),
        recent=masks.window_indices(tokens, cfg.sliding_window, device).contiguous(),
        compressed_kv=ops.quantize_dequantize(random(cfg.head_dim), "nvfp4"),
        sink=torch.randn(cfg.num_attention_heads, device=device),
        rotations=rotary(layout.positions),
        index_q=index_q,
        index_k=index_k,
        weights=weights,
        start=start,
        stop=stop,
        scores=scores,
        topk_indices=ops.select_topk(scores, None, cfg.index_topk),
    )


def plain_scores(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """`ops.index_scores`, a share of the queries at a time, for memory's sake."""
    pieces = zip(*(x.split(_QUERIES_AT_ONCE, dim=1) for x in (q, weights, start, stop)), strict=True)
    return torch.cat([ops.index_scores(q_, k, *others) for q_, *others in pieces], dim=1)


def make_parts(inputs: Inputs, with_kernels: bool) -> list[Part]:
    """All parts on these inputs, each with its kernels if asked."""
    i, cfg = inputs, inputs.cfg
    kernels = make_kernels(inputs) if with_kernels else {}
    rest = (i.window_kv, i.compressed_kv, i.topk_indices, i.sink, cfg.sliding_window, cfg.index_topk, None)
    indexer = (i.index_q, i.index_k, i.weights, i.start, i.stop)
    select = partial(ops.select_topk, i.scores, None, cfg.index_topk)
    select_both = partial(plain_scores_and_selection, *indexer, cfg.index_topk)
    candidates = partial(
        ops.candidate_blocks, i.scores, i.stop, None, cfg.candidate_topk_blocks, cfg.candidate_block_size
    )
    pairs = i.tokens * i.tokens, visible_pairs(i.tokens, _RATIO)
    score_flops = index_score_flops(cfg, pairs[0]), index_score_flops(cfg, pairs[1])
    overlap = partial(share_of_picks, expected=i.topk_indices, positions=i.scores.shape[-1])
    plain, slots = AttentionLayout.PLAIN, AttentionLayout.SLOTS
    return [
        Part(
            CORE,
            partial(sparse_attention, i.q, *rest, plain),
            ERROR,
            partial(core_error, inputs),
            i.flops,
            {
                "inlined, plain": partial(sparse_attention, i.q, *rest, plain),
                "inlined, FlexAttention": partial(sparse_attention, i.q, *rest, slots),
            },
            kernels.get(CORE, {}),
        ),
        Part(
            TURNED_CORE,
            partial(turned_core, i.q, i.rotations, *rest, plain),
            ERROR,
            partial(core_error, inputs, turned=True),
            i.flops,
            {"inlined, FlexAttention": partial(turned_core, i.q, i.rotations, *rest, slots)},
            kernels.get(TURNED_CORE, {}),
        ),
        Part(
            SCORES,
            partial(ops.index_scores, *indexer),
            ERROR,
            partial(scores_error, inputs),
            score_flops,
            {"inlined": partial(ops.index_scores, *indexer)},
            kernels.get(SCORES, {}),
        ),
        Part(SELECTION, select, AGREEMENT, overlap, None, {"inlined": select}, kernels.get(SELECTION, {})),
        Part(BOTH, select_both, AGREEMENT, overlap, score_flops, {"inlined": select_both}, kernels.get(BOTH, {})),
        Part(
            CANDIDATES,
            candidates,
            AGREEMENT,
            partial(share_of_marks, expected=candidates()),
            None,
            {"inlined": candidates},
            kernels.get(CANDIDATES, {}),
        ),
    ]


def make_kernels(inputs: Inputs) -> dict[str, dict[str, Call]]:
    """The kernels of each part, as the passes launch them."""
    from streaming_selection import scores_and_selection

    from csa2_compiled.passes.kernels import index_scores as score_kernels
    from csa2_compiled.passes.kernels import select_topk as select_kernels

    i, cfg = inputs, inputs.cfg
    indexer = (i.index_q, i.index_k, i.weights, i.start, i.stop)

    def scores_then_selection() -> Tensor:
        scores = score_kernels.index_scores(*indexer, write_invisible=False)
        return select_kernels.select_topk(scores, None, cfg.index_topk, i.start, i.stop)

    blocks = cfg.candidate_topk_blocks, cfg.candidate_block_size
    return {
        CORE: {"kernel": core_kernel(inputs)} | hopper_core(inputs),
        TURNED_CORE: {"kernel": core_kernel(inputs, turned=True)} | hopper_core(inputs, turned=True),
        SCORES: {
            "kernel": partial(score_kernels.index_scores, *indexer, write_invisible=False),
            "kernel, -inf written": partial(score_kernels.index_scores, *indexer),
        },
        SELECTION: {"kernel": partial(select_kernels.select_topk, i.scores, None, cfg.index_topk, i.start, i.stop)},
        BOTH: {
            "kernels": partial(scores_then_selection),
            "one kernel": partial(scores_and_selection, *indexer, cfg.index_topk),
            "one kernel, 8 queries": partial(scores_and_selection, *indexer, cfg.index_topk, queries=8, num_warps=8),
        },
        CANDIDATES: {"kernel": partial(select_kernels.candidate_blocks, i.scores, i.stop, None, *blocks, i.start)},
    }


def core_kernel(inputs: Inputs, turned: bool = False) -> Call:
    """The attention kernel with the tiles that its pass would choose; turned: RoPE inside."""
    from csa2_compiled.passes.kernels.sparse_attention import choose_tiles
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention as attention_kernel

    i = inputs
    _, tokens, heads, dim = i.q.shape
    slots = i.recent.shape[-1] + i.topk_indices.shape[-1]
    memory = (shared_memory_per_block(i.q.device),) if i.q.device.type == "cuda" else ()
    return partial(
        attention_kernel,
        *(i.q, i.sink, i.window_kv, i.recent, i.compressed_kv, i.topk_indices, i.rotations),
        rotate_q=turned,
        rotate_output=turned,
        tiles=choose_tiles(tokens, heads, dim, i.q.element_size(), slots, *memory),
    )


def hopper_core(inputs: Inputs, turned: bool = False) -> dict[str, Call]:
    """The same in Gluon, where the device and Triton have it."""
    i = inputs
    if i.q.device.type != "cuda" or why_no_gluon_for_hopper(i.q.device) is not None:
        return {}
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention

    sources = (i.window_kv, i.recent, i.compressed_kv, i.topk_indices)

    def run() -> Tensor:
        return hopper_attention(i.q, i.sink, *sources, i.rotations, turned, turned)[0]

    return {"Hopper kernel": partial(run)}


def inlined(call: Call) -> Call:
    """The call compiled as a layer is with passes="inline"."""
    function, _ = compile_function(call.func, "inline", dynamic=False)
    return partial(function, *call.args, **call.keywords)


def turned_core(q: Tensor, rotations: Tensor, *others: object) -> Tensor:
    """RoPE of q, the attention core, and the inverse RoPE of its output."""
    attended = sparse_attention(ops.apply_rope(q, rotations, False), *others)  # type: ignore[arg-type]
    return ops.apply_rope(attended, rotations, True)


def plain_scores_and_selection(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, stop: Tensor, topk: int) -> Tensor:
    return ops.select_topk(ops.index_scores(q, k, weights, start, stop), None, topk)


def core_error(inputs: Inputs, out: Tensor, turned: bool = False) -> float:
    """Relative error of sampled queries of out [1, S, H, D] against float64; turned: q and output pass RoPE."""
    i, sampled = inputs, inputs.sampled
    q, rotations = i.q[:, sampled], i.rotations[:, sampled]
    if turned:
        q = ops.apply_rope(q, rotations, False)
    indices = i.recent[:, sampled], i.topk_indices[:, sampled]
    keys = torch.cat([ops.gather_kv(i.window_kv, indices[0]), ops.gather_kv(i.compressed_kv, indices[1])], dim=2)
    keys = keys[0].double()
    logits = torch.einsum("shd,skd->shk", q[0].double(), keys) * q.shape[-1] ** -0.5
    logits = logits.masked_fill((torch.cat(indices, dim=-1)[0] < 0).unsqueeze(1), float("-inf"))
    sink = i.sink.double().view(1, -1, 1).expand(len(sampled), -1, 1)
    expected = torch.cat([sink, logits], dim=-1).softmax(-1)[..., 1:] @ keys
    if turned:
        expected = apply_rope_body(expected.unsqueeze(0), rotations, True)[0]
    return _relative_error(out[0, sampled], expected)


def scores_error(inputs: Inputs, scores: Tensor) -> float:
    """Relative error of the visible scores of sampled queries against float64."""
    i, sampled = inputs, inputs.sampled
    products = torch.einsum("shd,td->sht", i.index_q[0, sampled].double(), i.index_k[0].double()).relu()
    expected = torch.einsum("sht,sh->st", products, i.weights[0, sampled].double())
    visible = torch.arange(scores.shape[-1], device=scores.device) < i.stop[0, sampled].unsqueeze(-1)
    return _relative_error(scores[0, sampled][visible], expected[visible])


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def share_of_picks(selected: Tensor, expected: Tensor, positions: int) -> float:
    """Mean share of each query's expected picks that were selected; both int32 [1, S, K], -1 where empty."""

    def marks(indices: Tensor) -> Tensor:
        columns = torch.where(indices >= 0, indices, positions).long()
        marked = torch.zeros(*indices.shape[:2], positions + 1, dtype=torch.bool, device=indices.device)
        return marked.scatter_(2, columns, True)[..., :-1]

    wanted = marks(expected)
    return ((marks(selected) & wanted).sum(-1) / wanted.sum(-1).clamp(min=1)).mean().item()


def share_of_marks(marks: Tensor, expected: Tensor) -> float:
    """Share of positions that both bool tensors mark alike."""
    return (marks == expected).double().mean().item()
