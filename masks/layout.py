"""Which of the two exact FlexAttention layouts serves a shape.

*dense*: keys are the window tokens, the compressed positions and one zero sink key; the mask decides.
*slots*: each query token is a batch row, its heads are the query rows, its gathered slots the keys.
*plain*: the same slots with two matrix products and a softmax, for eager calls, gradients and float64.

The cost model counts the (query, key) pairs a layout evaluates per query, since both do the same work per
pair: 2 * 2 * num_heads * head_dim floating point operations. With selections that are spread out, block
sparsity saves nothing beyond causality (at 4096 tokens the union of 128 random selections of 512 keeps
every causal block), so the dense layout is charged for every causal key:

    dense:  window + key_block + num_compressed / 2
    slots:  1 + window + min(topk, num_compressed), rounded up to key_block, times SLOTS_PER_DENSE_PAIR

SLOTS_PER_DENSE_PAIR is the price of a slot: 0.35 on one H200, where a kernel gathers them (attention core at released
shapes, 4096 tokens: 1.2 ms in a profile of the layer for 704 pairs a query, dense 10.7 ms for 2304; FlexAttention on
gathered slots, without the pass, takes 3.6 ms, a price of 1.1), 2.3 on a CPU (the demo model's window and full layers,
512 tokens, one thread, both layouts).
"""

from dataclasses import dataclass
from enum import Enum

from torch.fx.experimental.symbolic_shapes import has_static_value

SLOTS_PER_DENSE_PAIR = {"cuda": 0.35, "cpu": 2.3}
KEY_BLOCK = 128


class AttentionLayout(str, Enum):
    """How the attention core lays out its keys."""

    AUTO = "auto"
    DENSE = "dense"
    SLOTS = "slots"
    PLAIN = "plain"


@dataclass(frozen=True)
class LayoutChoice:
    """The layout taken and the reason, as `csa2 run` prints it."""

    layout: AttentionLayout
    reason: str


def pairs_per_query(num_compressed: int, topk: int, window: int, device_type: str = "cuda") -> tuple[float, float]:
    """Pairs a query evaluates (dense, slots), the slots weighted by the price of gathering."""
    dense = window + KEY_BLOCK + num_compressed / 2
    slots = -(-(1 + window + min(topk, num_compressed)) // KEY_BLOCK) * KEY_BLOCK
    return dense, slots * SLOTS_PER_DENSE_PAIR.get(device_type, SLOTS_PER_DENSE_PAIR["cuda"])


def choose_layout(
    requested: AttentionLayout,
    num_tokens: int,
    num_compressed: int,
    topk: int,
    window: int,
    device_type: str = "cuda",
    needs_gradient: bool = False,
    flex_takes_dtype: bool = True,
    compiling: bool = True,
    cached: bool = False,
) -> LayoutChoice:
    """Pick the layout for one call; an explicit request is followed, never replaced.

    num_tokens, num_compressed, topk: S, T and K of the call. When S or T is symbolic the choice may not
    depend on it, or one graph could not serve every length.
    needs_gradient: a backward pass will run through the attention core.
    flex_takes_dtype: FlexAttention computes in float32, bfloat16 and float16 only.
    compiling: eager FlexAttention evaluates every pair of queries and keys, so eager calls run plain.
    cached: the keys come from a cache, whose rows are gathered; the dense layout would read all of them.
    """
    if requested is not AttentionLayout.AUTO:
        return LayoutChoice(requested, "requested")
    if cached and (device_type != "cuda" or not compiling or not flex_takes_dtype):
        return LayoutChoice(AttentionLayout.PLAIN, "cached: few queries, each with rows of its own")
    if cached:
        return LayoutChoice(AttentionLayout.SLOTS, "cached, compiled for CUDA: kernels gather the slots")
    if needs_gradient:
        return LayoutChoice(AttentionLayout.PLAIN, "gradients go through plain products")
    if not flex_takes_dtype:
        return LayoutChoice(AttentionLayout.PLAIN, "FlexAttention does not take this dtype")
    if not compiling:
        return LayoutChoice(AttentionLayout.PLAIN, "eager: FlexAttention would evaluate every pair")
    if not all(has_static_value(size) for size in (num_tokens, num_compressed)):
        return LayoutChoice(AttentionLayout.SLOTS, "dynamic length: one graph serves every length")
    dense, slots = pairs_per_query(num_compressed, topk, window, device_type)
    if dense <= slots:
        return LayoutChoice(AttentionLayout.DENSE, f"{dense:.0f} pairs a query against {slots:.0f} in slots")
    return LayoutChoice(AttentionLayout.SLOTS, f"{slots:.0f} pairs a query against {dense:.0f} in dense")
