"""Small attention layers of every role, their inputs, and runs of them, for the tests of the layer."""

from typing import Any

import torch
from torch import Tensor

from csa2_compiled import CSA2Attention, CSA2Config, CSA2Output, CSA2State
from csa2_compiled.config import YarnScaling

YARN = YarnScaling(factor=4.0, beta_fast=8.0, beta_slow=1.0, original_max_position_embeddings=64)


def make_config(compress_ratios: tuple[int, ...], kv_sources: tuple[int, ...], **fields: Any) -> CSA2Config:
    """A small model whose window and selection are both shorter than the sequences of the tests."""
    values: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": len(compress_ratios),
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 6,
        "compress_ratios": compress_ratios,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": kv_sources,
        "index_n_heads": 3,
        "index_head_dim": 32,
        "index_topk": 5,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 256,
    }
    return CSA2Config(**{**values, **fields})


CONFIGS = {
    # The released schedule in small: window, full, reuse, then ratio 1 with candidates, reindex and reuse.
    "released": make_config(
        (0, 2, 2, 1, 1, 1),
        (1, 3),
        index_source_layer_ids=(1, 3, 4),
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        rope_scaling=YARN,
    ),
    "ratio_4": make_config((4, 4, 4, 0), (0,), index_source_layer_ids=(0, 1), rope_scaling=YARN),
    "interleaved": make_config((2, 1, 2, 1), (0, 1)),
    "ratios_3_and_8": make_config((3, 8, 3, 8), (0, 1), index_source_layer_ids=(0, 1, 2)),
    # A KV source after the candidate source selects inside its candidates too.
    "candidates_across_sources": make_config(
        (2, 2, 2, 2),
        (0, 2),
        index_source_layer_ids=(0, 1, 2, 3),
        candidate_source_layer_id=0,
        candidate_topk_blocks=2,
        candidate_block_size=3,
        index_topk=4,
    ),
}


def make_layers(cfg: CSA2Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[CSA2Attention]:
    """Every layer of the model with random weights, norms and sinks."""
    generator = torch.Generator().manual_seed(seed)
    layers = [CSA2Attention(cfg, i, dtype) for i in range(cfg.num_hidden_layers)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * value
            elif parameter.dim() == 2:
                value = value * parameter.shape[1] ** -0.5
            parameter.data.copy_(value)
    return layers


def make_inputs(
    cfg: CSA2Config, tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, cfg.hidden_size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(cfg.num_hidden_layers)]


def run_layers(layers: list[CSA2Attention], inputs: list[Tensor], **arguments: Tensor) -> list[CSA2Output]:
    """Every layer on its own input, the state going from layer to layer."""
    outputs: list[CSA2Output] = []
    for layer, x in zip(layers, inputs, strict=True):
        outputs.append(layer(x, outputs[-1].state if outputs else CSA2State(), **arguments))
    return outputs


def padding_mask(tokens: int, lengths: tuple[int, ...]) -> Tensor:
    return (torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)).long()


# (row, first token, length): starts are aligned, ends are ragged, pads stand between some and last in a row.
DOCUMENTS = {
    "released": [(0, 0, 13), (0, 14, 1), (0, 18, 21), (0, 40, 8), (1, 0, 30), (1, 30, 15)],
    "candidates_across_sources": [(0, 0, 17), (0, 18, 27), (1, 0, 1), (1, 2, 4), (1, 10, 37)],
    "ratio_4": [(0, 0, 3), (0, 4, 26), (0, 32, 15), (1, 0, 45)],
    "interleaved": [(0, 0, 9), (0, 12, 36), (1, 0, 24), (1, 24, 23)],
    "ratios_3_and_8": [(0, 0, 23), (0, 24, 24), (1, 0, 2), (1, 24, 17)],
}


def packed_ids(documents: list[tuple[int, int, int]], tokens: int = 48) -> Tensor:
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    for number, (row, first, length) in enumerate(documents):
        ids[row, first : first + length] = 3 * number + 1
    return ids
