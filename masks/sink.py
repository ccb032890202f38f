"""The attention sink: a learned logit a head that takes part in the denominator only.

FlexAttention has no such input, so the sink is a key of zeros (value zero adds nothing to the output) whose
score a score mod replaces by the sink logit.
"""

import torch
from torch import Tensor

from csa2_compiled.masks.signatures import MaskMod, ScoreMod


def generate_sink_mask(sink_key: int) -> MaskMod:
    """Mask mod: every query sees the sink key, also one that sees nothing else."""

    def sink_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j == sink_key

    sink_mask.__name__ = "sink"
    return sink_mask


def generate_sink_score(sink: Tensor, sink_key: int, heads_are_rows: bool = False) -> ScoreMod:
    """Score mod that puts the sink logit on the sink key.

    sink: fp32 [H], added after scaling. heads_are_rows: in the slots layout the H heads stand where
    FlexAttention expects queries.
    """

    def sink_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j == sink_key, sink[i if heads_are_rows else h].to(score.dtype), score)

    sink_score.__name__ = "sink"
    return sink_score
