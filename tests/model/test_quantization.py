"""Quantization against a slow reference in Python floats, packed storage, and the compiled graph."""

import itertools
import math
from bisect import bisect_left
from ctypes import c_float
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from csa2_compiled import quantization
from csa2_compiled.quantization import (
    FORMATS,
    PackedTensor,
    pack,
    quantize_dequantize_body,
    row_bytes,
    unpack,
)

GOLDEN = Path(__file__).parent.parent / "golden"
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]

all_formats = pytest.mark.parametrize("format_name", list(FORMATS))
all_dtypes = pytest.mark.parametrize("dtype", quantization.DTYPES, ids=str)


def float32(value: float) -> float:
    """Round to fp32. A product or quotient of fp32 values taken in fp64 rounds as if taken exactly."""
    return c_float(value).value


def nearest(value: float, magnitudes: list[float]) -> float:
    """The nearest magnitude with value's sign; ties to the even code, which is the place in the list."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)]
    code = bisect_left(middles, abs(value))
    if code < len(middles) and middles[code] == abs(value):
        code += code % 2
    return math.copysign(magnitudes[code], value)


def reference_group(values: list[float], format_name: str) -> list[float]:
    amax = max(map(abs, values))
    if format_name == "nvfp4":
        scale = nearest(float32(max(amax, 6 * 2.0**-9) / 6), E4M3)
    else:
        floor, reciprocal = (1e-4, 1 / 448) if format_name == "fp8" else (6 * 2.0**-126, 1 / 6)
        significand, exponent = math.frexp(float32(max(amax, float32(floor)) * float32(reciprocal)))
        scale = math.ldexp(1.0, exponent - 1 if significand == 0.5 else exponent)
    magnitudes = E4M3 if format_name == "fp8" else E2M1
    return [float32(nearest(float32(value / scale), magnitudes) * scale) for value in values]


def reference(x: Tensor, format_name: str) -> Tensor:
    groups = x.to(torch.float32).reshape(-1, FORMATS[format_name].group_size).tolist()
    rows = [reference_group(group, format_name) for group in groups]
    return torch.tensor(rows, dtype=torch.float32).reshape(x.shape).to(x.dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    integer = INTEGERS[expected.dtype.itemsize]
    assert torch.equal(actual.isnan(), expected.isnan())
    differ = (actual.view(integer) != expected.view(integer)) & ~expected.isnan()
    assert not differ.any(), (actual[differ][:5], expected[differ][:5])


def neighbours(values: Tensor) -> Tensor:
    """The fp32 values below, at and above each value."""
    infinity = torch.tensor(torch.inf)
    return torch.cat([torch.nextafter(values, -infinity), values, torch.nextafter(values, infinity)])


def adversarial(format_name: str) -> Tensor:
    """fp32 [groups, group_size]: ties and scale boundaries with neighbours; zeros, subnormals, huge ones."""
    group_size = FORMATS[format_name].group_size
    magnitudes = torch.tensor(E4M3 if format_name == "fp8" else E2M1)
    ties = neighbours((magnitudes[1:] + magnitudes[:-1]) / 2)
    largest = magnitudes[-1:]
    if format_name == "nvfp4":
        scales = torch.tensor(E4M3[1:])
        middles = (scales[1:] + scales[:-1]) / 2
        amax = neighbours(6 * torch.cat([scales, middles]))
        scales = scales[::5]
    else:
        amax = neighbours(largest * 2.0 ** torch.arange(-40, 100, 3))
        scales = 2.0 ** torch.tensor([-22.0, -3, 0, 50, 110])
        if format_name == "mxfp4":
            scales = torch.cat([scales, torch.tensor([2.0**-126, 2.0**-125])])
    tie_rows = []
    for scale in scales:
        chunks = torch.cat([ties, -ties]).split(group_size - 1)
        filled = [torch.cat([largest, chunk, chunk.new_zeros(group_size - 1 - len(chunk))]) for chunk in chunks]
        tie_rows.append(torch.stack(filled) * scale)
    amax_rows = amax[:, None] * torch.linspace(1, -1, group_size)
    special = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-140), 2.0**-126, 1e-30, 1e-4, 1e4, 3.4e38, -3.4028235e38])
    special_rows = special[:, None] * (torch.arange(group_size) % 3 - 1.0)
    return torch.cat([*tie_rows, amax_rows, special_rows])


def random_groups(format_name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    magnitude = 2.0 ** torch.linspace(-20, 12, 64)
    return torch.randn(64, 2 * FORMATS[format_name].group_size, generator=generator) * magnitude[:, None]


@all_formats
@all_dtypes
@pytest.mark.parametrize("make", [random_groups, adversarial])
def test_body_and_packed_match_reference(format_name, dtype, make):
    x = make(format_name).to(dtype)
    x = x[x.isfinite().all(-1)]
    result = quantize_dequantize_body(x, format_name)
    assert_same_bits(result, reference(x, format_name))
    assert_same_bits(unpack(pack(x, format_name)), result)


@st.composite
def finite_groups(draw):
    format_name = draw(st.sampled_from(list(FORMATS)))
    dtype = draw(st.sampled_from(quantization.DTYPES))
    limit = 2.0 ** draw(st.integers(-149, 14 if dtype == torch.float16 else 126))
    size = FORMATS[format_name].group_size
    values = draw(st.lists(st.floats(-limit, limit, width=32), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32).to(dtype), format_name


@given(finite_groups())
@settings(max_examples=300, deadline=None)
def test_any_group_matches_reference_and_survives_packing(group):
    x, format_name = group
    result = quantize_dequantize_body(x, format_name)
    assert_same_bits(result, reference(x, format_name))
    assert_same_bits(unpack(pack(x, format_name)), result)


@given(finite_groups())
@settings(max_examples=200, deadline=None)
def test_error_bound(group):
    x, format_name = group
    amax = x.abs().max().double()
    assume(format_name != "nvfp4" or amax <= 2688)
    if format_name == "fp8":  # half a step: 2^-4 of a normal value, 2^-10 scales of a subnormal one
        bound = x.abs().double() / 16 + torch.maximum(amax / 224, torch.tensor(2.0**-22)) * 2.0**-10
    else:  # half of the widest step is one scale, at most amax / 3; so is clamping under nvfp4's least scale
        bound = amax / 3 + (2.0**-9 if format_name == "nvfp4" else 2.0**-126)
    # The result's own rounding: fp16 has steps of 2^-24 at least.
    bound = bound + (2.0**-25 if x.dtype == torch.float16 else 0)
    error = (quantize_dequantize_body(x, format_name).double() - x.to(torch.float32).double()).abs()
    assert (error <= bound).all()


@given(finite_groups())
@settings(max_examples=300, deadline=None)
def test_idempotent(group):
    x, format_name = group
    assume(format_name != "nvfp4" or not 9 * 2.0**-9 <= x.abs().max() <= 10 * 2.0**-9)
    once = quantize_dequantize_body(x, format_name)
    assert_same_bits(quantize_dequantize_body(once, format_name), once)


@pytest.mark.parametrize("amax", [9 * 2.0**-9, 10 * 2.0**-9])
def test_nvfp4_is_not_idempotent_where_its_scale_is_two_steps(amax):
    # amax / 6 rounds to the scale 2 * 2^-9, amax / scale to 4; the result's own scale is 2^-9 and clamps it.
    x = torch.zeros(16)
    x[3] = amax
    once = quantize_dequantize_body(x, "nvfp4")
    assert once[3] == 8 * 2.0**-9
    assert quantize_dequantize_body(once, "nvfp4")[3] == 6 * 2.0**-9


@pytest.mark.parametrize("divisor", [6.0, 1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875])
def test_division_is_correctly_rounded(divisor):
    # One binade of values and one of E4M3 scales stand for all: every operation scales with powers of two.
    value = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    expected = (value.double() / divisor).float()
    assert torch.equal(quantization._divide(value, divisor), expected)
    assert torch.equal(quantization._divide(value, torch.tensor(divisor)), expected)


def test_e4m3_rounding_is_the_cast():
    bfloat16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.tensor(E4M3)
    ties = neighbours((codes[1:] + codes[:-1]) / 2)
    values = torch.cat([bfloat16, ties, -ties])
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert_same_bits(quantization._round_to_minifloat(values, "e4m3"), expected)


@all_formats
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@all_dtypes
def test_not_finite_makes_its_group_nan(format_name, value, dtype):
    group_size = FORMATS[format_name].group_size
    x = torch.full((2, 3 * group_size), 6.0, dtype=dtype)
    x[1, group_size + 2] = value
    expected = torch.zeros_like(x, dtype=torch.bool)
    expected[1, group_size : 2 * group_size] = True
    for result in (quantize_dequantize_body(x, format_name), unpack(pack(x, format_name))):
        assert torch.equal(result.isnan(), expected)
        assert (result[~expected] == 6).all()


def test_range_ends():
    x = torch.zeros(16)
    x[0] = -1e6
    assert quantize_dequantize_body(x, "nvfp4")[0] == -2688
    top = torch.full((32,), 65504, dtype=torch.float16)
    assert quantize_dequantize_body(top, "fp8")[0] == math.inf


@all_formats
def test_sign_of_zero_is_kept(format_name):
    x = torch.ones(FORMATS[format_name].group_size)
    x[:3] = torch.tensor([0.0, -0.0, -1e-9])
    for result in (quantize_dequantize_body(x, format_name), unpack(pack(x, format_name))):
        assert (result[:3] == 0).all()
        assert result[:3].signbit().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("dim", "format_name", "expected"),
    [(512, "fp8", 528), (512, "nvfp4", 288), (128, "mxfp4", 68), (0, "fp8", 0)],
)
def test_row_bytes(dim, format_name, expected):
    assert row_bytes(dim, format_name) == expected
    packed = pack(torch.ones(3, 2, dim), format_name)
    assert packed.codes.dtype == packed.scales.dtype == torch.uint8
    assert packed.codes.shape[-1] + packed.scales.shape[-1] == expected
    assert unpack(packed).shape == (3, 2, dim)


def test_packed_bytes():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.5, -4.0])
    mxfp4 = pack(x, "mxfp4")
    assert mxfp4.codes[0, :3].tolist() == [0x97, 0xE3, 0]
    assert mxfp4.scales.tolist() == [[127]]  # 2^0
    nvfp4 = pack(x, "nvfp4")
    assert nvfp4.codes[0, :3].tolist() == [0x97, 0xE3, 0]
    assert nvfp4.scales.tolist() == [[0x38, 0x01]]  # E4M3 1 and 2^-9
    fp8 = pack(torch.tensor([448.0, -1.0] + [0.0] * 30).bfloat16(), "fp8")
    assert fp8.codes[:3].tolist() == [0x7E, 0xB8, 0]
    assert fp8.scales.tolist() == [127]
    assert fp8.dtype == unpack(fp8).dtype == torch.bfloat16


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_released_values_are_fixed_points(path):
    formats = {"window_kv": "fp8", "compressed_kv": "nvfp4", "index_keys": "mxfp4"}
    checked = 0
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            format_name = formats.get(name.rsplit(".", 1)[-1])
            if format_name is not None:
                released = file.get_tensor(name)
                assert_same_bits(quantize_dequantize_body(released, format_name), released)
                assert_same_bits(unpack(pack(released, format_name)), released)
                checked += 1
    assert checked > 0


def test_not_contiguous_and_empty():
    x = torch.randn(64, 3, 5)
    result = quantize_dequantize_body(x.permute(2, 1, 0), "fp8")
    assert result.is_contiguous()
    assert_same_bits(result, quantize_dequantize_body(x.permute(2, 1, 0).contiguous(), "fp8"))
    assert quantize_dequantize_body(torch.ones(0, 64), "nvfp4").shape == (0, 64)


def test_errors():
    with pytest.raises(ValueError, match="format_name is 'int8'; allowed: 'fp8', 'nvfp4', 'mxfp4'"):
        quantize_dequantize_body(torch.ones(32), "int8")
    with pytest.raises(ValueError, match="format_name"):
        row_bytes(32, "int8")
    with pytest.raises(ValueError, match=r"x.shape\[-1\] is 48; allowed for mxfp4: multiples of 32"):
        pack(torch.ones(2, 48), "mxfp4")
    with pytest.raises(ValueError, match="dim is 24; allowed for nvfp4: multiples of 16"):
        row_bytes(24, "nvfp4")
    with pytest.raises(ValueError, match=r"x has dtype torch.int32; allowed: torch.float16, .*torch.float64"):
        quantize_dequantize_body(torch.ones(32, dtype=torch.int32), "fp8")
    with pytest.raises(ValueError, match="x has no dimensions"):
        quantize_dequantize_body(torch.tensor(1.0), "fp8")
    packed = pack(torch.ones(2, 64), "mxfp4")
    with pytest.raises(ValueError, match=r"packed.codes has shape \(2, 32\); .*\(2, 1\): \(2, 16\)"):
        unpack(replace(packed, scales=packed.scales[:, :1]))


@all_formats
def test_traces_with_symbolic_shapes(format_name):
    def round_trip(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_dequantize_body(x, format_name), unpack(pack(x, format_name))

    graph = make_fx(round_trip, tracing_mode="symbolic")(torch.randn(3, 5, 64).bfloat16())
    x = torch.randn(2, 7, 64).bfloat16()
    for traced, eager in zip(graph(x), round_trip(x), strict=True):
        assert_same_bits(traced, eager)


def scaled_round_trip(x: Tensor, factor: float, format_name: str) -> tuple[Tensor, Tensor, PackedTensor]:
    """As in a layer: another op, fused by a compiler, makes the values and rounds them to their dtype."""
    x = (x.float() * factor).to(x.dtype)
    packed = pack(x, format_name)
    return quantize_dequantize_body(x, format_name), unpack(packed), packed


def check_compiled(format_name: str, dtype: torch.dtype, device: str) -> None:
    x = torch.cat([adversarial(format_name), random_groups(format_name).view(-1, FORMATS[format_name].group_size)])
    x[7, 3], x[9, 4] = math.nan, -math.inf
    x = x.to(dtype)
    torch.compiler.reset()
    compiled = torch.compile(scaled_round_trip, fullgraph=True)
    for factor in (1.0, 1.1):
        expected = scaled_round_trip(x, factor, format_name)
        for run in (scaled_round_trip, compiled):
            result = run(x.to(device), factor, format_name)
            for actual_values, expected_values in zip(result[:2], expected[:2], strict=True):
                assert_same_bits(actual_values.cpu(), expected_values)
            # Codes of a NaN group are arbitrary.
            finite = ~expected[1].isnan().any(-1)
            assert torch.equal(result[2].codes.cpu()[finite], expected[2].codes[finite])
            assert torch.equal(result[2].scales.cpu()[finite], expected[2].scales[finite])


@pytest.mark.slow
@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_has_eager_bits(format_name, dtype):
    check_compiled(format_name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_has_cpu_bits(format_name, dtype):
    check_compiled(format_name, dtype, "cuda")
