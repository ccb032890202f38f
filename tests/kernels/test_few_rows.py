"""Products of a few rows with a float32 weight, against float64."""

import pytest
import torch

from csa2_compiled.passes.kernels.few_rows import FewRowsTiles, few_rows_product

TILES = FewRowsTiles(outputs=16, channels=16)


@pytest.mark.parametrize(("rows", "outputs", "channels"), [(2, 16, 32), (5, 40, 70), (64, 24, 48), (17, 33, 16)])
def test_sums_of_exact_products(rows: int, outputs: int, channels: int, device: torch.device):
    torch.manual_seed(rows)
    x = torch.randn(rows, channels, device=device).to(torch.bfloat16)
    weight = torch.randn(outputs, channels, device=device)
    expected = x.double() @ weight.double().t()
    # float32 sums: 4e-7 of the largest was measured.
    torch.testing.assert_close(few_rows_product(x, weight, tiles=TILES).double(), expected, atol=4e-6, rtol=1e-6)


def test_all_bits_of_a_weight_count(device: torch.device):
    weight = torch.full((16, 16), 1 + 2.0**-23, device=device)
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
    x[0, 0] = 1
    product = few_rows_product(x, weight, tiles=TILES)
    assert (product[0] == 1 + 2.0**-23).all()
    assert (product[1] == 0).all()


def test_strided_inputs(device: torch.device):
    torch.manual_seed(1)
    x = torch.randn(3, 64, device=device).to(torch.bfloat16)[:, :32]
    weight = torch.randn(20, 50, device=device)[:, :32]
    expected = few_rows_product(x.contiguous(), weight.contiguous(), tiles=TILES)
    assert torch.equal(few_rows_product(x, weight, tiles=TILES), expected)
