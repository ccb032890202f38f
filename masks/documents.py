"""Packed documents: a query sees tokens of its own document only, and padding sees nothing."""

from torch import Tensor

from csa2_compiled.masks.signatures import MaskMod


def generate_document_mask(starts: Tensor, num_tokens: int) -> MaskMod:
    """Mask mod that keeps the window inside the query's document (dense layout).

    starts: int [B, S], index of the first token of the query's document, S for a padded query. Together
    with a causal window this is the same-document test, without a comparison of ids.
    """

    def document_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= starts[b, i]) & (j < num_tokens)

    document_mask.__name__ = "document"
    return document_mask
