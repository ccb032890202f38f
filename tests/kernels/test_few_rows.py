"""Products of a few rows with weights read once, against float64."""

import pytest
import torch
from torch import Tensor

from csa2_compiled.passes import gemv
from csa2_compiled.passes.kernels.few_rows import (
    MOST_WEIGHTS,
    FewRowsTiles,
    _shared_memory,
    choose_tiles,
    few_rows_products,
    grouped_few_rows_product,
)

TILES = FewRowsTiles(outputs=16, channels=16)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().mT


def assert_rounded_once(product: Tensor, expected: Tensor) -> None:
    """A 16-bit result is the float64 one, rounded, but where float32 sums tip it: one unit in the last place."""
    bits = {torch.bfloat16: 8, torch.float16: 11}[product.dtype]
    torch.testing.assert_close(product.double(), expected, atol=4e-6, rtol=2.0**-bits * 1.01)


@pytest.mark.parametrize("programs", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("rows", "outputs", "channels"),
    [(2, (16,), 32), (5, (40, 16, 3), 70), (64, (24, 33), 48), (17, (1, 1, 20, 1), 16)],
)
def test_sums_of_exact_products(
    rows: int, outputs: tuple[int, ...], channels: int, programs: int | None, device: torch.device
):
    torch.manual_seed(rows)
    x = torch.randn(rows, channels, device=device).to(torch.bfloat16)
    weights = [torch.randn(n, channels, device=device) for n in outputs]
    tiles = FewRowsTiles(outputs=16, channels=16, programs=programs)
    products = few_rows_products(x, weights, tiles=tiles)
    assert [tuple(product.shape) for product in products] == [(rows, n) for n in outputs]
    for product, weight in zip(products, weights, strict=True):
        # float32 sums: 4.9e-6 was measured on an H200, of 48 channels.
        torch.testing.assert_close(product.double(), exact(x, weight), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("programs", [None, 5])
def test_16_bit_weights_give_16_bit_results(dtype: torch.dtype, programs: int | None, device: torch.device):
    torch.manual_seed(0)
    x = torch.randn(9, 80, device=device).to(dtype)
    weights = [torch.randn(n, 80, device=device).to(dtype) for n in (40, 8)]
    tiles = FewRowsTiles(outputs=16, channels=32, programs=programs)
    for product, weight in zip(few_rows_products(x, weights, tiles=tiles), weights, strict=True):
        assert product.dtype == dtype
        assert product.is_contiguous()
        assert_rounded_once(product, exact(x, weight))


@pytest.mark.parametrize("programs", [None, 4, 5])
def test_groups(programs: int | None, device: torch.device):
    torch.manual_seed(0)
    x = torch.randn(7, 3, 48, device=device).to(torch.bfloat16).transpose(0, 1)
    weight = torch.randn(3, 20, 48, device=device).to(torch.bfloat16)
    tiles = FewRowsTiles(outputs=16, channels=16, programs=programs)
    product = grouped_few_rows_product(x, weight, tiles=tiles)
    assert product.shape == (7, 3, 20)
    assert product.is_contiguous()
    assert_rounded_once(product, exact(x, weight).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_are_chosen(dtype: torch.dtype, device: torch.device):
    torch.manual_seed(0)
    x = torch.randn(3, 96, device=device).to(torch.bfloat16)
    weight = torch.randn(200, 96, device=device).to(dtype)
    (product,) = few_rows_products(x, [weight])
    assert product.dtype == dtype
    if dtype == torch.bfloat16:
        assert_rounded_once(product, exact(x, weight))
    else:
        torch.testing.assert_close(product.double(), exact(x, weight), atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("groups", [1, 8])
def test_chosen_tiles_fit_the_shared_memory(groups: int, rows: int, dtype: torch.dtype):
    for kib in (227, 163, 99, 48):
        tiles = choose_tiles(groups, rows, dtype, kib << 10)
        assert _shared_memory(tiles, rows, dtype) <= kib << 10
        assert tiles.outputs >= 16
        assert tiles.num_stages >= 2
    with pytest.raises(ValueError, match=f"no tiles for {rows} rows fit 1024 bytes of shared memory"):
        choose_tiles(groups, rows, dtype, 1024)


def test_all_bits_of_a_weight_count(device: torch.device):
    weight = torch.full((16, 16), 1 + 2.0**-23, device=device)
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
    x[0, 0] = 1
    (product,) = few_rows_products(x, [weight], tiles=TILES)
    assert (product[0] == 1 + 2.0**-23).all()
    assert (product[1] == 0).all()


def test_strided_inputs(device: torch.device):
    torch.manual_seed(1)
    x = torch.randn(3, 64, device=device).to(torch.bfloat16)[:, :32]
    weights = [torch.randn(20, 50, device=device)[:, :32] for _ in range(2)]
    expected = few_rows_products(x.contiguous(), [w.contiguous() for w in weights], tiles=TILES)
    for product, same in zip(few_rows_products(x, weights, tiles=TILES), expected, strict=True):
        assert torch.equal(product, same)


def test_more_weights_than_a_launch_takes(device: torch.device):
    assert gemv._MOST_WEIGHTS == MOST_WEIGHTS  # the pass cannot import it without Triton
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="weights are 5; a launch takes at most 4"):
        few_rows_products(x, [x] * 5)
