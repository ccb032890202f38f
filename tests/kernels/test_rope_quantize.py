"""RoPE and quantization kernel against the plain bodies, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from csa2_compiled.ops import rms_norm_body
from csa2_compiled.passes.kernels import rope_quantize as kernel
from csa2_compiled.passes.kernels.rope_quantize import RopeQuantizeTiles, rope_quantize
from csa2_compiled.quantization import FORMATS, quantize_dequantize_body
from csa2_compiled.rope import apply_rope_body

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {2: torch.int16, 4: torch.int32}
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The interpreter computes with numpy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.is_contiguous()
    integer = INTEGERS[expected.dtype.itemsize]
    assert torch.equal(actual.isnan(), expected.isnan())
    differ = (actual.view(integer) != expected.view(integer)) & ~expected.isnan()
    assert not differ.any(), (actual[differ][:5], expected[differ][:5])


def rotations_for(batch: int, tokens: int, rotary_dim: int, device: torch.device) -> Tensor:
    angles = torch.randn(batch, tokens, rotary_dim // 2) * 100
    angles[:, 0] = 0  # the first position does not turn, which keeps signed zeros
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)


def wide_range(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes, a few zeros of both signs among them."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)))
    x[torch.rand(shape) < 0.05] = -0.0
    x[torch.rand(shape) < 0.05] = 0.0
    return x.to(dtype)


def plain(x: Tensor, rotations: Tensor | None, inverse: bool, format_name: str | None) -> Tensor:
    if rotations is not None:
        x = apply_rope_body(x, rotations, inverse)
    return x if format_name is None else quantize_dequantize_body(x, format_name)


@all_dtypes
@pytest.mark.parametrize(
    ("format_name", "shape", "rotary_dim"),
    [
        ("fp8", (1, 5, 64), 16),
        ("fp8", (1, 3, 512), 64),
        ("nvfp4", (2, 3, 96), 96),
        ("nvfp4", (1, 4, 512), 64),
        ("mxfp4", (2, 3, 3, 128), 64),
        ("mxfp4", (1, 0, 64), 32),
        (None, (2, 3, 3, 192), 64),
        (None, (2, 5, 48), 32),
    ],
    ids=str,
)
def test_rope_and_quantization_keep_the_bits(
    dtype: torch.dtype, format_name: str | None, shape: tuple[int, ...], rotary_dim: int, device: torch.device
):
    torch.manual_seed(0)
    x = wide_range(*shape, dtype=dtype).to(device)
    for batch, inverse in ((1, False), (shape[0], True)):
        rotations = rotations_for(batch, max(shape[1], 1), rotary_dim, device)[:, : shape[1]]
        actual = rope_quantize(x, rotations, inverse=inverse, format_name=format_name)
        assert_same_bits(actual, plain(x, rotations, inverse, format_name))


@all_dtypes
@pytest.mark.parametrize("format_name", FORMATS)
def test_quantization_alone_keeps_the_bits_of_odd_values(dtype: torch.dtype, format_name: str, device: torch.device):
    limits = torch.finfo(dtype)
    odd = [0.0, -0.0, limits.tiny, -limits.tiny, limits.smallest_normal / 4, limits.max, -limits.max, 1e-4, 2688.0]
    spoiled = [math.inf, -math.inf, math.nan]
    ties = torch.arange(-256, 256).view(-1, 32) / 8 * torch.tensor([2.0**-9, 1.0, 8.0]).view(3, 1, 1)
    alone = torch.ones(len(odd + spoiled), 32)
    alone[:, 5] = torch.tensor(odd + spoiled)
    groups = torch.cat([ties.flatten(0, 1), alone, alone.flip(1) * 3]).to(dtype)
    x = torch.cat([groups, torch.ones_like(groups)], dim=1)[None].to(device)  # a neighbouring group stays as it is
    assert_same_bits(rope_quantize(x, format_name=format_name), quantize_dequantize_body(x, format_name))


def test_formats_are_those_of_the_plain_body():
    names = "group_size", "amax_floor", "element", "scale"
    plain_formats = {name: tuple(getattr(fields, n) for n in names) for name, fields in FORMATS.items()}
    assert plain_formats == kernel.FORMATS


@all_dtypes
@pytest.mark.parametrize("dim", [64, 96, 512])
def test_norm_feeds_rope_and_quantization(dtype: torch.dtype, dim: int, device: torch.device):
    torch.manual_seed(1)
    x, weight = torch.randn(2, 4, dim).to(dtype).to(device), (torch.rand(dim) + 0.5).to(device)
    rotations = rotations_for(1, 4, 32, device)
    normalized = rope_quantize(x, norm_weight=weight, eps=1e-6)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(normalized, rms_norm_body(x, weight, 1e-6), rtol=tolerance, atol=0)
    actual = rope_quantize(x, rotations, format_name="fp8", norm_weight=weight, eps=1e-6)
    assert_same_bits(actual, plain(normalized, rotations, False, "fp8"))


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_rows_may_be_strided(rows: int, device: torch.device):
    torch.manual_seed(2)
    rotations = rotations_for(2, 5, 32, device)
    fused = torch.randn(2, 5, 3, 192, device=device)
    for x in (fused[..., 32:96], fused[:, :, 1, :64], fused.transpose(1, 2)[:, :, :, :64].transpose(1, 2)):
        actual = rope_quantize(x, rotations, format_name="mxfp4", tiles=RopeQuantizeTiles(rows=rows))
        assert_same_bits(actual, plain(x, rotations, False, "mxfp4"))
