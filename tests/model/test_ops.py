"""The named ops: schema, shape rule and registration by opcheck, gradients against the plain bodies.

Tolerances of gradients: in float32 both sides sum the same few terms in another order, so a few units of
float32 rounding of the largest entry; in bfloat16 both round the same float32 value once, so neighbours.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from csa2_compiled import ops
from csa2_compiled.attention_math import attend_plain
from csa2_compiled.masks.own_buffer import own_buffer, own_buffer_op
from csa2_compiled.rope import rope_frequencies

INFINITY = float("inf")
csa2 = torch.ops.csa2
FLOATS = [torch.float32, torch.bfloat16]

all_floats = pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "bfloat16"])
Case = tuple[torch._ops.OpOverload, tuple[Any, ...]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype).requires_grad_(grad)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rotations(batch: int, tokens: int, rotary_dim: int) -> Tensor:
    positions = torch.arange(tokens, dtype=torch.float32) + 7 * torch.arange(batch).unsqueeze(-1)
    angles = positions.unsqueeze(-1) * rope_frequencies(rotary_dim, 10000.0)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def masked_scores(start: Tensor, stop: Tensor, positions: int, seed: int = 0) -> Tensor:
    """float32 [B, S, T] with ties, -inf outside [start, stop)."""
    scores = normal(*start.shape, positions, seed=seed).mul(2).round()
    t = torch.arange(positions)
    return scores.where((t >= start.unsqueeze(-1)) & (t < stop.unsqueeze(-1)), -INFINITY)


def in_memory_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values and gradient flag; `order` lists the dims from the slowest to the fastest in memory."""
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.detach().permute(order).contiguous().permute(back).requires_grad_(x.requires_grad)


MEMORY_ORDERS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "batch second": lambda dims: (1, 0, *range(2, dims)),
    "heads before tokens": lambda dims: (0, *range(dims - 2, 0, -1), dims - 1),
    "reversed": lambda dims: tuple(range(dims - 1, -1, -1)),
}


def attend_inputs(dtype: torch.dtype, sources: int, grad: bool = False) -> tuple[Tensor, ...]:
    """Two rows of four queries; empty slots, rows that several slots name, and a query that sees nothing."""
    wide = torch.promote_types(dtype, torch.float32)
    q, sink = normal(2, 4, 3, 8, dtype=dtype, grad=grad), normal(3, dtype=wide, seed=1, grad=grad)
    window = int32([[-1, -1], [0, -1], [0, 1], [1, 2]], [[0, -1], [-1, 1], [2, 2], [2, 0]])
    picks = int32([[-1] * 3, [0, -1, -1], [1, 3, -1], [0, 1, 3]], [[-1] * 3, [4, 0, 4], [-1, -1, 2], [0, 1, 2]])
    kv = normal(2, 3, 8, dtype=dtype, seed=2, grad=grad), normal(2, 5, 8, dtype=dtype, seed=3, grad=grad)
    return (q, sink, kv[0], window, kv[1], picks)[: 2 + 2 * sources]


def opcheck_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for dtype in FLOATS:
        for grad in (False, True):
            name = f"{str(dtype)[6:]}{'-grad' if grad else ''}"
            options = {"dtype": dtype, "grad": grad}
            weight = normal(32, seed=1, grad=grad)
            for tokens in (5, 0):
                suffix = f"{name}-T={tokens}"
                x = normal(2, tokens, 32, **options)
                heads = normal(2, tokens, 3, 32, **options)
                turns = rotations(2, tokens, 8)
                cases[f"rms_norm-{suffix}"] = csa2.rms_norm.default, (x, weight, 1e-20)
                cases[f"apply_rope-{suffix}"] = csa2.apply_rope.default, (x, turns, False)
                cases[f"apply_rope-heads-{suffix}"] = csa2.apply_rope.default, (heads, turns[:1], True)
                for kind in ("fp8", "nvfp4", "mxfp4"):
                    cases[f"quantize-{kind}-{suffix}"] = csa2.quantize_dequantize.default, (heads, kind)
                q, k = normal(2, 4, 3, 32, **options), normal(2, tokens, 32, seed=1, **options)
                w = normal(2, 4, 3, seed=2, grad=grad)
                start, stop = int32([0, 0, 1, 2], [0, 0, 0, 0]), int32([1, 2, 3, 5], [0, 0, 1, 5])
                cases[f"index_scores-{suffix}"] = csa2.index_scores.default, (q, k, w, start, stop)
                keys = normal(2, max(tokens, 1), 8, **options)
                indices = int32([[0, 3, 3, -1]] * 3, [[-1] * 4] * 3)[..., : 4 if tokens else 0]
                cases[f"gather_kv-{suffix}"] = csa2.gather_kv.default, (keys, indices)
            for sources in (1, 2):
                inputs = attend_inputs(dtype, sources, grad)
                cases[f"attend-{name}-{sources}"] = csa2.attend.default, inputs
                if not grad:
                    results = ops.attend(*inputs)
                    arguments = (normal(*results[0].shape, dtype=dtype, seed=9), *results, *inputs)
                    cases[f"attend_backward-{name}-{sources}"] = csa2.attend_backward.default, arguments
            cases[f"rms_norm-vector-{name}"] = csa2.rms_norm.default, (normal(32, **options), weight, 1e-6)
            cases[f"own_buffer-{name}"] = csa2.own_buffer.default, (normal(2, 3, **options).transpose(0, 1),)
    for dtype in (torch.bool, torch.int32):
        cases[f"own_buffer-{str(dtype)[6:]}"] = csa2.own_buffer.default, (torch.ones(4, 2, dtype=dtype)[::2],)
    cases["own_buffer-empty"] = csa2.own_buffer.default, (torch.ones(3, 0),)

    # A query sees nothing, some and all; two documents of 3 and 4 positions, then only padding.
    start, stop = int32([0, 0, 3, 0], [0, 0, 0, 0]), int32([1, 3, 6, 0], [0, 2, 5, 7])
    group_starts = int32([0, 0, 0, 3, 3, 3, 3], [0] * 7)
    for positions in (7, 0):
        scores = masked_scores(start, stop, positions)
        candidates = normal(2, 4, positions, seed=3) > 0
        for name, starts in (("", None), ("-documents", group_starts[:, :positions])):
            arguments = (scores, stop.clamp(max=positions), starts, 2, 2)
            cases[f"candidate_blocks{name}-T={positions}"] = csa2.candidate_blocks.default, arguments
        cases[f"select_topk-T={positions}"] = csa2.select_topk.default, (scores, None, 3)
        cases[f"select_topk-large-k-T={positions}"] = csa2.select_topk.default, (scores, None, 9)
        cases[f"select_topk-candidates-T={positions}"] = csa2.select_topk.default, (scores, candidates, 3)
    return cases


CASES = opcheck_cases()


def test_every_named_op_is_checked():
    assert {op for op, _ in CASES.values()} == {*ops.BODIES, csa2.own_buffer.default}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_opcheck(case: Case):
    op, arguments = case
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("order", MEMORY_ORDERS.values(), ids=MEMORY_ORDERS.keys())
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("-T=5", "-T=7"))])
def test_inputs_of_any_memory_layout(name: str, order: Callable[[int], tuple[int, ...]]):
    op, arguments = CASES[name]
    other_layout = tuple(
        in_memory_order(x, order(x.dim())) if isinstance(x, Tensor) and x.dim() > 1 else x for x in arguments
    )
    result = op(*other_layout)
    assert result.is_contiguous()  # as the shape rules promise
    torch.testing.assert_close(result, op(*arguments))  # not exact: a sum's order may follow the memory
    torch.library.opcheck(op, other_layout, test_utils=("test_schema", "test_faketensor"))
    if result.requires_grad:
        upstream = in_memory_order(torch.ones_like(result), order(result.dim()))
        expected = gradients(op, arguments, torch.ones_like(result))
        for actual, wanted in zip(gradients(op, other_layout, upstream), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


def test_index_scores_takes_visible_ranges_expanded_over_the_batch():
    q, k, w = normal(2, 4, 3, 8), normal(2, 5, 8, seed=1), normal(2, 4, 3, seed=2)
    start, stop = int32([0, 0, 0, 0]), int32([1, 2, 3, 5])
    expanded = q, k, w, start.expand(2, -1), stop.expand(2, -1)
    torch.library.opcheck(csa2.index_scores.default, expanded)
    full = q, k, w, start.expand(2, -1).contiguous(), stop.expand(2, -1).contiguous()
    assert torch.equal(ops.index_scores(*expanded), ops.index_scores(*full))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_eager_op_is_its_body(case: Case):
    op, arguments = case
    body = ops.BODIES.get(op, torch.clone)
    torch.testing.assert_close(op(*arguments), body(*arguments), rtol=0, atol=0)


def gradients(function: Callable[..., Tensor], inputs: tuple[Any, ...], upstream: Tensor) -> list[Tensor]:
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(function(*inputs), leaves, upstream))


def assert_gradients_equal_the_body_s(op: torch._ops.OpOverload, inputs: tuple[Any, ...]) -> None:
    output = op(*inputs)
    upstream = normal(*output.shape, dtype=output.dtype, seed=9)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    ours = gradients(op, inputs, upstream)
    theirs = gradients(ops.BODIES[op], inputs, upstream)
    assert len(ours) == len(leaves)
    for leaf, actual, expected in zip(leaves, ours, theirs, strict=True):
        assert actual.shape == leaf.shape
        assert actual.dtype == leaf.dtype
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        rtol = 2**-7 if leaf.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=8 * 2**-23 * scale)


@all_floats
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 5, 32), (2, 5, 3, 32), (2, 0, 32)], ids=str)
def test_rms_norm_gradient(dtype: torch.dtype, shape: tuple[int, ...]):
    x = normal(*shape, dtype=dtype, grad=True)
    weight = normal(32, seed=1, grad=True)
    assert_gradients_equal_the_body_s(csa2.rms_norm.default, (x, weight, 1e-20))
    assert_gradients_equal_the_body_s(csa2.rms_norm.default, (x.detach(), weight, 0.1))
    assert_gradients_equal_the_body_s(csa2.rms_norm.default, (x, weight.detach(), 0.1))


@all_floats
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 5, 3, 32), (2, 5, 8), (2, 0, 32)], ids=str)
def test_apply_rope_gradient(dtype: torch.dtype, inverse: bool, shape: tuple[int, ...]):
    x = normal(*shape, dtype=dtype, grad=True)
    for batch in (1, 2):
        turns = rotations(batch, shape[1], 8)
        assert_gradients_equal_the_body_s(csa2.apply_rope.default, (x, turns, inverse))


def index_score_inputs(dtype: torch.dtype, quantized: bool, grad: bool = True) -> tuple[Tensor, ...]:
    q, k = normal(2, 6, 3, 32), normal(2, 5, 32, seed=1)
    if quantized:  # with zero products, where the relu has its kink
        q, k = ops.quantize_dequantize(q.mul(4), "mxfp4"), ops.quantize_dequantize(k, "mxfp4")
        q[:, ::2] = 0
    q, k = q.to(dtype).requires_grad_(grad), k.to(dtype).requires_grad_(grad)
    weights = normal(2, 6, 3, dtype=torch.promote_types(dtype, torch.float32), seed=2, grad=grad)
    start, stop = int32([0, 0, 0, 1, 1, 2], [0] * 6), int32([1, 2, 5, 1, 2, 4], [0, 1, 2, 3, 4, 5])
    return q, k, weights, start, stop


@all_floats
@pytest.mark.parametrize("quantized", [False, True])
def test_index_scores_gradient(dtype: torch.dtype, quantized: bool):
    inputs = index_score_inputs(dtype, quantized)
    assert_gradients_equal_the_body_s(csa2.index_scores.default, inputs)
    for kept in range(3):  # each needs its gradient alone
        alone = [x if i == kept else x.detach() for i, x in enumerate(inputs)]
        assert_gradients_equal_the_body_s(csa2.index_scores.default, tuple(alone))


def test_index_scores_gradient_without_compressed_positions():
    q, k = normal(2, 4, 3, 8, grad=True), normal(2, 0, 8, grad=True)
    stop = torch.zeros(2, 4, dtype=torch.int32)
    inputs = q, k, normal(2, 4, 3, grad=True), stop, stop
    assert_gradients_equal_the_body_s(csa2.index_scores.default, inputs)


def test_index_scores_pass_no_gradient_through_invisible_positions():
    inputs = index_score_inputs(torch.float32, quantized=False)
    scores = ops.index_scores(*inputs)
    invisible = scores == -INFINITY
    assert invisible.any()
    upstream = normal(*scores.shape, seed=9)
    expected = gradients(ops.index_scores, inputs, upstream.masked_fill(invisible, 0))
    # A softmax over a row that sees nothing sends NaN back.
    actual = gradients(ops.index_scores, inputs, upstream.masked_fill(invisible, float("nan")))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


REPEATED = int32([[0, 3, 3, 3], [1, -1, 0, -1]], [[2, 2, -1, 2], [-1, -1, -1, -1]])


@all_floats
def test_gather_kv_gradient(dtype: torch.dtype):
    keys = normal(2, 5, 8, dtype=dtype, grad=True)
    # Every row is gathered once and some slots are empty: nothing is summed, so also bfloat16 is exact.
    once = int32([[0, -1, 3], [1, 2, 4]], [[4, 3, 2], [1, -1, 0]])
    assert_gradients_equal_the_body_s(csa2.gather_kv.default, (keys, once))
    assert_gradients_equal_the_body_s(csa2.gather_kv.default, (keys, once[..., :0]))
    if dtype == torch.float32:
        assert_gradients_equal_the_body_s(csa2.gather_kv.default, (keys, REPEATED))


def test_gather_kv_against_a_loop():
    keys = normal(2, 5, 8, grad=True)
    gathered = ops.gather_kv(keys, REPEATED)
    upstream = normal(*gathered.shape, seed=9)
    (gradient,) = torch.autograd.grad(gathered, keys, upstream)
    expected = torch.zeros(2, 5, 8, dtype=torch.float64)
    for b, row in enumerate(REPEATED.tolist()):
        for s, slots in enumerate(row):
            for slot, index in enumerate(slots):
                wanted = keys[b, index] if index >= 0 else torch.zeros(8)
                assert torch.equal(gathered[b, s, slot], wanted)
                if index >= 0:
                    expected[b, index] += upstream[b, s, slot].double()
    torch.testing.assert_close(gradient, expected.float())
    assert not gradient[0, 2].any()  # gathered by nobody


def test_empty_slots_hide_what_stands_in_the_first_row():
    keys = normal(1, 3, 8).index_fill(1, torch.tensor(0), float("nan")).requires_grad_()
    gathered = ops.gather_kv(keys, int32([[-1, 1]]))
    assert torch.equal(gathered[0, 0, 0], torch.zeros(8))
    (gradient,) = torch.autograd.grad(gathered, keys, torch.full_like(gathered, float("nan")))
    assert not gradient[0, [0, 2]].any()


class RecordDtypes(TorchDispatchMode):
    """Notes the dtypes that an operator's first argument has while the mode is active."""

    def __init__(self, packet: torch._ops.OpOverloadPacket) -> None:
        super().__init__()
        self.packet, self.dtypes = packet, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is self.packet:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("repeats", [1, 100, 4000])
def test_bfloat16_gather_gradient_accumulates_in_float32(repeats: int):
    keys = normal(1, 2, 16, dtype=torch.bfloat16, grad=True)
    indices = torch.ones(1, repeats, 1, dtype=torch.int32)
    upstream = torch.rand(1, repeats, 1, 16, generator=generator(1)).to(torch.bfloat16)
    with RecordDtypes(torch.ops.aten.scatter_add) as recorded:  # CPU sums wide by itself, CUDA does not
        (gradient,) = gradients(ops.gather_kv, (keys, indices), upstream)
    assert recorded.dtypes == [torch.float32]
    exact = upstream.double().sum((1, 2))[0]
    # One rounding to bfloat16 (8 significant bits), and float32's own: about half a unit for each addition.
    error = (gradient[0, 1].double() - exact).abs()
    assert (error <= exact * (2**-9 * 2 + repeats * 2**-24)).all()
    assert not gradient[0, 0].any()


def test_gradcheck_rms_norm():
    x = normal(2, 3, 8, dtype=torch.float64, grad=True)
    weight = normal(8, dtype=torch.float64, seed=1, grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: ops.rms_norm(x, weight, 0.01), (x, weight))


@pytest.mark.parametrize("inverse", [False, True])
def test_gradcheck_apply_rope(inverse: bool):
    x = normal(2, 3, 2, 10, dtype=torch.float64, grad=True)
    turns = rotations(2, 3, 8)
    assert torch.autograd.gradcheck(lambda x: ops.apply_rope(x, turns, inverse), (x,))


def test_gradcheck_index_scores():
    q, k, weights, start, stop = index_score_inputs(torch.float64, quantized=False)
    # gradcheck steps by 1e-6 in one entry, all below 5: no product may cross the relu's kink.
    assert float(torch.einsum("bshd,btd->bsht", q, k).detach().abs().min()) > 1e-4
    assert max(float(q.detach().abs().max()), float(k.detach().abs().max())) < 5

    def visible_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        scores = ops.index_scores(q, k, weights, start, stop)
        return scores.where(scores > -INFINITY, 0)

    assert torch.autograd.gradcheck(visible_scores, (q, k, weights))


def test_gradcheck_gather_kv():
    keys = normal(2, 5, 3, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda keys: ops.gather_kv(keys, REPEATED), (keys,))


@pytest.mark.parametrize("sources", [1, 2])
def test_gradcheck_attend(sources: int):
    inputs = attend_inputs(torch.float64, sources, grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: ops.attend(*inputs)[0], inputs)


@all_floats
@pytest.mark.parametrize("sources", [1, 2])
def test_attend_is_the_plain_layout(dtype: torch.dtype, sources: int):
    """Same output, same gradients; the logsumexp is that of the logits and the sink, and has no gradient."""
    inputs = attend_inputs(dtype, sources, grad=True)
    q, sink, *rest = inputs
    out, logsumexp = ops.attend(*inputs)
    visible = torch.cat(rest[1::2], dim=-1)
    gathered = torch.cat([ops.gather_kv(kv, i) for kv, i in zip(rest[::2], rest[1::2], strict=True)], dim=2)
    expected = attend_plain(q, gathered, visible, sink)[0]
    assert torch.equal(out, expected)
    assert not logsumexp.requires_grad
    products = torch.einsum("bshd,bskd->bshk", q.double(), gathered.double()) * q.shape[-1] ** -0.5
    logits = products.masked_fill(visible.unsqueeze(2) < 0, -INFINITY)
    exact = torch.cat([logits, sink.double().view(1, 1, -1, 1).expand(2, 4, -1, -1)], dim=-1).logsumexp(-1)
    torch.testing.assert_close(logsumexp.double(), exact, rtol=1e-6, atol=1e-6)
    leaves = [x for x in inputs if x.requires_grad]
    upstream = normal(*out.shape, dtype=dtype, seed=9)
    ours = torch.autograd.grad(out, leaves, upstream)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    for leaf, a, b in zip(leaves, ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (leaf.shape, leaf.dtype)
        error = (a.double() - b.double()).norm() / b.double().norm()
        # In bfloat16 the rounded output enters, and plain gradients of a row are rounded slot by slot.
        assert error <= (2**-7 if dtype == torch.bfloat16 else 1e-6)


def test_attend_sums_the_gradients_of_rows_in_float32():
    """A row that many slots name: bfloat16 sums would stall at 256 equal shares."""
    q, sink = normal(1, 1000, 1, 8, dtype=torch.bfloat16), torch.full((1,), -30.0)
    kv = normal(1, 1, 8, dtype=torch.bfloat16, grad=True)
    indices = torch.zeros(1, 1000, 1, dtype=torch.int32)
    out, _ = ops.attend(q * 0, sink, kv, indices)
    (gradient,) = torch.autograd.grad(out, kv, torch.ones_like(out))  # each query gives all of its weight
    torch.testing.assert_close(gradient, torch.full_like(gradient, 1000.0), rtol=2**-8, atol=0)


@pytest.mark.parametrize("order", MEMORY_ORDERS.values(), ids=MEMORY_ORDERS.keys())
def test_attend_takes_any_memory_layout(order: Callable[[int], tuple[int, ...]]):
    inputs = attend_inputs(torch.float32, 2)
    changed = tuple(in_memory_order(x, order(x.dim())) if x.dim() > 1 else x for x in inputs)
    results, expected = ops.attend(*changed), ops.attend(*inputs)
    upstream = normal(*results[0].shape, seed=9)
    torch.library.opcheck(csa2.attend.default, changed, test_utils=("test_schema", "test_faketensor"))
    backward = (in_memory_order(upstream, order(4)), *results, *changed)
    torch.library.opcheck(csa2.attend_backward.default, backward, test_utils=("test_schema", "test_faketensor"))
    grads = ops.attend_backward(*backward), ops.attend_backward(upstream, *expected, *inputs)
    for a, b in zip((*results, *grads[0]), (*expected, *grads[1]), strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b)


@all_floats
@pytest.mark.parametrize("format_name", ["fp8", "nvfp4", "mxfp4"])
def test_quantization_is_straight_through(dtype: torch.dtype, format_name: str):
    x = normal(2, 3, 64, dtype=dtype, grad=True)
    quantized = ops.quantize_dequantize(x, format_name)
    assert not torch.equal(quantized, x)
    upstream = normal(2, 3, 64, dtype=dtype, seed=9)
    (gradient,) = torch.autograd.grad(quantized, x, upstream)
    assert torch.equal(gradient, upstream)
    assert gradient.dtype == dtype


def test_selection_ops_give_no_gradient():
    scores = normal(1, 2, 6, grad=True)
    stop = int32([6, 6])
    assert not ops.select_topk(scores, None, 2).requires_grad
    assert not ops.candidate_blocks(scores, stop, None, 2, 2).requires_grad


def test_own_buffer():
    x = normal(3, 2, grad=True)
    assert own_buffer(x) is x  # nothing to do in eager mode
    copy = own_buffer_op(x)
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()
    upstream = normal(3, 2, seed=9)
    assert torch.equal(torch.autograd.grad(copy, x, upstream)[0], upstream)


def test_rms_norm_is_float32_inside():
    x = normal(4, 64, dtype=torch.bfloat16)
    weight = normal(64, seed=1)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-20) * weight
    result = ops.rms_norm(x, weight, 1e-20)
    assert result.dtype == torch.bfloat16
    # The one rounding to bfloat16; float32's errors move a tie at most.
    assert ((result.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-20)).all()
    assert not ops.rms_norm(torch.zeros(1, 64), weight, 1e-20).any()  # eps 1e-20 is no underflow


def test_attend_has_no_second_derivative():
    q, *others = attend_inputs(torch.float64, 1, grad=True)
    out, _ = ops.attend(q, *others)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="csa2::attend has no second derivative"):
        grad.sum().backward()


def test_attend_takes_one_dtype():
    q, sink, window_kv, *others = attend_inputs(torch.float32, 2)
    with pytest.raises(ValueError, match=r"window_kv is torch\.float64; it must have the dtype of q, torch\.float32"):
        ops.attend(q, sink, window_kv.double(), *others)
    with pytest.raises(ValueError, match=r"compressed_kv is torch\.bfloat16"):
        ops.attend(q, sink, window_kv, others[0], others[1].bfloat16(), *others[2:])
