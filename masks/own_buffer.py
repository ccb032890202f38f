"""A buffer of its own for a tensor that FlexAttention reads.

Inductor inlines pointwise producers into their consumers. FlexAttention's templates cannot take such an
unrealized producer, neither as q and k (the CPU template reads the sizes of the base buffer) nor as a
tensor captured by a mask or score mod. ``own_buffer`` is an identity that Inductor lowers to a realized
buffer; the producer still fuses into the write of that buffer, so nothing is copied twice. A plain
``clone()`` would be optimized away.
"""

import torch
from torch import Tensor


@torch.library.custom_op("csa2::own_buffer", mutates_args=())
def own_buffer_op(x: Tensor, copy: int = 0) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@own_buffer_op.register_fake
def _(x: Tensor, copy: int = 0) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


own_buffer_op.register_autograd(lambda ctx, grad: (grad, None))


def own_buffer(x: Tensor, copy: int = 0) -> Tensor:
    """Return x, in a contiguous buffer of its own when a compiler is looking (any shape and dtype).

    copy: another number is another buffer, where one graph needs the same values twice.
    """
    return own_buffer_op(x, copy) if torch.compiler.is_compiling() else x
