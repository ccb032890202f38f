"""own_buffer: an identity to eager code, and what makes computed tensors fit for compiled FlexAttention."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from csa2_compiled import masks
from csa2_compiled.masks.own_buffer import own_buffer_op
from csa2_compiled.passes.inductor import register_own_buffer_lowering


def samples() -> list[Tensor]:
    return [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).T,
        torch.arange(4, dtype=torch.int32).expand(3, 4),
        torch.tensor([True, False]),
        torch.empty(2, 0, dtype=torch.int32),
        torch.tensor(1.5),
    ]


@pytest.mark.parametrize("x", samples(), ids=lambda x: f"{tuple(x.shape)}-{x.dtype}")
def test_the_op_copies_into_a_contiguous_buffer(x):
    copy = own_buffer_op(x)
    assert copy.is_contiguous()
    assert copy.dtype == x.dtype
    assert torch.equal(copy, x)
    assert x.numel() == 0 or copy.data_ptr() != x.data_ptr()
    torch.library.opcheck(own_buffer_op, (x,))


def test_opcheck_with_a_gradient():
    torch.library.opcheck(own_buffer_op, (torch.randn(3, 4).T.requires_grad_(),))


def test_the_gradient_passes_unchanged():
    x = torch.randn(3, 4, requires_grad=True)
    upstream = torch.randn(4, 3)
    own_buffer_op(x.T).backward(upstream)
    assert torch.equal(x.grad, upstream.T)


def test_eager_code_keeps_its_tensor():
    x = torch.arange(6.0).view(2, 3).T
    assert masks.own_buffer(x) is x


def captures(x: Tensor, kv: Tensor, lengths: Tensor, bias: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """FlexAttention whose query, captured tensors and block mask are all computed by the same graph.

    seen: int32 [B, S, S], the keys of every query. Returns the attended values and the pairs counted in
    every block.
    """
    tokens, dim = x.shape[1], x.shape[3]
    visible = masks.own_buffer(lengths + 1)
    offset = masks.own_buffer(bias * 2 + 1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j < visible[b])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + offset[h]

    counts = masks.block_pair_counts(seen, tokens, 32, 32)
    block_mask = masks.block_mask_from_counts(counts, mask_mod, tokens, tokens, 32, 32)
    key = masks.own_buffer((kv * 0.5).unsqueeze(1))
    query = masks.own_buffer((x + 1).transpose(1, 2))
    attended = flex_attention(
        query, key, key, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, scale=dim**-0.5
    )
    return attended, counts


@pytest.mark.slow
def test_compiled_flex_attention_takes_computed_captures():
    register_own_buffer_lowering()
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 50, 2, 16, generator=generator)
    kv = torch.randn(2, 50, 16, generator=generator)
    lengths = torch.tensor([40, 10], dtype=torch.int32)
    token = torch.arange(50, dtype=torch.int32)
    seen = torch.where((token <= token[:, None]) & (token <= lengths[:, None, None]), token, -1)
    arguments = (x, kv, lengths, torch.tensor([0.5, -2.0]), seen)
    with torch.no_grad():
        expected, expected_counts = captures(*arguments)
        attended, counts = torch.compile(captures, fullgraph=True, dynamic=False)(*arguments)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    # 50 tokens fill no whole number of blocks: the tail of a loop that once went missing on CPU.
    assert torch.equal(counts, expected_counts)
