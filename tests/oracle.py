"""A direct, unfused statement of CSA2 (SPEC sections 2, 3 and 5), forward only, to test the library against.

Nothing of the library is imported here. Everything that decides which token sees which is a plain Python loop
over rows and queries, so keep B * S * layers small. One call sees whole documents from their first token: a
decode step is checked by running the longer sequence and looking at its last query.

What the SPEC leaves open and how it is read here:

- Ties go to the lower position, among positions and among candidate blocks.
- Selected indices and candidates are relative to the row, also with packed documents.
- Rows of pad tokens, and of groups that hold a pad, are 0; padded queries select nothing.
- A candidate block ends with its document: it never holds a position of another one.
- Full layers after the candidate source select inside its candidates too; an index source after it that has
  another ratio is a ValueError.
- A document is one unbroken run of its id, and padding without documents is on the right; else ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

E2M1_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3_MAGNITUDES = torch.tensor(
    [
        code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(127)  # code 127 is NaN
    ],
    dtype=torch.float64,
)


def round_to_magnitudes(x: Tensor, magnitudes: Tensor) -> Tensor:
    """Round fp32 values to the nearest of the codes, ties to the even code, saturating at the largest.

    Args:
        x: fp32, any shape.
        magnitudes: fp64 [codes], ascending; a code is its index. Midpoints are exact in fp64.
    """
    magnitude = x.double().abs().clamp(max=magnitudes[-1].item())
    below = torch.searchsorted(magnitudes, magnitude, right=True) - 1
    above = (below + 1).clamp(max=len(magnitudes) - 1)
    to_below = magnitude - magnitudes[below]
    to_above = magnitudes[above] - magnitude
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.copysign(magnitudes[torch.where(take_above, above, below)], x.double()).float()


def power_of_two_ceiling(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x (fp32, positive, normal), without a logarithm."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def quantize_dequantize(x: Tensor, kind: str) -> Tensor:
    """One boundary of SPEC section 2: fp32 inside, the input dtype outside. Gives no gradient.

    Args:
        x: [..., channels], channels a multiple of the group (fp8 and mxfp4 32, nvfp4 16).
        kind: "fp8", "nvfp4" or "mxfp4".
    """
    group = 16 if kind == "nvfp4" else 32
    values = x.detach().float().unflatten(-1, (-1, group))
    amax = values.abs().amax(-1, keepdim=True)
    # The factors are fp32 tensors so that the product rounds as fp32, whatever the host language does.
    if kind == "fp8":
        scale = power_of_two_ceiling(amax.clamp(min=1e-4) * torch.tensor(1 / 448, dtype=torch.float32))
        elements = E4M3_MAGNITUDES
    elif kind == "mxfp4":
        scale = power_of_two_ceiling(amax.clamp(min=6 * 2.0**-126) * torch.tensor(1 / 6, dtype=torch.float32))
        elements = E2M1_MAGNITUDES
    elif kind == "nvfp4":
        scale = round_to_magnitudes(amax.clamp(min=6 * 2.0**-9) / 6, E4M3_MAGNITUDES)
        elements = E2M1_MAGNITUDES
    else:
        raise ValueError(f"unknown quantization {kind!r}")
    return (round_to_magnitudes(values / scale, elements) * scale).flatten(-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in the dtype of x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_frequencies(args: dict[str, Any], ratio: int) -> Tensor:
    """fp32 [R/2] radians per position; YaRN on compressed layers only, when it has an original length."""
    R = args["rope_head_dim"]
    base = args["compress_rope_theta"] if ratio else args["rope_theta"]
    frequencies = 1.0 / base ** (torch.arange(0, R, 2, dtype=torch.float32) / R)
    original_length = args["original_seq_len"]
    if not ratio or original_length <= 0:
        return frequencies

    def corrected(rotations: float) -> float:
        return R * math.log(original_length / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(corrected(args["beta_fast"])), 0)
    high = min(math.ceil(corrected(args["beta_slow"])), R - 1)
    ramp = (torch.arange(R // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequencies / args["rope_factor"] * ramp + frequencies * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """RoPE on the last R channels, adjacent pairs as complex numbers.

    Args:
        x: [B,S,channels] or [B,S,heads,channels].
        positions: int [B,S].
        frequencies: fp32 [R/2]; angles, cosines and sines are fp32, the product has the dtype of x.
        inverse: rotate back.
    """
    angles = positions.float()[..., None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)
    turns = turns.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    if inverse:
        turns = turns.conj()
    if x.ndim == 4:
        turns = turns[:, :, None]
    R = 2 * len(frequencies)
    plain, rotated = x[..., :-R], x[..., -R:]
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([plain, torch.view_as_real(pairs * turns).flatten(-2)], -1)


@dataclass(frozen=True)
class Layout:
    """Where every token of the batch stands: three [B][S] lists.

    document: id, 0 for a pad. start: index in the row of the document's first token. position: index inside
    the document. Start and position of a pad are 0.
    """

    document: list[list[int]]
    start: list[list[int]]
    position: list[list[int]]

    @classmethod
    def of(cls, B: int, S: int, attention_mask: Tensor | None, document_ids: Tensor | None) -> Layout:
        """From attention_mask [B,S] (1 token, 0 pad) and document_ids [B,S] (0 pad), either or none.

        Raises:
            ValueError: a document is not one unbroken run of its id, or padding stands left of a token.
        """
        ids = torch.ones(B, S, dtype=torch.int64) if document_ids is None else document_ids.to(torch.int64)
        if attention_mask is not None:
            ids = torch.where(attention_mask.bool(), ids, 0)
        document = ids.tolist()
        start = [[0] * S for _ in range(B)]
        position = [[0] * S for _ in range(B)]
        for b in range(B):
            starts: dict[int, int] = {}
            for s, name in enumerate(document[b]):
                if name == 0:
                    continue
                first = starts.setdefault(name, s)
                if s != first and document[b][s - 1] != name:
                    raise ValueError(f"row {b}: document {name} is interrupted before token {s}")
                start[b][s], position[b][s] = first, s - first
            if document_ids is None and any(starts.values()):
                raise ValueError(f"row {b}: padding has to be on the right")
        return cls(document, start, position)

    def token_positions(self) -> Tensor:
        """int [B,S]."""
        return torch.tensor(self.position)

    def is_token(self) -> Tensor:
        """bool [B,S]."""
        return torch.tensor(self.document) != 0

    def check_alignment(self, r: int) -> None:
        """Raise ValueError for a document that starts inside a group of r tokens."""
        for b, starts in enumerate(self.start):
            for s in starts:
                if s % r:
                    raise ValueError(f"row {b}: a document starts at token {s}, not a multiple of ratio {r}")

    def group_document(self, b: int, t: int, r: int) -> int:
        """The one document that all r tokens of group t belong to; 0 with a pad among them."""
        ids = set(self.document[b][t * r : (t + 1) * r])
        return ids.pop() if len(ids) == 1 else 0

    def own_groups(self, b: int, s: int, r: int) -> list[int]:
        """The whole groups of the query's document, past and future, ascending; none for a pad."""
        own = self.document[b][s]
        T = len(self.document[b]) // r
        return [t for t in range(T) if own and self.group_document(b, t, r) == own]

    def visible_groups(self, b: int, s: int, r: int) -> list[int]:
        """Those of them that precede position floor((p + 1) / r) of the document, p the query's position."""
        limit = (self.position[b][s] + 1) // r
        return [t for t in self.own_groups(b, s, r) if t - self.start[b][s] // r < limit]

    def window(self, b: int, s: int, W: int) -> list[int]:
        """The up to W newest tokens of the query's document, itself included; none for a pad."""
        own = self.document[b][s]
        return [i for i in range(max(0, s - W + 1), s + 1) if own and self.document[b][i] == own]


@dataclass(frozen=True)
class Published:
    """What layers of one ratio share.

    compressed_kv [B,T,D], index_keys [B,T,Di], topk_indices int32 [B,S,min(K,T)], candidates bool [B,S,T] or
    None before the candidate source.
    """

    compressed_kv: Tensor
    index_keys: Tensor
    topk_indices: Tensor
    candidates: Tensor | None


@dataclass(frozen=True)
class OracleResult:
    """What one layer computed; None where its role has no such thing.

    Attributes:
        output: [B,S,hidden].
        window_kv: [B,S,D], after RoPE and fp8.
        latent: [B,T,D], before RoPE; full layers.
        compressed_kv: [B,T,D], after RoPE and nvfp4; full layers.
        index_keys: [B,T,Di], after RoPE and mxfp4; full layers.
        scores: [B,S,T], -inf where invisible, not restricted to the candidates; index sources.
        topk_indices: int32 [B,S,min(K,T)], ascending, -1 absent and at the end; the selection that the layer
            attends to, its own or the one it reads; None for window layers.
        candidates: bool [B,S,T], with the invisible positions inside a kept block; candidate source only.
        state: by ratio, for the next layer.
    """

    output: Tensor
    window_kv: Tensor
    latent: Tensor | None
    compressed_kv: Tensor | None
    index_keys: Tensor | None
    scores: Tensor | None
    topk_indices: Tensor | None
    candidates: Tensor | None
    state: dict[int, Published]


class Oracle:
    """The attention of every layer of one model.

    Args:
        args: config in inference/config.json names.
        weights: `layers.{i}.attn.*`, unquantized.
        dtype: torch.float32 or torch.float64, of everything but RoPE's angles and the inside of quantization.
        quantize: False makes every quantization boundary the identity, so that gradients flow.
        activation_dtype: where given, what stands between the named steps is rounded to it: every projection,
            norm, rotation and quantization boundary, the pooled latent before its norm and the attention's
            output. Inside a step, and for the index scores' weighting and sum, dtype stays.

    Raises:
        ValueError: the candidate blocks hold fewer positions than a query selects.
    """

    def __init__(
        self,
        args: dict[str, Any],
        weights: dict[str, Tensor],
        dtype: torch.dtype = torch.float64,
        quantize: bool = True,
        activation_dtype: torch.dtype | None = None,
    ) -> None:
        self.args = args
        self.weights = {name: weight.to(dtype) for name, weight in weights.items()}
        self.dtype = dtype
        self.quantize = quantize
        self.activation_dtype = activation_dtype or dtype
        candidates = args["candidate_topk_blocks"] * args["candidate_block_size"]
        if args["candidate_source_layer"] >= 0 and candidates < args["index_topk"]:
            raise ValueError(f"{candidates} candidates cannot hold a selection of {args['index_topk']}")

    def stack(
        self,
        inputs: list[Tensor],
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> list[OracleResult]:
        """Every layer on its own input [B,S,hidden], the shared state going from layer to layer."""
        results: list[OracleResult] = []
        for i, x in enumerate(inputs):
            state = results[-1].state if results else {}
            results.append(self.layer(i, x, state, attention_mask, document_ids))
        return results

    def layer(
        self,
        i: int,
        x: Tensor,
        state: dict[int, Published],
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> OracleResult:
        """Layer i on x [B,S,hidden], with what earlier layers published by ratio (left unchanged).

        Args:
            attention_mask: [B,S], 1 token, 0 pad on the right.
            document_ids: int [B,S], 0 pad; every document starts at a multiple of the layer's ratio.
        """
        a = self.args
        B, S, _ = x.shape
        x = x.to(self.dtype)
        r = a["compress_ratios"][i]
        layout = Layout.of(B, S, attention_mask, document_ids)
        positions = layout.token_positions()

        # SPEC 3.1 and 3.2
        qr = self._norm(i, "q_norm", self._project(i, "wq_a", x))
        q = self._project(i, "wq_b", qr).unflatten(-1, (a["n_heads"], a["head_dim"]))
        q = self._rotate(i, q, positions)
        kv = self._rotate(i, self._norm(i, "kv_norm", self._project(i, "wkv", x)), positions)
        window_kv = self._boundary(kv, "fp8")
        window_kv = torch.where(layout.is_token()[..., None], window_kv, 0)

        # SPEC 3.3 to 3.8
        latent = compressed_kv = index_keys = scores = topk_indices = candidates = shared = None
        if r:
            layout.check_alignment(r)
            shared = state.get(r)
            allowed = self._allowed(i, shared)
            if i in a["kv_source_layers"]:
                latent, compressed_kv, index_keys = self._compress(i, x, r, layout)
                unselected = torch.empty(B, S, 0, dtype=torch.int32)
                shared = Published(compressed_kv, index_keys, unselected, allowed)
            elif shared is None:
                raise ValueError(f"layer {i}: no layer before it published anything of ratio {r}")
            if self._selects(i):
                scores = self._scores(i, x, qr, shared.index_keys, r, layout)
                shared = replace(shared, topk_indices=self._select(scores, allowed, r, layout))
                if i == a["candidate_source_layer"]:  # its own selection is not restricted
                    candidates = self._candidates(scores, r, layout)
                    shared = replace(shared, candidates=candidates)
            topk_indices = shared.topk_indices
            state = {**state, r: shared}

        # SPEC 3.9 and 3.10
        heads = self._activation(self._attend(i, q, window_kv, shared, layout))
        heads = self._rotate(i, heads, positions, inverse=True)
        output = self._output(i, heads)
        output = torch.where(layout.is_token()[..., None], output, 0)
        return OracleResult(
            output, window_kv, latent, compressed_kv, index_keys, scores, topk_indices, candidates, state
        )

    def _weight(self, i: int, name: str) -> Tensor:
        return self.weights[f"layers.{i}.attn.{name}"]

    def _activation(self, x: Tensor) -> Tensor:
        return x.to(self.activation_dtype).to(self.dtype)

    def _project(self, i: int, name: str, x: Tensor) -> Tensor:
        return self._activation(x @ self._weight(i, f"{name}.weight").T)

    def _norm(self, i: int, name: str, x: Tensor) -> Tensor:
        return self._activation(rms_norm(x, self._weight(i, f"{name}.weight"), self.args["norm_eps"]))

    def _rotate(self, i: int, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        frequencies = rope_frequencies(self.args, self.args["compress_ratios"][i])
        return self._activation(rotate(x, positions, frequencies, inverse))

    def _boundary(self, x: Tensor, kind: str) -> Tensor:
        return self._activation(quantize_dequantize(x, kind)) if self.quantize else x

    def _compress(self, i: int, x: Tensor, r: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """SPEC 3.3 to 3.5: latent [B,T,D], compressed KV [B,T,D], index keys [B,T,Di]; 0 where a pad is."""
        B, S, _ = x.shape
        T = S // r
        values = x[:, : T * r] @ self._weight(i, "compressor.wkv.weight").T
        if r > 1:
            gates = x[:, : T * r] @ self._weight(i, "compressor.wgate.weight").T
            shares = gates.unflatten(1, (T, r)).softmax(2)  # [B,T,r,D], over the tokens of a group
            values = (values.unflatten(1, (T, r)) * shares).sum(2)
        latent = self._norm(i, "compressor.norm", self._activation(values))
        whole = [[layout.group_document(b, t, r) != 0 for t in range(T)] for b in range(B)]
        latent = torch.where(torch.tensor(whole, dtype=torch.bool)[..., None], latent, 0)

        # A group stands where its first token stands.
        positions = layout.token_positions()[:, : T * r : r]
        keys = self._norm(i, "indexer.k_norm", self._project(i, "indexer.wk", latent))
        index_keys = self._boundary(self._rotate(i, keys, positions), "mxfp4")
        return latent, self._boundary(self._rotate(i, latent, positions), "nvfp4"), index_keys

    def _selects(self, i: int) -> bool:
        return i in self.args["kv_source_layers"] or i in self.args["index_source_layers"]

    def _allowed(self, i: int, inherited: Published | None) -> Tensor | None:
        """bool [B,S,T]: what index sources after the candidate source select from; None at and before it."""
        c = self.args["candidate_source_layer"]
        allowed = inherited.candidates if inherited is not None else None
        if self._selects(i) and 0 <= c < i and allowed is None:
            raise ValueError(f"layer {i} selects after candidate source {c}, which has another ratio")
        return allowed

    def _scores(
        self,
        i: int,
        x: Tensor,
        qr: Tensor,
        index_keys: Tensor,
        r: int,
        layout: Layout,
    ) -> Tensor:
        """SPEC 3.6: [B,S,T], -inf where invisible."""
        Hi, Di = self.args["index_n_heads"], self.args["index_head_dim"]
        qi = self._project(i, "indexer.wq_b", qr).unflatten(-1, (Hi, Di))
        qi = self._boundary(self._rotate(i, qi, layout.token_positions()), "mxfp4")
        w = self._project(i, "indexer.weights_proj", x) * (Di**-0.5 * Hi**-0.5)
        B, S, _ = x.shape
        scores = torch.full((B, S, index_keys.shape[1]), -math.inf, dtype=self.dtype)
        for b in range(B):
            for s in range(S):
                visible = layout.visible_groups(b, s, r)
                products = qi[b, s] @ index_keys[b, visible].T  # [Hi, visible]
                scores[b, s, visible] = (products.relu() * w[b, s, :, None]).sum(0)
        return scores

    def _candidates(self, scores: Tensor, r: int, layout: Layout) -> Tensor:
        """SPEC 3.7: bool [B,S,T]; blocks count from the first group of the query's document."""
        size, keep = self.args["candidate_block_size"], self.args["candidate_topk_blocks"]
        B, S, _ = scores.shape
        candidates = torch.zeros_like(scores, dtype=torch.bool)
        for b in range(B):
            for s in range(S):
                first = layout.start[b][s] // r
                best: dict[int, float] = {}  # of the reachable blocks, those with a visible position
                for t in layout.visible_groups(b, s, r):
                    block = (t - first) // size
                    best[block] = max(best.get(block, -math.inf), scores[b, s, t].item())
                if not best:
                    continue
                best[max(best)] = math.inf  # the newest position's block always stays
                kept = set(sorted(best, key=lambda block: (-best[block], block))[:keep])
                for t in layout.own_groups(b, s, r):
                    candidates[b, s, t] = (t - first) // size in kept
        return candidates

    def _select(self, scores: Tensor, allowed: Tensor | None, r: int, layout: Layout) -> Tensor:
        """SPEC 3.8: int32 [B,S,min(K,T)]."""
        B, S, T = scores.shape
        count = min(self.args["index_topk"], T)
        indices = torch.full((B, S, count), -1, dtype=torch.int32)
        for b in range(B):
            for s in range(S):
                row = scores[b, s].tolist()
                eligible = [t for t in layout.visible_groups(b, s, r) if allowed is None or bool(allowed[b, s, t])]
                picks = sorted(eligible, key=lambda t: (-row[t], t))[:count]
                indices[b, s, : len(picks)] = torch.tensor(sorted(picks), dtype=torch.int32)
        return indices

    def _attend(
        self,
        i: int,
        q: Tensor,
        window_kv: Tensor,
        shared: Published | None,
        layout: Layout,
    ) -> Tensor:
        """SPEC 3.9 before the inverse RoPE: [B,S,H,D]."""
        sink = self._weight(i, "attn_sink")[:, None]  # [H,1]
        B, S, _, D = q.shape
        rows = []
        for b in range(B):
            for s in range(S):
                keys = window_kv[b, layout.window(b, s, self.args["window_size"])]
                if shared is not None:
                    picks = [t for t in shared.topk_indices[b, s].tolist() if t >= 0]
                    keys = torch.cat([keys, shared.compressed_kv[b, picks]])
                logits = q[b, s] @ keys.T * D**-0.5  # [H, keys]
                shares = torch.cat([logits, sink], -1).softmax(-1)[:, :-1]
                rows.append(shares @ keys)
        return torch.stack(rows).unflatten(0, (B, S))

    def _output(self, i: int, heads: Tensor) -> Tensor:
        """SPEC 3.10: heads [B,S,H,D] to [B,S,hidden]."""
        groups, rank = self.args["o_groups"], self.args["o_lora_rank"]
        grouped = heads.flatten(2).unflatten(-1, (groups, -1))  # [B,S,o_groups, H/o_groups*D]
        blocks = self._weight(i, "wo_a.weight").unflatten(0, (groups, rank))
        low = torch.stack([grouped[:, :, g] @ blocks[g].T for g in range(groups)], 2)
        return self._project(i, "wo_b", self._activation(low.flatten(2)))
