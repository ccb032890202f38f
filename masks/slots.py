"""The slots layout's mask: a query token is a batch row, its gathered slots are the keys."""

from torch import Tensor

from csa2_compiled.masks.signatures import MaskMod


def generate_slot_mask(filled: Tensor) -> MaskMod:
    """Mask mod: a slot is visible when it is filled.

    filled: bool [B * S, slots], slot 0 being the sink.
    """

    def slot_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return filled[b, j]

    slot_mask.__name__ = "slots"
    return slot_mask
