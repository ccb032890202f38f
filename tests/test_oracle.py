"""The oracle against the golden files, and the properties of SPEC section 5 that no golden file covers.

Measured with torch 2.13.0 on CPU (relative Frobenius error of a whole tensor, worst layer of all fp32 files):

| tensor | oracle in fp32 | oracle in fp64 |
| --- | --- | --- |
| output | 1.4e-7 | 3.7e-7, and 1.9e-4 in the one layer with a moved window key |
| window_kv | 0 | 1.6e-4: one element of 9856 lands in the next FP8 bin; 0 in every other layer |
| latent | 0 | 1.9e-7 |
| compressed_kv, index_keys | 0 | 0 |
| topk_indices, candidates | equal | equal |

The bf16 file, arithmetic in fp64 and bf16 between the steps: window_kv, latent, compressed_kv and index_keys
equal, selection overlap 0.995 at worst (the released code rounds index scores to bf16), output 3e-4 on the
agreeing queries. Without bf16 between the steps: overlap 0.944, output 4e-2, so section 8's rule for that
file is only met by code that rounds where the released code does.

Decode steps against one fp32 prefill of the whole sequence: output 6.7e-7, selections equal. Some steps
of released_schedule_mini do not follow the SPEC: see STALE_LAYERS.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import (
    E2M1_MAGNITUDES,
    E4M3_MAGNITUDES,
    Oracle,
    OracleResult,
    power_of_two_ceiling,
    quantize_dequantize,
    round_to_magnitudes,
)
from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
FP32_FILES = ["released_schedule_mini", "short_sequence", "topk_exceeds_context", "yarn_ratio4"]
BF16_FILE = "released_schedule_mini_bf16"

# In a decode step that completes no group, this file's sources of ratio 2 score against the index keys that
# were published last, those of layer 5 (ratio 1) in the step before, and the layers that reuse the selection
# follow. SPEC sections 1 and 4 say otherwise, so these steps are no reference for the SPEC.
STALE_LAYERS = {"released_schedule_mini": {1: 1, 2: 1, 3: 3, 4: 3}}  # layer: source of its selection
STALE_KEYS_LAYER = 5

OUTPUT_TOLERANCE = 1e-4  # SPEC section 8
LATENT_TOLERANCE = 1e-6  # measured 1.9e-7
MOVED_ELEMENTS = 1e-3  # share that may sit in the next bin; measured 1e-4 in one fp64 layer, else none
ALONE_TOLERANCE = 1e-12  # fp64, the same computation on other shapes; measured 7e-16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads only wait for each other, and sums stay in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Golden:
    """One file: args, weights and the tensors by name."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        self.args = json.loads(metadata["args"])
        self.weights = {key: t for key, t in self.tensors.items() if key.startswith("layers.")}
        self.decode_steps = int(metadata["decode"])
        self.layers = range(self.args["n_layers"])
        self.inputs = [self.tensors[f"prefill.{i}.input"] for i in self.layers]

    def prefill(self, i: int, name: str) -> Tensor | None:
        return self.tensors.get(f"prefill.{i}.{name}")


load = functools.cache(Golden)


@functools.cache
def prefill(name: str, dtype: torch.dtype) -> list[OracleResult]:
    golden = load(name)
    activation_dtype = torch.bfloat16 if name == BF16_FILE else None
    oracle = Oracle(golden.args, golden.weights, dtype, activation_dtype=activation_dtype)
    return oracle.stack(golden.inputs)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def as_sets(indices: Tensor, offset: int = 0) -> list[list[set[int]]]:
    """[B][S] sets of the present positions."""
    return [[{t + offset for t in picks if t >= 0} for picks in row] for row in indices.tolist()]


def queries_with_equal_keys(moved: Tensor, W: int) -> Tensor:
    """bool [B,S] from moved [B,S]: no window key of the query is a moved one."""
    return torch.stack([~moved[:, max(0, s - W + 1) : s + 1].any(1) for s in range(moved.shape[1])], 1)


@pytest.mark.parametrize("name", [*FP32_FILES, BF16_FILE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_keys_equal_golden(name: str, dtype: torch.dtype) -> None:
    golden = load(name)
    for i, result in enumerate(prefill(name, dtype)):
        for kind in ("window_kv", "compressed_kv", "index_keys"):
            expected = golden.prefill(i, kind)
            if expected is None:
                continue
            actual = getattr(result, kind)
            assert actual.shape == expected.shape
            assert (actual.double() != expected.double()).double().mean() <= MOVED_ELEMENTS, (i, kind)
        if (latent := golden.prefill(i, "latent")) is not None:
            assert result.latent.shape == latent.shape
            assert relative_error(result.latent, latent) <= LATENT_TOLERANCE, i


@pytest.mark.parametrize("name", FP32_FILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_prefill_equals_golden(name: str, dtype: torch.dtype) -> None:
    golden = load(name)
    for i, result in enumerate(prefill(name, dtype)):
        topk_indices, candidates = golden.prefill(i, "topk_indices"), golden.prefill(i, "candidates")
        if topk_indices is None:
            assert result.topk_indices is None
        else:
            assert result.topk_indices.dtype == torch.int32
            assert result.topk_indices.shape == topk_indices.shape
            assert as_sets(result.topk_indices) == as_sets(topk_indices), i
        if candidates is None:
            assert result.candidates is None
        else:
            assert torch.equal(result.candidates, candidates), i

        output = golden.prefill(i, "output")
        compared = torch.ones(output.shape[:2], dtype=torch.bool)
        if dtype == torch.float64:  # a key in another FP8 bin moves the queries that see it by more than 1e-4
            moved = (result.window_kv != golden.prefill(i, "window_kv").double()).any(-1)
            compared = queries_with_equal_keys(moved, golden.args["window_size"])
            assert compared.double().mean() > 0.85
        assert relative_error(result.output[compared], output[compared]) <= OUTPUT_TOLERANCE, i


@functools.cache
def whole_sequence(name: str) -> tuple[list[Tensor], list[OracleResult]]:
    """Inputs of prefill and decode as one sequence, and the fp32 oracle's prefill of it."""
    golden = load(name)
    inputs = [
        torch.cat(
            [
                golden.inputs[i],
                *(golden.tensors[f"decode.{n}.{i}.input"] for n in range(golden.decode_steps)),
            ],
            1,
        )
        for i in golden.layers
    ]
    return inputs, Oracle(golden.args, golden.weights, torch.float32).stack(inputs)


def assert_query_equals_decode(golden: Golden, n: int, i: int, result: OracleResult) -> None:
    s = golden.inputs[0].shape[1] + n
    expected = golden.tensors[f"decode.{n}.{i}.output"]
    assert relative_error(result.output[:, s : s + 1], expected) <= OUTPUT_TOLERANCE, (n, i)
    if (picks := golden.tensors.get(f"decode.{n}.{i}.topk_indices")) is not None:
        assert as_sets(result.topk_indices[:, s : s + 1]) == as_sets(picks), (n, i)


def completes_no_group(golden: Golden, n: int, i: int) -> bool:
    ratio = golden.args["compress_ratios"][i]
    return ratio > 1 and (golden.inputs[0].shape[1] + n + 1) % ratio != 0


@pytest.mark.parametrize("name", FP32_FILES)
def test_last_query_equals_golden_decode(name: str) -> None:
    """A decode step gives what one prefill of the whole sequence gives at that query."""
    golden = load(name)
    _, results = whole_sequence(name)
    for i, result in enumerate(results):
        for n in range(golden.decode_steps):
            if i in STALE_LAYERS.get(name, {}) and completes_no_group(golden, n, i):
                continue
            assert_query_equals_decode(golden, n, i, result)


@pytest.mark.parametrize("name", STALE_LAYERS)
def test_excluded_decode_steps_come_from_stale_index_keys(name: str) -> None:
    golden = load(name)
    inputs, results = whole_sequence(name)
    # Without key-value sources every layer reads the state that it is given.
    oracle = Oracle({**golden.args, "kv_source_layers": []}, golden.weights, torch.float32)
    for i, source in STALE_LAYERS[name].items():
        ratio = golden.args["compress_ratios"][i]
        published = results[source].state[ratio]
        T = published.index_keys.shape[1]
        state = {ratio: replace(published, index_keys=results[STALE_KEYS_LAYER].index_keys[:, :T])}
        if source != i:
            state = oracle.layer(source, inputs[source], state).state
        stale = oracle.layer(i, inputs[i], state)
        steps = [n for n in range(golden.decode_steps) if completes_no_group(golden, n, i)]
        assert steps
        for n in steps:
            assert_query_equals_decode(golden, n, i, stale)


def test_bf16_prefill_agrees_with_golden() -> None:
    golden = load(BF16_FILE)
    for i, result in enumerate(prefill(BF16_FILE, torch.float64)):
        output = golden.prefill(i, "output").double()
        agree = torch.ones(output.shape[:2], dtype=torch.bool)
        topk_indices = golden.prefill(i, "topk_indices")
        if topk_indices is not None:
            pairs = [
                list(zip(*rows, strict=True))
                for rows in zip(as_sets(result.topk_indices), as_sets(topk_indices), strict=True)
            ]
            agree = torch.tensor([[ours == theirs for ours, theirs in row] for row in pairs])
            shares = [len(ours & theirs) / len(theirs) if theirs else 1.0 for row in pairs for ours, theirs in row]
            assert sum(shares) / len(shares) >= 0.99, i
        assert relative_error(result.output[agree], output[agree]) <= 2e-2, i
        if (candidates := golden.prefill(i, "candidates")) is not None:
            assert (result.candidates == candidates).double().mean() >= 0.99


def assert_document_equals_alone(result: OracleResult, alone: OracleResult, b: int, first: int, ratio: int) -> None:
    """The document of row b that starts at token first, inside a larger batch, against the document alone."""
    queries = slice(first, first + alone.output.shape[1])
    for name in ("output", "window_kv"):
        assert relative_error(getattr(result, name)[b, queries], getattr(alone, name)[0]) <= ALONE_TOLERANCE
    if ratio == 0:
        return
    offset = first // ratio
    picks = as_sets(result.topk_indices[b : b + 1, queries])
    assert picks == as_sets(alone.topk_indices, offset)
    for name in ("latent", "compressed_kv", "index_keys"):
        if (expected := getattr(alone, name)) is not None:
            rows = getattr(result, name)[b, offset : offset + expected.shape[1]]
            assert relative_error(rows, expected[0]) <= ALONE_TOLERANCE
    if alone.scores is not None:
        T = alone.scores.shape[2]
        inside = result.scores[b, queries, offset : offset + T]
        torch.testing.assert_close(inside, alone.scores[0], rtol=1e-9, atol=1e-12)
        assert (result.scores[b, queries] > -torch.inf).sum() == (alone.scores[0] > -torch.inf).sum()
        if alone.candidates is not None:
            assert torch.equal(result.candidates[b, queries, offset : offset + T], alone.candidates[0])
            assert result.candidates[b, queries].sum() == alone.candidates[0].sum()


# (row, first token, length); every first token is a multiple of the files' ratios, ends are not.
DOCUMENTS = {
    "released_schedule_mini": [(0, 0, 37), (0, 40, 25), (0, 70, 7), (1, 0, 10), (1, 10, 40), (1, 50, 26)],
    "yarn_ratio4": [(0, 0, 3), (0, 4, 96), (0, 104, 101), (0, 208, 5)],
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_packed_documents_equal_each_alone(name: str) -> None:
    golden = load(name)
    oracle = Oracle(golden.args, golden.weights)
    document_ids = torch.zeros(golden.inputs[0].shape[:2], dtype=torch.int64)
    for number, (b, first, length) in enumerate(DOCUMENTS[name]):
        document_ids[b, first : first + length] = 9 - number  # ids need not ascend
    pads = document_ids == 0
    inputs = [x.masked_fill(pads[..., None], torch.nan) for x in golden.inputs]
    packed = oracle.stack(inputs, document_ids=document_ids)
    for b, first, length in DOCUMENTS[name]:
        alone = oracle.stack([x[b : b + 1, first : first + length] for x in golden.inputs])
        for i in golden.layers:
            ratio = golden.args["compress_ratios"][i]
            assert_document_equals_alone(packed[i], alone[i], b, first, ratio)
    for result in packed:
        assert (result.output[pads] == 0).all()
        assert result.topk_indices is None or (result.topk_indices[pads] == -1).all()


@pytest.mark.parametrize("lengths", [(77, 76), (38, 1), (2, 51)])
def test_right_padding_equals_the_shorter_run(lengths: tuple[int, int]) -> None:
    golden = load("released_schedule_mini")
    oracle = Oracle(golden.args, golden.weights)
    attention_mask = torch.stack([(torch.arange(77) < length).long() for length in lengths])
    pads = attention_mask == 0
    inputs = [x.masked_fill(pads[..., None], torch.nan) for x in golden.inputs]
    padded = oracle.stack(inputs, attention_mask)
    for b, length in enumerate(lengths):
        alone = oracle.stack([x[b : b + 1, :length] for x in golden.inputs])
        for i in golden.layers:
            assert_document_equals_alone(padded[i], alone[i], b, 0, golden.args["compress_ratios"][i])
    assert all((result.output[pads] == 0).all() for result in padded)


def test_ties_go_to_the_lower_position_and_block() -> None:
    golden = load("released_schedule_mini")
    K, size, keep = (golden.args[n] for n in ("index_topk", "candidate_block_size", "candidate_topk_blocks"))
    name = "layers.5.attn.indexer.weights_proj.weight"
    weights = {**golden.weights, name: torch.zeros_like(golden.weights[name])}
    result = Oracle(golden.args, weights).layer(5, golden.inputs[5][:1], {})
    for s, picks in enumerate(as_sets(result.topk_indices)[0]):
        assert picks == set(range(min(K, s + 1)))
        newest = s // size
        kept = {*range(min(keep - 1, newest)), newest}
        assert result.candidates[0, s].tolist() == [t // size in kept for t in range(77)]


@pytest.mark.parametrize(
    ("row", "message"),
    [([1, 1, 1, 2, 2, 2], "starts at token 3"), ([1, 1, 0, 0, 1, 1], "interrupted before token 4")],
)
def test_malformed_documents_are_refused(row: list[int], message: str) -> None:
    golden = load("released_schedule_mini")
    oracle = Oracle(golden.args, golden.weights)
    with pytest.raises(ValueError, match=message):
        oracle.layer(1, golden.inputs[1][:1, :6], {}, document_ids=torch.tensor([row]))


def test_left_padding_and_too_few_candidates_are_refused() -> None:
    golden = load("released_schedule_mini")
    with pytest.raises(ValueError, match="on the right"):
        Oracle(golden.args, golden.weights).layer(
            0, golden.inputs[0][:1, :3], {}, attention_mask=torch.tensor([[0, 1, 1]])
        )
    with pytest.raises(ValueError, match="cannot hold"):
        Oracle({**golden.args, "candidate_topk_blocks": 1}, golden.weights)


def test_gradient_without_quantization_equals_finite_difference() -> None:
    golden = load("released_schedule_mini")
    torch.manual_seed(0)
    x = golden.inputs[1][:, :24].double().requires_grad_()
    direction = torch.randn_like(x)
    attention_mask = (torch.arange(24) < torch.tensor([[24], [15]])).long()
    oracle = Oracle(golden.args, golden.weights, quantize=False)

    def loss(x: Tensor) -> Tensor:
        return oracle.layer(1, x, {}, attention_mask).output.square().sum()

    (gradient,) = torch.autograd.grad(loss(x), x)
    with torch.no_grad():
        step = 1e-6
        slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=0)
    assert (gradient[1, 15:] == 0).all()


def test_e4m3_rounding_equals_torch() -> None:
    midpoints = ((E4M3_MAGNITUDES[1:] + E4M3_MAGNITUDES[:-1]) / 2).float()
    torch.manual_seed(0)
    x = torch.cat([midpoints, -midpoints, E4M3_MAGNITUDES.float(), torch.randn(4096) * 100]).clamp(-448, 448)
    assert torch.equal(round_to_magnitudes(x, E4M3_MAGNITUDES), x.to(torch.float8_e4m3fn).float())


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0])
    rounded = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(round_to_magnitudes(x, E2M1_MAGNITUDES), rounded)
    assert torch.equal(round_to_magnitudes(-x, E2M1_MAGNITUDES), -rounded)


def test_power_of_two_ceiling_is_exact() -> None:
    powers = 2.0 ** torch.arange(-126, 127, dtype=torch.float32)
    assert torch.equal(power_of_two_ceiling(powers), powers)
    assert torch.equal(power_of_two_ceiling(torch.nextafter(powers, torch.tensor(torch.inf))), 2 * powers)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_quantization_keeps_dtype_and_zero(kind: str, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 64, dtype=dtype)
    result = quantize_dequantize(x, kind)
    assert result.dtype == dtype
    assert torch.equal(result, x)
