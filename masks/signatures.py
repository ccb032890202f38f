"""The signatures FlexAttention expects of its mods.

Every index is an int tensor without dimensions: batch row, head, query and key.
"""

from collections.abc import Callable

from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, i, j) -> bool
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, i, j) -> score
