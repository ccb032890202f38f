"""CSA2's masks as FlexAttention sees them: mask mods, score mods, block masks and the layout rule.

Imported as ``csa2_compiled.masks``. A file a concept; a ``generate_*`` function returns the closure that
FlexAttention takes, named so that it prints well.
"""

from csa2_compiled.masks.block_mask import block_mask_from_counts, block_pair_counts
from csa2_compiled.masks.documents import generate_document_mask
from csa2_compiled.masks.layout import AttentionLayout, LayoutChoice, choose_layout
from csa2_compiled.masks.own_buffer import own_buffer
from csa2_compiled.masks.selection import generate_selection_mask, pack_selection
from csa2_compiled.masks.sink import generate_sink_mask, generate_sink_score
from csa2_compiled.masks.slots import generate_slot_mask
from csa2_compiled.masks.window import cached_window_indices, generate_window_mask, ring_and_fresh, window_indices

__all__ = [
    "AttentionLayout",
    "LayoutChoice",
    "block_mask_from_counts",
    "block_pair_counts",
    "cached_window_indices",
    "choose_layout",
    "generate_document_mask",
    "generate_selection_mask",
    "generate_sink_mask",
    "generate_sink_score",
    "generate_slot_mask",
    "generate_window_mask",
    "own_buffer",
    "pack_selection",
    "ring_and_fresh",
    "window_indices",
]
