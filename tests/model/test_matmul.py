"""Products with float32 accumulation: errors against float64, and the splits of weights that tensor cores take.

CPU has no product of another output dtype, so a stand-in, exact but for its last rounding, takes its place.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2_compiled import matmul
from csa2_compiled.matmul import linear_float32, matmul_float32, weighted_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LOW = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_accumulated_in(wide: torch.dtype, got: Tensor, a: Tensor, b: Tensor, kept_bits: int = 60) -> None:
    """Within the bound of sums in `wide` of operands of which `kept_bits` bits are kept; a @ b is the result."""
    a, b = a.double(), b.double()
    unit = torch.finfo(wide).eps * a.shape[-1] + 2.0**-kept_bits
    assert got.dtype is wide
    assert ((got.double() - a @ b).abs() <= unit * (a.abs() @ b.abs())).all()


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


Calls = list[tuple[Tensor, Tensor]]


def force_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """16-bit operands take the way of tensor cores; returns the operands of the calls that did."""
    calls: Calls = []

    def stand_in(original: Any) -> Any:
        def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
            if out_dtype is None:
                return original(a, b)
            assert a.dtype is b.dtype
            assert a.dtype in LOW
            calls.append((a, b))
            return original(a.double(), b.double()).to(out_dtype)

        return product

    monkeypatch.setattr(matmul, "_takes_tensor_cores", lambda a, b: a.dtype in LOW)
    monkeypatch.setattr(torch, "bmm", stand_in(torch.bmm))
    monkeypatch.setattr(torch, "mm", stand_in(torch.mm))
    return calls


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return force_tensor_cores(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_float32(dtype: torch.dtype) -> None:
    a, b = random(3, 5, 70, dtype=dtype), random(3, 70, 4, dtype=dtype, seed=1)
    assert_accumulated_in(wide_of(dtype), matmul_float32(a, b), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float64])
def test_weighted_sum(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    weights = random(3, 5, 70, dtype=weights_dtype).softmax(-1)
    values = random(3, 70, 4, dtype=dtype, seed=1)
    expected = values.to(weights_dtype)  # float64 values round to float32 weights' dtype
    assert_accumulated_in(weights_dtype, weighted_sum(weights, values), weights, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [7, 200])
@pytest.mark.parametrize("sizes", [(6,), (4, 3)])
def test_linear_float32(dtype: torch.dtype, tokens: int, sizes: tuple[int, ...]) -> None:
    x = random(2, tokens, 40, dtype=dtype)
    weights = [random(size, 40, seed=size) for size in sizes]
    got = linear_float32(x, weights)
    assert got.shape == (2, tokens, sum(sizes))
    assert_accumulated_in(wide_of(dtype), got, x, torch.cat(weights).t())


@pytest.mark.parametrize("dtype", LOW)
def test_16_bit_operands_go_to_tensor_cores_as_they_are(tensor_cores: Calls, dtype: torch.dtype) -> None:
    a, b = random(3, 5, 70, dtype=dtype), random(3, 70, 4, dtype=dtype, seed=1)
    assert_accumulated_in(torch.float32, matmul_float32(a, b), a, b)
    ((left, right),) = tensor_cores
    assert left is a
    assert right is b
    matmul_float32(a.float(), b.float())
    assert len(tensor_cores) == 1


@pytest.mark.parametrize("dtype", LOW)
def test_weights_of_sums_are_split_in_two(tensor_cores: Calls, dtype: torch.dtype) -> None:
    weights = random(3, 5, 70).softmax(-1)
    values = random(3, 70, 4, dtype=dtype, seed=1)
    got = weighted_sum(weights, values)
    assert (got.double() - weights.double() @ values.double()).abs().max() <= 2.0**-16  # rows of weights sum to 1
    ((halves, _),) = tensor_cores
    assert halves.shape == (3, 10, 70)
    parts = halves.double().unflatten(1, (2, 5))
    assert torch.equal(parts[:, 0], weights.to(dtype).double())
    error = (parts.sum(1) - weights.double()).abs()
    # float16's smallest step is 2^-24, and what is left of a small weight is less.
    assert (error <= (2.0**-16 * weights).clamp(min=0 if dtype is torch.bfloat16 else 2.0**-25)).all()


# Of the sizes whose 24 bits lie within bfloat16's normal numbers.
WEIGHTS = st.floats(2.0**-100, 2.0**100, width=32).flatmap(lambda w: st.sampled_from((w, -w))) | st.just(0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=8))
def test_two_bfloat16_numbers_keep_16_bits(weights: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = force_tensor_cores(monkeypatch)
        exact = torch.tensor(weights).view(1, 1, -1)
        got = weighted_sum(exact, torch.eye(len(weights), dtype=torch.bfloat16).unsqueeze(0))
    assert len(calls) == 1
    assert ((got.double() - exact.double()).abs() <= 2.0**-16 * exact.double().abs()).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=8))
def test_three_bfloat16_numbers_keep_every_bit(weights: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = force_tensor_cores(monkeypatch)
        exact = torch.tensor(weights).view(-1, 1)
        got = linear_float32(torch.ones(1, 256, 1, dtype=torch.bfloat16), [exact])
    ((_, parts),) = calls
    assert parts.dtype is torch.bfloat16
    assert torch.equal(parts.double().view(3, -1).sum(0), exact.double().flatten())
    assert torch.equal(got.view(256, -1), exact.flatten().expand(256, -1))


def test_many_rows_of_bfloat16_take_tensor_cores(tensor_cores: Calls) -> None:
    x, weights = random(2, 128, 40, dtype=torch.bfloat16), [random(6, 40, seed=1), random(3, 40, seed=2)]
    together = torch.cat(weights)
    got = linear_float32(x, weights)
    assert got.shape == (2, 128, 9)
    assert_accumulated_in(torch.float32, got, x, together.t())
    ((rows, parts),) = tensor_cores
    assert torch.equal(rows, x.flatten(0, 1))
    assert torch.equal(parts.t().double().unflatten(0, (3, 9)).sum(0), together.double())


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.bfloat16, 127), (torch.float16, 128), (torch.float32, 128), (torch.float64, 128)]
)
def test_few_rows_and_other_dtypes_do_not(tensor_cores: Calls, dtype: torch.dtype, tokens: int) -> None:
    x, weight = random(2, tokens, 40, dtype=dtype), random(6, 40, seed=1)
    assert_accumulated_in(wide_of(dtype), linear_float32(x, [weight]), x, weight.t())
    assert tensor_cores == []


def test_tensor_cores_take_16_bit_numbers_on_cuda_that_need_no_gradient() -> None:
    def operand(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", requires_grad: bool = False) -> Any:
        return SimpleNamespace(dtype=dtype, device=torch.device(device), requires_grad=requires_grad)

    takes = matmul._takes_tensor_cores
    assert takes(operand(), operand())
    assert takes(operand(torch.float16), operand())
    assert not takes(operand(torch.float32), operand())
    assert not takes(operand(device="cpu"), operand(device="cpu"))
    for needs in ((True, False), (False, True)):
        a, b = (operand(requires_grad=grad) for grad in needs)
        assert not takes(a, b)
        with torch.no_grad():
            assert takes(a, b)


def test_gradients_reach_every_operand() -> None:
    def operand(*shape: int) -> Tensor:
        return random(*shape, dtype=torch.float64, seed=len(shape)).requires_grad_()

    assert torch.autograd.gradcheck(matmul_float32, (operand(2, 3, 4), operand(2, 4, 2)))
    assert torch.autograd.gradcheck(weighted_sum, (operand(2, 3, 4), operand(2, 4, 2)))
    x, weights = operand(2, 3, 4), (operand(5, 4), operand(2, 4))
    assert torch.autograd.gradcheck(lambda x, *w: linear_float32(x, w), (x, *weights))
