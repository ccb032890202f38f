"""Rows of a cache, as values and packed, and the rows that tokens and groups go to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2_compiled import ops
from csa2_compiled.quantization import DTYPES, FORMATS, PackedTensor, quantize_dequantize_body, row_bytes
from csa2_compiled.rows import Rows, buffers, empty_rows, first_rows, gather_rows, read_rows, write_rows
from csa2_compiled.tokens import lay_out_tokens

CPU = torch.device("cpu")
D = 32
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
formats = pytest.mark.parametrize("format_name", [None, *FORMATS])


def make_values(format_name: str | None, dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Quantized values [2, count, D] over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 2.0 ** torch.randint(-9, 4, (2, count, D // 16, 1), generator=generator)
    values = (torch.randn(2, count, D // 16, 16, generator=generator) * magnitudes).flatten(2).to(dtype)
    return values if format_name is None else quantize_dequantize_body(values, format_name)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@formats
@dtypes
def test_empty_rows_are_zeros(format_name: str | None, dtype: torch.dtype) -> None:
    rows = empty_rows((2, 5, D), dtype, CPU, format_name)
    assert same_bits(read_rows(rows), torch.zeros(2, 5, D, dtype=dtype))
    assert isinstance(rows, PackedTensor) == (format_name is not None)
    assert all(buffer.shape[:2] == (2, 5) for buffer in buffers(rows))
    size = D * dtype.itemsize if format_name is None else row_bytes(D, format_name)
    assert sum(buffer.nbytes for buffer in buffers(rows)) == 2 * 5 * size


@formats
@dtypes
def test_what_is_written_is_read(format_name: str | None, dtype: torch.dtype) -> None:
    """Bit for bit, in place, each row of the batch at its own numbers, and nowhere else."""
    rows = empty_rows((2, 5, D), dtype, CPU, format_name)
    before = [buffer.data_ptr() for buffer in buffers(rows)]
    values = make_values(format_name, dtype, 3)
    numbers = torch.tensor([[4, 0, 2], [1, 2, 3]])
    write_rows(rows, numbers, values)
    assert [buffer.data_ptr() for buffer in buffers(rows)] == before
    expected = torch.zeros(2, 5, D, dtype=dtype)
    expected.scatter_(1, numbers.unsqueeze(-1).expand_as(values), values)
    assert same_bits(read_rows(rows), expected)

    newer = make_values(format_name, dtype, 1, seed=1)
    write_rows(rows, torch.tensor([[2], [2]]), newer)
    expected[:, 2:3] = newer
    assert same_bits(read_rows(rows), expected)


@pytest.mark.parametrize("format_name", FORMATS)
@dtypes
def test_packing_quantized_values_loses_nothing(format_name: str, dtype: torch.dtype) -> None:
    """Quantizing twice can lose: nvfp4 groups with a scale of 2^-8 and 4 as their largest element do."""
    group = FORMATS[format_name].group_size
    largest = torch.logspace(-12, 6, 4000, base=2.0)
    generator = torch.Generator().manual_seed(0)
    values = (torch.rand(4000, group, generator=generator) * 2 - 1) * largest.unsqueeze(1)
    values[:, 0] = largest
    values = quantize_dequantize_body(values.to(dtype), format_name).view(1, -1, group)
    rows = empty_rows((1, 4000, group), dtype, CPU, format_name)
    write_rows(rows, torch.arange(4000).unsqueeze(0), values)
    assert same_bits(read_rows(rows), values)
    if format_name == "nvfp4":
        assert (values.abs().amax(-1) == 2.0**-6).any()
        assert not torch.equal(quantize_dequantize_body(values, format_name), values)


@given(
    elements=st.lists(st.integers(0, 7), min_size=16, max_size=16),
    signs=st.lists(st.booleans(), min_size=16, max_size=16),
    scale=st.integers(1, 0x7E),
)
@settings(max_examples=100, deadline=None)
def test_every_nvfp4_group_survives(elements: list[int], signs: list[bool], scale: int) -> None:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[elements]
    scales = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    raw = torch.where(torch.tensor(signs), -magnitudes, magnitudes) * scales
    values = quantize_dequantize_body(raw, "nvfp4").view(1, 1, 16)
    rows = empty_rows((1, 1, 16), torch.float32, CPU, "nvfp4")
    write_rows(rows, torch.tensor([[0]]), values)
    assert same_bits(read_rows(rows), values)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format_name", FORMATS)
def test_nan_stays_in_its_group(format_name: str, value: float) -> None:
    values = torch.ones(1, 2, D)
    values[0, 1, 3] = value
    values = quantize_dequantize_body(values, format_name)
    rows = empty_rows((1, 2, D), torch.float32, CPU, format_name)
    write_rows(rows, torch.tensor([[0, 1]]), values)
    assert torch.equal(read_rows(rows).isnan(), values.isnan())
    assert torch.equal(read_rows(rows).nan_to_num(), values.nan_to_num())


def filled(format_name: str | None, dtype: torch.dtype, count: int) -> tuple[Rows, Tensor]:
    rows, values = empty_rows((2, count, D), dtype, CPU, format_name), make_values(format_name, dtype, count)
    write_rows(rows, torch.arange(count).expand(2, -1), values)
    return rows, values


@formats
@dtypes
def test_first_rows_are_a_view(format_name: str | None, dtype: torch.dtype) -> None:
    rows, values = filled(format_name, dtype, 5)
    for count in (0, 2, 5):
        first = first_rows(rows, count)
        assert same_bits(read_rows(first), values[:, :count])
        for view, buffer in zip(buffers(first), buffers(rows), strict=True):
            assert view.data_ptr() == buffer.data_ptr() or count == 0
    newer = make_values(format_name, dtype, 1, seed=1)
    write_rows(rows, torch.tensor([[1], [1]]), newer)
    assert same_bits(read_rows(first)[:, 1:2], newer)


@formats
@dtypes
@pytest.mark.parametrize("shape", [(2, 1, 4), (2, 3, 1), (2, 2, 0)])
def test_gathered_rows_are_those_of_the_values(
    format_name: str | None, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """Packed bytes are gathered and then unpacked; an empty slot (-1) gives zeros."""
    rows, values = filled(format_name, dtype, 5)
    indices = torch.randint(-1, 5, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    got = gather_rows(rows, indices)
    assert got.shape == (*shape, D)
    assert same_bits(got, ops.gather_kv(values, indices))
    assert (got[indices < 0] == 0).all()


# Where tokens go


def mask_of(counts: list[int], tokens: int) -> Tensor:
    return (torch.arange(tokens) < torch.tensor(counts).unsqueeze(1)).long()


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=3),
    size=st.integers(1, 9),
    padded=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_ring_takes_the_newest_tokens_once_each(rows: list[tuple[int, int]], size: int, padded: bool) -> None:
    """No row of the ring is written twice in a step: which of two writes would stay is not defined."""
    past = torch.tensor([had for had, _ in rows])
    counts = [new if padded else 12 for _, new in rows]
    tokens = lay_out_tokens(12, CPU, mask_of(counts, 12) if padded else None, past=past)
    numbers = tokens.ring_rows(size)
    assert numbers.dtype == torch.int64
    for (had, _), count, row in zip(rows, counts, numbers.tolist(), strict=True):
        kept = range(max(count - size, 0), count)
        assert row == [(had + i) % size if i in kept else size for i in range(12)]
        written = [number for number in row if number != size]
        assert len(set(written)) == len(written)


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=3),
    ratio=st.sampled_from([1, 2, 3, 4, 8]),
    padded=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_new_groups_are_those_that_the_step_completes(rows: list[tuple[int, int]], ratio: int, padded: bool) -> None:
    past = torch.tensor([had for had, _ in rows])
    counts = [new if padded else 12 for _, new in rows]
    tokens = lay_out_tokens(12, CPU, mask_of(counts, 12) if padded else None, past=past)
    groups, complete = tokens.new_groups(ratio)
    assert tokens.ends.tolist() == [had + count for (had, _), count in zip(rows, counts, strict=True)]
    for row, ((had, _), count) in enumerate(zip(rows, counts, strict=True)):
        assert groups[row][complete[row]].tolist() == list(range(had // ratio, (had + count) // ratio))
