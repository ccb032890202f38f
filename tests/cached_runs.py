"""Small models, and runs of them in one prefill or in steps with a cache, for the tests of the cache."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from csa2_compiled import CSA2Cache, CSA2Config, CSA2ForCausalLM, CSA2Output
from csa2_compiled.config import YarnScaling
from csa2_compiled.model import CSA2Block
from csa2_compiled.rows import buffers

W, K = 8, 4
YARN = YarnScaling(factor=4.0, beta_fast=8.0, beta_slow=1.0, original_max_position_embeddings=64)


def make_config(
    compress_ratios: tuple[int, ...], kv_sources: tuple[int, ...], index_sources: tuple[int, ...], **fields: Any
) -> CSA2Config:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": len(compress_ratios),
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": W,
        "compress_ratios": compress_ratios,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": index_sources,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": K,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 128,
        "intermediate_size": 64,
    }
    return CSA2Config(**{**values, **fields})


def config_of_ratio(ratio: int) -> CSA2Config:
    """Every role: window, full with candidates, reuse, reindex and a second full within them, reuse."""
    return make_config(
        (0, *[ratio] * 5),
        (1, 4),
        (1, 3, 4),
        candidate_source_layer_id=1,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        rope_scaling=YARN,
    )


# Two ratios in turn, each with a full, a reindex or a second full, and a reuse layer.
INTERLEAVED = make_config((2, 3, 2, 3, 2, 3), (0, 1, 3), (0, 1, 2, 3))
CONFIGS = {**{f"ratio {r}": config_of_ratio(r) for r in (1, 2, 3, 4, 8)}, "interleaved": INTERLEAVED}


def make_model(cfg: CSA2Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> CSA2ForCausalLM:
    """Weights so wide that every layer matters and scores do not tie."""
    model = CSA2ForCausalLM(cfg, dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif parameter.dim() == 2:
            value = value * (1 if name.startswith("embed") else parameter.shape[1] ** -0.5)
        parameter.data.copy_(value)
    return model


def make_ids(cfg: CSA2Config, tokens: int, rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, cfg.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Run:
    """logits [B, S, vocab_size]; picks: int32 [B, S, K] of each layer with compressed KV, ascending, -1 behind."""

    logits: Tensor
    picks: tuple[Tensor, ...]

    def __getitem__(self, where: Any) -> "Run":
        return Run(self.logits[where], tuple(p[where] for p in self.picks))

    @staticmethod
    def join(runs: Iterable["Run"]) -> "Run":
        runs = list(runs)
        picks = zip(*(run.picks for run in runs), strict=True)
        return Run(torch.cat([run.logits for run in runs], 1), tuple(torch.cat(p, 1) for p in picks))


@torch.no_grad()
def run(model: CSA2ForCausalLM, ids: Tensor, cache: CSA2Cache | None = None, mask: Tensor | None = None) -> Run:
    """One call of the model, with the selection that every layer attended to."""
    picks: list[Tensor] = []

    def record(block: CSA2Block, *inputs: Any) -> CSA2Output:
        output = block(*inputs)
        if block.attn.ratio:
            publication = output.state.of_ratio(block.attn.ratio)
            assert publication is not None
            read = publication.topk_indices
            picks.append(F.pad(read, (0, model.cfg.index_topk - read.shape[-1]), value=-1))
        return output

    return Run(model(ids, cache, mask, run_block=record), tuple(picks))


def run_chunks(model: CSA2ForCausalLM, ids: Tensor, chunks: Iterable[int], cache: CSA2Cache) -> Run:
    """The ids in steps of those many tokens, the last of which may be cut short, then the rest in one step."""
    runs, done = [], 0
    for chunk in (*chunks, ids.shape[1]):
        if done < ids.shape[1]:
            runs.append(run(model, ids[:, done : done + chunk], cache))
            done += runs[-1].logits.shape[1]
    return Run.join(runs)


def snapshot(cache: CSA2Cache) -> tuple[list[Tensor], Any]:
    """Copies of all that a cache holds, on the device and on the host."""
    return [tensor.clone() for tensor in cache._all_buffers()], cache.record.copy()


def assert_unchanged(cache: CSA2Cache, before: tuple[list[Tensor], Any]) -> None:
    """most may have come nearer to the lengths, which it bounds."""
    tensors, record = before
    for tensor, expected in zip(cache._all_buffers(), tensors, strict=True):
        assert torch.equal(bits(tensor), bits(expected))
    assert replace(cache.record, most=0) == replace(record, most=0)
    assert int(cache.lengths.max()) <= cache.record.most <= record.most


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.view(torch.uint8) if tensor.dtype is not torch.bool else tensor


def fill_with_nan(cache: CSA2Cache) -> None:
    """Whatever reads a row that no step wrote gets NaN."""
    for layer in cache.layers:
        for rows in layer.all_rows():
            for tensor in buffers(rows):
                tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
