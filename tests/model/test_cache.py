"""CSA2Cache: any split of a sequence gives what one prefill gives, and nothing that was taken back leaves a trace.

Buffers are filled with NaN first wherever a cache is compared with a prefill: a read of a row that no step wrote
shows. Measured with torch 2.13.0 on CPU over all cases here (relative norm of the difference, worst query):

| comparison | output | selections |
| --- | --- | --- |
| float64, steps with a cache against one prefill | 1.9e-15 | equal |
| float64, rows of a ragged batch against each row alone | 8.4e-16 | equal |
| float64, after truncate, advance by less, reorder | 1.2e-15 | equal |
| float32, slots layout against plain | 0 | equal |
| float32 golden files, decode steps | 2.5e-7 | equal |
| bfloat16 golden file, decode steps | 1.1e-3 on agreeing queries | overlap 0.998 |
| packed against unpacked | 0 | equal |
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cached_runs import (
    CONFIGS,
    Run,
    W,
    assert_unchanged,
    config_of_ratio,
    fill_with_nan,
    make_config,
    make_ids,
    make_model,
    run,
    run_chunks,
    snapshot,
)
from golden_files import (
    FILES,
    Golden,
    Prefill,
    check_prefill,
    load_golden,
    relative_error,
    run_prefill,
    selection_overlap,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from test_oracle import STALE_LAYERS
from torch import Tensor

from csa2_compiled import (
    AttentionLayout,
    CSA2Attention,
    CSA2Cache,
    CSA2Config,
    CSA2ForCausalLM,
    CSA2InputError,
    CSA2Output,
    CSA2State,
    LayerRole,
)
from csa2_compiled.quantization import row_bytes
from csa2_compiled.rows import buffers

SAME = 1e-12  # float64, the same computation on other shapes
TOKENS = 48
MODELS = {name: make_model(cfg) for name, cfg in CONFIGS.items()}
# For what depends on the ratio and not on the roles: a full, a reuse and a window layer.
SHORT = {ratio: make_model(make_config((ratio, ratio, 0), (0,), (0,))) for ratio in (1, 2, 3, 4, 8)}


def make_cache(model: CSA2ForCausalLM, rows: int = 2, max_seq_len: int = TOKENS, **arguments: Any) -> CSA2Cache:
    """A cache in which every row that no step has written is NaN."""
    cache = CSA2Cache(model.cfg, rows, max_seq_len, model.embed.weight.dtype, **arguments)
    fill_with_nan(cache)
    return cache


def error_of(got: Run, expected: Run) -> float:
    """Worst query's relative error, after the selections are found equal."""
    for layer, (ours, theirs) in enumerate(zip(got.picks, expected.picks, strict=True)):
        assert torch.equal(ours, theirs), f"selection {layer}"
    assert got.logits.shape == expected.logits.shape
    if got.logits.numel() == 0:
        return 0.0
    error = (got.logits - expected.logits).norm(dim=-1) / expected.logits.norm(dim=-1)
    return float(error.max())


def assert_same(got: Run, expected: Run) -> None:
    error = error_of(got, expected)
    assert error <= SAME, error


def assert_equal(got: Run, expected: Run) -> None:
    assert torch.equal(got.logits, expected.logits)
    assert_same(got, expected)


def run_layers(
    layers: Iterable[CSA2Attention], inputs: Iterable[Tensor], cache: CSA2Cache | None = None, **arguments: Any
) -> list[CSA2Output]:
    """Every layer on its own input, the state going from layer to layer; one step, without its advance."""
    outputs: list[CSA2Output] = []
    with torch.no_grad():
        for layer, x in zip(layers, inputs, strict=True):
            state = outputs[-1].state if outputs else CSA2State()
            outputs.append(layer(x, state, cache=cache, **arguments))
    return outputs


# Any split equals one prefill


def test_the_models_have_every_role_and_selections_to_make() -> None:
    for name, model in MODELS.items():
        assert set(model.cfg.layer_roles) >= {LayerRole.FULL, LayerRole.REINDEX, LayerRole.REUSE}, name
        whole = run(model, make_ids(model.cfg, TOKENS))
        # A selection that leaves something out: not the oldest positions only, and not those of the layer before.
        full = [picks[:, -1] for picks in whole.picks]
        assert all((picks >= 0).all() for picks in full), name
        assert len({tuple(picks.flatten().tolist()) for picks in full}) >= 3, name


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_one_size_equal_one_prefill(name: str) -> None:
    model, ratios = MODELS[name], {ratio for ratio in CONFIGS[name].compress_ratios if ratio}
    ids = make_ids(model.cfg, TOKENS)
    whole = run(model, ids)
    sizes = {1, *ratios, *(max(ratio - 1, 1) for ratio in ratios), W - 1, W, W + 3}
    for size in sizes:
        cache = make_cache(model)
        assert_same(run_chunks(model, ids, [size] * TOKENS, cache), whole)
        assert cache.lengths.tolist() == [TOKENS] * 2


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_of_every_residue_decode_like_one_prefill(name: str) -> None:
    """Prompts shorter than a group and longer than the window, of every length modulo the ratio."""
    model, ratio = MODELS[name], max(CONFIGS[name].compress_ratios)
    ids = make_ids(model.cfg, 3 * W + ratio)
    whole = run(model, ids)
    for prompt in (*range(1, ratio + 1), *range(2 * W, 2 * W + ratio)):
        steps = [prompt] + [1] * (ratio + 1)
        tokens = sum(steps)
        assert_same(run_chunks(model, ids[:, :tokens], steps, make_cache(model)), whole[:, :tokens])


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    steps=st.lists(st.integers(1, W + 3), max_size=8),
    packed=st.booleans(),
    max_truncate=st.sampled_from([0, 1, 8]),
)
@settings(max_examples=25, deadline=None)
def test_any_split_equals_one_prefill(name: str, steps: list[int], packed: bool, max_truncate: int) -> None:
    model = MODELS[name]
    ids = make_ids(model.cfg, TOKENS)
    cache = make_cache(model, packed=packed, max_truncate=max_truncate)
    assert_same(run_chunks(model, ids, steps, cache), run(model, ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_called_one_by_one(name: str) -> None:
    """Outputs, selections, and the keys that queries may see; the last steps lie inside a group."""
    layers = [block.attn for block in MODELS[name].layers]
    generator = torch.Generator().manual_seed(2)
    shape = (2, TOKENS, layers[0].cfg.hidden_size)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in layers]
    whole, cache, done = run_layers(layers, inputs), make_cache(MODELS[name]), 0
    for size in (W + 3, 1, 2, W, TOKENS - 2 * W - 7, 1):
        outputs = run_layers(layers, [x[:, done : done + size] for x in inputs], cache)
        cache.advance(size)
        for layer, output, expected in zip(layers, outputs, whole, strict=True):
            queries = slice(done, done + size)
            assert relative_error(output.hidden_states, expected.hidden_states[:, queries]) <= SAME
            got, wanted = output.state.of_ratio(layer.ratio), expected.state.of_ratio(layer.ratio)
            if got is None or wanted is None:
                continue
            count = (done + size) // layer.ratio
            picks = wanted.topk_indices[:, queries, : got.topk_indices.shape[-1]]
            assert torch.equal(got.topk_indices, picks)
            assert torch.equal(buffers(got.compressed_kv)[0], buffers(wanted.compressed_kv)[0][:, :count])
            assert torch.equal(buffers(got.index_keys)[0], buffers(wanted.index_keys)[0][:, :count])
            if wanted.candidates is not None:
                assert got.candidates is not None
                seen = torch.arange(count) < (torch.arange(done, done + size)[:, None] + 1) // layer.ratio
                assert torch.equal(got.candidates & seen, wanted.candidates[:, queries, :count] & seen)
        done += size


@pytest.mark.parametrize("max_truncate", [0, 1, 8])
@pytest.mark.parametrize("window", [1, 2, 3 * W])
def test_windows_of_other_sizes(window: int, max_truncate: int) -> None:
    """Of the query alone, and of more tokens than the first steps bring."""
    model = make_model(make_config((0, 2, 2), (1,), (1,), sliding_window=window))
    ids = make_ids(model.cfg, TOKENS)
    whole = run(model, ids)
    for steps in ([1] * 9, [7, 1, 2, 9, 10, 1, 1]):
        cache = make_cache(model, max_truncate=max_truncate)
        assert_same(run_chunks(model, ids, steps, cache), whole)
        cache.truncate(max_truncate)
        if max_truncate:
            assert_same(run(model, ids[:, -max_truncate:], cache), whole[:, -max_truncate:])


def test_the_slots_layout_attends_alike() -> None:
    model = make_model(CONFIGS["ratio 2"], torch.float32)
    ids, steps = make_ids(model.cfg, 20), [13, 1, 2, 1]
    plain = run_chunks(model, ids, steps, make_cache(model))
    for block in model.layers:
        block.attn.layout = AttentionLayout.SLOTS
    assert error_of(run_chunks(model, ids, steps, make_cache(model)), plain) <= 1e-5


# Golden files


def golden_layers(golden: Golden) -> list[CSA2Attention]:
    return [block.attn for block in golden.model(AttentionLayout.AUTO).layers]


def golden_cache(golden: Golden, packed: bool) -> CSA2Cache:
    batch, tokens, _ = golden.inputs()[0].shape
    cache = CSA2Cache(golden.cfg, batch, tokens + decode_steps(golden), golden.dtype, packed=packed)
    fill_with_nan(cache)
    return cache


def decode_steps(golden: Golden) -> int:
    return sum(name.startswith("decode.") and name.endswith(".0.input") for name in golden.tensors)


def run_golden(golden: Golden, packed: bool) -> Iterator[tuple[int, list[CSA2Output]]]:
    """(-1, outputs of the prefill), then (n, outputs of decode step n), all of them with one cache."""
    layers, cache = golden_layers(golden), golden_cache(golden, packed)
    yield -1, run_layers(layers, golden.inputs(), cache)
    cache.advance(golden.inputs()[0].shape[1])
    for n in range(decode_steps(golden)):
        inputs = [golden.tensors[f"decode.{n}.{i}.input"] for i in range(len(layers))]
        yield n, run_layers(layers, inputs, cache)
        cache.advance(1)


def is_stale(golden: Golden, n: int, layer: int) -> bool:
    """Whether the released code scored this step against another layer's index keys; see `STALE_LAYERS`."""
    ratio = golden.cfg.compress_ratios[layer]
    tokens = golden.inputs()[0].shape[1] + n + 1
    return layer in STALE_LAYERS.get(golden.name.removesuffix("_bf16"), {}) and tokens % ratio != 0


def compare_decode(golden: Golden, n: int, layer: int, output: CSA2Output) -> tuple[Tensor | None, float]:
    """Overlap of each query's selection, None without one, and the output's error on queries that select alike."""
    expected = golden.tensors[f"decode.{n}.{layer}.output"]
    picks, overlap = golden.tensors.get(f"decode.{n}.{layer}.topk_indices"), None
    alike = torch.ones(expected.shape[:2], dtype=torch.bool)
    if picks is not None:
        read = output.state.of_ratio(golden.cfg.compress_ratios[layer])
        assert read is not None
        overlap = selection_overlap(read.topk_indices, picks)
        alike = overlap == 1
    return overlap, relative_error(output.hidden_states[alike], expected[alike])


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", FILES)
def test_golden_decode_steps(name: str, packed: bool) -> None:
    golden = load_golden(name)
    overlaps, compared = [], 0
    for n, outputs in run_golden(golden, packed):
        for layer, output in enumerate(outputs) if n >= 0 else ():
            if is_stale(golden, n, layer):
                continue
            overlap, error = compare_decode(golden, n, layer, output)
            assert error <= (2e-2 if golden.is_bfloat16 else 1e-4), f"step {n} layer {layer}: {error}"
            compared += 1
            if overlap is not None:
                overlaps.append(overlap)
    share = torch.stack(overlaps)
    assert share.mean() >= 0.99 if golden.is_bfloat16 else (share == 1).all()
    stale = sum(is_stale(golden, n, i) for n in range(decode_steps(golden)) for i in range(len(golden.inputs())))
    assert compared == decode_steps(golden) * golden.cfg.num_hidden_layers - stale


def test_stale_golden_steps_are_the_only_ones_that_differ() -> None:
    for name in STALE_LAYERS:
        golden = load_golden(name)
        differ, stale = set(), set()
        for n, outputs in run_golden(golden, packed=False):
            for layer, output in enumerate(outputs) if n >= 0 else ():
                overlap, error = compare_decode(golden, n, layer, output)
                if error > 1e-4 or (overlap is not None and (overlap < 1).any()):
                    differ.add((n, layer))
                if is_stale(golden, n, layer):
                    stale.add((n, layer))
        assert differ == stale
        assert stale


@pytest.mark.parametrize("name", FILES)
def test_golden_prefill_with_a_cache(name: str) -> None:
    golden = load_golden(name)
    cache = golden_cache(golden, packed=False)

    def run_module(module: Any, *inputs: Any) -> Any:
        return module(*inputs, cache=cache) if isinstance(module, CSA2Attention) else module(*inputs)

    results: list[Prefill] = run_prefill(golden, golden.model(AttentionLayout.AUTO), run_module)
    check_prefill(golden, results, moved_keys=0)


# Packed rows


@pytest.mark.parametrize("name", FILES)
def test_packed_golden_runs_are_bit_equal(name: str) -> None:
    golden = load_golden(name)
    for (n, unpacked), (_, packed) in zip(run_golden(golden, False), run_golden(golden, True), strict=True):
        for layer, (ours, theirs) in enumerate(zip(packed, unpacked, strict=True)):
            where = f"step {n} layer {layer}"
            assert torch.equal(ours.hidden_states, theirs.hidden_states), where
            for name in ("compressed_kv", "index_keys", "topk_indices", "candidates"):
                expected = getattr(theirs.state, name)
                if expected is None:
                    assert getattr(ours.state, name) is None, where
                else:
                    assert torch.equal(getattr(ours.state, name), expected), f"{where} {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-6], ids=["wide", "narrow"])
def test_packed_runs_are_bit_equal(dtype: torch.dtype, scale: float) -> None:
    """Also after advance, truncate and reorder, and where keys are so small that their scales are subnormal."""
    model = make_model(CONFIGS["ratio 2"], dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("compressor.norm.weight", "kv_norm.weight", "k_norm.weight")):
            parameter.data.mul_(scale)
    ids = make_ids(model.cfg, TOKENS, rows=3)

    def runs(packed: bool) -> Iterator[Run]:
        cache = make_cache(model, 3, packed=packed)
        yield run(model, ids[:, :21], cache)
        cache.truncate(7)
        yield run(model, ids[:, 21:25], cache)
        cache.advance(torch.tensor([3, 0, 4]))
        cache.reorder(torch.tensor([1, 2, 1]))
        yield run(model, ids[:, 25:36], cache)
        yield run(model, ids[:, 36:37], cache)

    for ours, theirs in zip(runs(True), runs(False), strict=True):
        assert_equal(ours, theirs)


def test_packed_bytes_of_a_row_at_released_shapes() -> None:
    cfg = CSA2Config.v41_flash()
    cache = CSA2Cache(cfg, 1, 1 << 20, torch.bfloat16, device="meta", packed=True)
    assert (row_bytes(512, "fp8"), row_bytes(512, "nvfp4"), row_bytes(128, "mxfp4")) == (528, 288, 68)
    for layer, layer_cache in enumerate(cache.layers):
        parts = {"window": 528, "compressed_kv": 288, "index_keys": 68}
        for name, size in parts.items():
            rows = getattr(layer_cache, name)
            full = cfg.role(layer) is LayerRole.FULL
            assert (rows is not None) == (full or name == "window")
            if rows is not None:
                assert sum(b.shape[-1] * b.element_size() for b in buffers(rows)) == size, name
        assert buffers(layer_cache.window)[0].shape[1] - 1 == 128 - 1 + cache.max_truncate  # and a spare row
    # 1048576 tokens: three sources of ratio 2 and one of ratio 1, 356 bytes a compressed position.
    assert cache.memory_bytes() == pytest.approx((3 / 2 + 1) * (1 << 20) * 356, rel=0.01)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_that_of_the_buffers(packed: bool) -> None:
    cfg = config_of_ratio(3)
    cache = CSA2Cache(cfg, 3, 40, torch.bfloat16, packed=packed, max_truncate=5)
    ring, positions = W - 1 + 5 + 1, 14 + 1  # rows, a spare one included
    window, compressed, index = (33, 18, 17) if packed else (64, 64, 64)  # bytes of 32 values
    full = ring * window + positions * (compressed + index) + (3 - 1 + 5 + 1) * 64 * 4
    lengths = 4 * 8
    assert cache.memory_bytes() == 3 * (2 * full + 4 * ring * window + lengths)


# Ragged batches


def mask_of(counts: Iterable[int], tokens: int) -> Tensor:
    return (torch.arange(tokens) < torch.tensor(list(counts)).unsqueeze(1)).long()


def rows_alone(model: CSA2ForCausalLM, ids: Tensor) -> list[Run]:
    return [run(model, ids[row : row + 1]) for row in range(len(ids))]


class Ragged:
    """Steps of ragged rows, each compared with the row run alone in one prefill."""

    def __init__(self, model: CSA2ForCausalLM, rows: int, **arguments: Any) -> None:
        self.model, self.cache = model, make_cache(model, rows, **arguments)
        self.ids = make_ids(model.cfg, TOKENS, rows)
        self.alone = rows_alone(model, self.ids)

    def step(self, counts: list[int], width: int | None = None) -> None:
        """A step of counts[b] tokens in row b, padded to `width`."""
        width = width or max(counts)
        past = self.cache.lengths.tolist()
        index = torch.tensor(past).unsqueeze(1) + torch.arange(width)
        mask = mask_of(counts, width)
        ids = self.ids.gather(1, index.clamp(max=TOKENS - 1)) * mask
        got = run(self.model, ids, self.cache, mask)
        self.compare(got, past, counts)
        assert self.cache.lengths.tolist() == [had + new for had, new in zip(past, counts, strict=True)]

    def compare(self, got: Run, past: list[int], counts: list[int]) -> None:
        for row, (first, count) in enumerate(zip(past, counts, strict=True)):
            assert_same(got[row : row + 1, :count], self.alone[row][:, first : first + count])
            assert all((picks[row, count:] == -1).all() for picks in got.picks)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rows_equal_each_row_alone(name: str, packed: bool) -> None:
    ragged = Ragged(MODELS[name], 4, packed=packed)
    ragged.step([21, 5, 1, 0])
    for counts in ([1, 1, 1, 1], [3, 0, 2, 1], [0, 0, 0, 4], [1, W + 3, 9, 2], [2, 1, 1, 1]):
        ragged.step(counts, width=max(counts) + 1)


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    steps=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5),
)
@settings(max_examples=15, deadline=None)
def test_any_ragged_steps_equal_each_row_alone(name: str, steps: list[tuple[int, ...]]) -> None:
    ragged = Ragged(MODELS[name], 3)
    for counts in steps:
        ragged.step(list(counts), width=10)


def test_idle_rows_do_not_move() -> None:
    model = MODELS["ratio 3"]
    ragged = Ragged(model, 3)
    ragged.step([10, 12, 4])
    before, _ = snapshot(ragged.cache)
    ragged.step([3, 0, 0], width=4)
    after = list(ragged.cache._all_buffers())
    assert ragged.cache.lengths.tolist() == [13, 12, 4]
    for tensor, expected in zip(after[4:], before[4:], strict=True):
        assert torch.equal(tensor[1:, :-1].nan_to_num(7.0), expected[1:, :-1].nan_to_num(7.0))  # but the spare row
    assert not torch.equal(after[4][0, :-1].nan_to_num(7.0), before[4][0, :-1].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_rows_accept_different_numbers_of_a_draft(dtype: torch.dtype) -> None:
    ragged = Ragged(MODELS["ratio 4"], 4)
    ragged.step([11, 12, 3, 0])
    for accepted in ([0, 5, 2, 1], [4, 1, 0, 5], [1, 1, 3, 0]):
        past = ragged.cache.lengths.tolist()
        ragged.step([5] * 4)
        ragged.cache.advance(torch.tensor(accepted, dtype=dtype))
        assert ragged.cache.lengths.tolist() == [had + kept for had, kept in zip(past, accepted, strict=True)]
    ragged.step([6, 3, 7, 9])


def test_rows_keep_no_padding() -> None:
    ragged = Ragged(MODELS["ratio 2"], 3)
    ragged.step([7, 9, 2])
    ragged.step([3, 0, 1], width=4)
    ragged.cache.advance(torch.tensor([4, 3, 0]))  # no more than the row's own tokens
    assert ragged.cache.lengths.tolist() == [10, 9, 2]
    ragged.cache.advance(2)
    assert ragged.cache.lengths.tolist() == [9, 9, 3]
    ragged.step([2, 2, 2])


# Taking tokens back


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("ratio", SHORT)
def test_dropped_tokens_leave_no_trace(ratio: int, packed: bool) -> None:
    """Every number of them, at every residue of the length that is left, dropped from one step or from several."""
    model = SHORT[ratio]
    ids = make_ids(model.cfg, 3 * W + ratio)
    others = make_ids(model.cfg, W, seed=5)
    whole = run(model, ids)
    for length in range(2 * W, 2 * W + ratio):
        begun = make_cache(model, packed=packed)
        run(model, ids[:, :length], begun)
        for dropped in range(begun.max_truncate + 1):
            cache = copy.deepcopy(begun)
            for step in others[:, :dropped].split(8 if dropped % 2 else 3, dim=1) if dropped else ():
                run(model, step, cache)
            cache.truncate(dropped)
            assert cache.lengths.tolist() == [length] * 2
            assert_same(run(model, ids[:, length:], cache), whole[:, length:])


@pytest.mark.parametrize("ratio", SHORT)
def test_tokens_of_a_prefill_can_be_dropped(ratio: int) -> None:
    model = SHORT[ratio]
    ids = make_ids(model.cfg, 3 * W)
    whole = run(model, ids)
    for dropped in range(9):
        cache = make_cache(model)
        wrong = torch.cat([ids[:, : 2 * W], make_ids(model.cfg, dropped, seed=5)], dim=1)
        run(model, wrong, cache)
        cache.truncate(dropped)
        assert_same(run_chunks(model, ids[:, 2 * W :], [1, 1, 1], cache), whole[:, 2 * W :])


def test_truncate_then_step_then_truncate() -> None:
    ragged = Ragged(MODELS["ratio 3"], 3, max_truncate=6)
    ragged.step([20, 9, 4])
    ragged.cache.truncate(torch.tensor([4, 0, 3]))
    ragged.step([2, 3, 1])
    ragged.cache.truncate(torch.tensor([4, 5, 0]))  # row 0: 6 behind the 20 it had reached
    assert ragged.cache.lengths.tolist() == [14, 7, 2]
    refused(ragged.cache, "7 tokens behind the farthest", lambda cache: cache.truncate(torch.tensor([1, 0, 0])))
    ragged.step([7, 1, 2])
    ragged.cache.truncate(1)
    ragged.step([1, 1, 1])
    ragged.step([W + 3, 3, 8])


def test_max_truncate_bounds_what_can_be_taken_back() -> None:
    model = SHORT[2]
    ids = make_ids(model.cfg, TOKENS)
    for most in (0, 1, 3):
        cache = make_cache(model, max_truncate=most)
        run(model, ids[:, :20], cache)
        refused(cache, f"{most + 1} tokens behind", lambda cache, most=most: cache.truncate(most + 1))
        refused(cache, f"leaves out {most + 1}", lambda cache, most=most: cache.advance(20 - most - 1))
        cache.truncate(most)
        assert cache.lengths.tolist() == [20 - most] * 2
        refused(cache, "1 tokens behind" if most == 0 else "tokens behind", lambda cache: cache.truncate(1))
        assert_same(run(model, ids[:, 20 - most :], cache), run(model, ids)[:, 20 - most :])


def test_truncate_refuses_more_than_a_row_holds() -> None:
    ragged = Ragged(SHORT[2], 2)
    ragged.step([5, 2])
    refused(ragged.cache, r"rows hold \[5, 2\] tokens", lambda cache: cache.truncate(3))
    refused(ragged.cache, r"rows hold \[5, 2\] tokens", lambda cache: cache.truncate(torch.tensor([0, 3])))
    refused(ragged.cache, "rows hold", lambda cache: cache.truncate(torch.tensor([-1, 0])))
    ragged.cache.truncate(torch.tensor([5, 2]))
    ragged.step([12, 20])


@pytest.mark.parametrize("name", ["ratio 2", "interleaved"])
def test_advance_by_less_equals_a_shorter_step(name: str) -> None:
    """Bit for bit in all that comes after."""
    model = MODELS[name]
    ids = make_ids(model.cfg, TOKENS)
    for kept in range(9):
        long, short = make_cache(model), make_cache(model)
        for cache in (long, short):
            run(model, ids[:, :13], cache)
        run(model, ids[:, 13:21], long)
        long.advance(kept)
        if kept:
            run(model, ids[:, 13 : 13 + kept], short)
        after = ids[:, 13 + kept : 13 + kept + 4]
        assert torch.equal(long.lengths, short.lengths)
        assert_equal(run(model, after, long), run(model, after, short))


def test_advance_may_be_called_again_until_the_next_step() -> None:
    model = MODELS["ratio 3"]
    ids = make_ids(model.cfg, TOKENS)
    whole, cache = run(model, ids), make_cache(model)
    run(model, ids[:, :13], cache)
    run(model, ids[:, 13:18], cache)
    for kept in (2, 5, 0, torch.tensor([1, 4]), torch.tensor([9, -3]), 3):
        cache.advance(kept)
    assert cache.lengths.tolist() == [16, 16]
    assert_same(run(model, ids[:, 16:20], cache), whole[:, 16:20])
    cache.advance(4)
    assert cache.lengths.tolist() == [20, 20]  # of this step, not of the one before
    for end in (lambda: cache.truncate(0), cache.reset):
        end()
        refused(cache, "no step has been run", lambda cache: cache.advance(1))


def test_a_prompt_can_be_rejected_as_a_whole() -> None:
    """A row that keeps nothing needs nothing of the past, however long the step was."""
    ragged = Ragged(MODELS["ratio 2"], 3)
    ragged.step([20, 20, 20])
    ragged.cache.advance(torch.tensor([20, 0, 14]))
    ragged.step([1, 3, 1])
    ragged.cache.truncate(torch.tensor([1, 3, 1]))  # the row has reached 3 tokens, not 20
    ragged.cache.truncate(0)
    ragged.step([2, W + 3, 9])

    model = MODELS["ratio 2"]
    cache = make_cache(model)
    run(model, ragged.ids[:2, :20], cache)
    cache.advance(0)
    cache.truncate(0)
    assert_same(run(model, ragged.ids[:2, :20], cache), run(model, ragged.ids[:2, :20]))


# Rows


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_reordered_rows_continue_as_what_they_copy(packed: bool) -> None:
    model = MODELS["interleaved"]
    for order in ([2, 0, 1], [1, 1, 0], [2, 2, 2], [0, 1, 2]):
        rows = torch.tensor(order)
        straight, moved = Ragged(model, 3, packed=packed), Ragged(model, 3, packed=packed)
        for ragged in (straight, moved):
            ragged.step([14, 9, 3])
        moved.cache.reorder(rows)
        assert torch.equal(moved.cache.lengths, straight.cache.lengths[rows])
        moved.ids, moved.alone = moved.ids[rows], [moved.alone[row] for row in order]
        moved.step([2, 2, 2])
        moved.cache.truncate(2)
        moved.step([1, W + 3, 5])


def test_rows_can_be_reordered_before_a_draft_is_cut() -> None:
    ragged = Ragged(MODELS["ratio 2"], 3)
    ragged.step([14, 9, 3])
    ragged.step([4, 4, 4])
    ragged.cache.reorder(torch.tensor([1, 1, 2]))
    ragged.cache.advance(torch.tensor([1, 3, 0]))
    assert ragged.cache.lengths.tolist() == [10, 12, 3]
    ragged.ids, ragged.alone = ragged.ids[[1, 1, 2]], [ragged.alone[row] for row in (1, 1, 2)]
    ragged.step([3, 3, 3])


def test_a_reset_cache_is_a_new_one() -> None:
    model = MODELS["ratio 4"]
    ids = make_ids(model.cfg, TOKENS)
    used, fresh = make_cache(model), make_cache(model)
    run_chunks(model, ids.flip(1), [20, 3], used)
    used.reset()
    assert used.lengths.tolist() == [0, 0]
    assert replace(used.record) == replace(fresh.record)
    for size in (1, 14, 3):
        assert_equal(run(model, ids[:, :size], used), run(model, ids[:, :size], fresh))
    refused(used, "rows hold", lambda cache: cache.truncate(19))


class AnyUse(RuleBasedStateMachine):
    """Whatever is done to a cache, a step gives what one prefill of each row's tokens gives, or it is refused."""

    @initialize(ratio=st.sampled_from(sorted(SHORT)), packed=st.booleans(), most=st.sampled_from([0, 3, 8]))
    def begin(self, ratio: int, packed: bool, most: int) -> None:
        self.model = SHORT[ratio]
        self.cache = make_cache(self.model, 3, packed=packed, max_truncate=most)
        self.rows: list[list[int]] = [[], [], []]  # the tokens of each
        self.farthest = [0, 0, 0]
        self.stepped: list[list[int]] | None = None  # the new tokens of the step that advance may still cut
        self.seed = 0

    @rule(counts=st.tuples(*[st.integers(0, 11)] * 3), pads=st.integers(0, 1))
    def step(self, counts: tuple[int, ...], pads: int) -> None:
        width = max(*counts, 1) + pads
        if any(len(row) + count > TOKENS for row, count in zip(self.rows, counts, strict=True)):
            ids = torch.zeros(3, width, dtype=torch.int64)
            refused(self.cache, "room for", lambda cache: run(self.model, ids, cache, mask_of(counts, width)))
            return
        self.seed += 1
        ids = make_ids(self.model.cfg, width, 3, self.seed)
        fresh = [ids[row, :count].tolist() for row, count in enumerate(counts)]
        got = run(self.model, ids, self.cache, mask_of(counts, width))
        past = [len(row) for row in self.rows]
        self.rows = [row + new for row, new in zip(self.rows, fresh, strict=True)]
        self.farthest = [
            max(len(row), farthest if had else 0)
            for row, had, farthest in zip(self.rows, past, self.farthest, strict=True)
        ]
        self.stepped, self.width = fresh, width
        longest = max(len(row) for row in self.rows)
        if not longest:
            return
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in self.rows])
        whole = run(self.model, padded, mask=mask_of([len(row) for row in self.rows], longest))
        for row, (first, count) in enumerate(zip(past, counts, strict=True)):
            assert_same(got[row : row + 1, :count], whole[row : row + 1, first : first + count])

    @rule(kept=st.tuples(*[st.integers(0, 12)] * 3))
    def advance(self, kept: tuple[int, ...]) -> None:
        number = torch.tensor(kept)
        if self.stepped is None:
            refused(self.cache, "no step has been run", lambda cache: cache.advance(number))
            return
        before = [row[:had] for row, had in zip(self.rows, self.lengths_before(), strict=True)]
        after = [row + new[:n] for row, new, n in zip(before, self.stepped, kept, strict=True)]
        out = [len(new) - n for new, n, row in zip(self.stepped, kept, after, strict=True) if row]
        if self.width > self.cache.max_truncate and max(out, default=0) > self.cache.max_truncate:
            refused(self.cache, "leaves out", lambda cache: cache.advance(number))
            return
        self.cache.advance(number)
        self.rows = after

    def lengths_before(self) -> list[int]:
        return self.cache._before.tolist()

    @rule(dropped=st.tuples(*[st.integers(0, 9)] * 3))
    def truncate(self, dropped: tuple[int, ...]) -> None:
        number = torch.tensor(dropped)
        left = [len(row) - n for row, n in zip(self.rows, dropped, strict=True)]
        behind = [far - n for far, n, row in zip(self.farthest, left, self.rows, strict=True) if row]
        if min(left) < 0:
            refused(self.cache, "rows hold", lambda cache: cache.truncate(number))
        elif max(behind, default=0) > self.cache.max_truncate:
            refused(self.cache, "behind", lambda cache: cache.truncate(number))
        else:
            self.cache.truncate(number)
            self.rows = [row[:n] for row, n in zip(self.rows, left, strict=True)]
            self.stepped = None

    @rule(order=st.tuples(*[st.integers(0, 2)] * 3))
    def reorder(self, order: tuple[int, ...]) -> None:
        self.cache.reorder(torch.tensor(order))
        self.rows = [self.rows[row] for row in order]
        self.farthest = [self.farthest[row] for row in order]
        self.stepped = None if self.stepped is None else [self.stepped[row] for row in order]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.farthest, self.stepped = [[], [], []], [0, 0, 0], None


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


# What is refused


def refused(cache: CSA2Cache, message: str, call: Callable[[CSA2Cache], Any]) -> None:
    """The call raises CSA2InputError, and the cache holds what it held."""
    before = snapshot(cache)
    with pytest.raises(CSA2InputError, match=message):
        call(cache)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("room", [16, 17, 19])
def test_a_full_cache_refuses_and_keeps_all(room: int, packed: bool) -> None:
    model = MODELS["ratio 4"]
    ids = make_ids(model.cfg, room)
    cache = make_cache(model, max_seq_len=room, packed=packed)
    run(model, ids[:, :14], cache)
    message = f"cache has room for max_seq_len = {room} tokens a row; it holds up to 14 and this step brings"
    for call in (run, lambda model, ids, cache: model.layers[1].attn(model.embed(ids), cache=cache)):
        refused(cache, message, lambda cache, call=call: call(model, ids[:, : room - 13], cache))
    assert_same(run(model, ids[:, 14:], cache), run(model, ids)[:, 14:])  # an exact fit
    refused(cache, f"it holds up to {room}", lambda cache: run(model, ids[:, :1], cache))
    cache.truncate(1)
    assert_same(run(model, ids[:, -1:], cache), run(model, ids)[:, -1:])


def test_ragged_rows_near_the_end() -> None:
    """Room is counted in a row's own tokens, not in padding, nor in what a draft took only for a while."""
    ragged = Ragged(MODELS["ratio 3"], 3, max_seq_len=20)
    ragged.step([18, 4, 11])
    ragged.step([2, 7, 5], width=9)
    refused(ragged.cache, "holds up to 20", lambda cache: run(ragged.model, ragged.ids[:, :1], cache))
    ragged.step([0, 5, 4])
    refused(
        ragged.cache,
        "this step brings 5",
        lambda cache: run(ragged.model, ragged.ids[:, :5], cache, mask_of([0, 5, 0], 5)),
    )
    ragged.step([0, 4, 0], width=W)
    assert ragged.cache.lengths.tolist() == [20] * 3
    full = ragged.cache.layers[1]
    assert full.num_compressed(3) == full.capacity == 7  # not the spare row, though 28 tokens were offered


def test_drafts_near_the_end() -> None:
    ragged = Ragged(MODELS["ratio 2"], 2, max_seq_len=24)
    ragged.step([12, 12])
    for _ in range(5):  # 4 tokens offered, 1 or 2 taken
        ragged.step([4, 4])
        ragged.cache.advance(torch.tensor([1, 2]))
    assert ragged.cache.lengths.tolist() == [17, 22]
    refused(ragged.cache, "holds up to 22", lambda cache: run(ragged.model, ragged.ids[:, :3], cache))
    ragged.step([2, 2])


def long_inputs(model: CSA2ForCausalLM, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, tokens, model.cfg.hidden_size, generator=generator, dtype=torch.float64)


def test_layers_of_one_step_take_the_same_tokens() -> None:
    model = SHORT[2]
    layers, x = [block.attn for block in model.layers], long_inputs(model, 20)
    cache = make_cache(model)
    with torch.no_grad():
        state = layers[0](x[:, :5], cache=cache).state
        refused(cache, "in a step of 5 tokens and layer 2 got 6", lambda cache: layers[2](x[:, :6], cache=cache))
        refused(cache, "call cache.advance", lambda cache: layers[0](x[:, :1], cache=cache))
        layers[1](x[:, :5], state, cache=cache)
        cache.advance(5)
        layers[0](x[:, 5:6], cache=cache)


def test_a_layer_runs_once_in_a_long_step() -> None:
    """In a short one it may run again: what it has overwritten is not needed."""
    model = SHORT[3]
    layers, x = [block.attn for block in model.layers], long_inputs(model, 40)
    whole, cache = run_layers(layers, [x] * 3), make_cache(model)
    for _ in range(2):  # nothing before it, so nothing is lost
        first = run_layers(layers, [x[:, :14]] * 3, cache)
    cache.advance(14)
    for _ in range(2):
        second = run_layers(layers, [x[:, 14:22]] * 3, cache)
    cache.advance(8)
    third = run_layers(layers, [x[:, 22:31]] * 3, cache)
    message = "layer 0 has run in this step, whose 9 tokens have overwritten"
    refused(cache, message, lambda cache: layers[0](x[:, 22:31], cache=cache))
    ids = make_ids(model.cfg, 31)
    refused(cache, message, lambda cache: model(ids[:, 22:31], cache=cache))
    refused(cache, message, lambda cache: (cache.reorder(torch.tensor([0, 1])), model(ids[:, 22:31], cache=cache)))
    cache.advance(9)
    fourth = run_layers(layers, [x[:, 31:]] * 3, cache)
    for layer, expected in enumerate(whole):
        got = torch.cat([outputs[layer].hidden_states for outputs in (first, second, third, fourth)], dim=1)
        assert relative_error(got, expected.hidden_states) <= SAME


class StopError(Exception):
    pass


@pytest.mark.parametrize("tokens", [3, 12])
def test_a_step_that_fails_is_not_taken(tokens: int) -> None:
    """A short one can be run again; a long one has overwritten its past, and only a reset helps."""
    model = MODELS["ratio 2"]
    ids = make_ids(model.cfg, 30)
    whole, cache = run(model, ids), make_cache(model)
    run(model, ids[:, :15], cache)

    def fail(block: Any, *inputs: Any) -> CSA2Output:
        if block is model.layers[3]:
            raise StopError
        return block(*inputs)

    with torch.no_grad(), pytest.raises(StopError):
        model(ids[:, 15 : 15 + tokens], cache, run_block=fail)
    assert cache.lengths.tolist() == [15, 15]
    if tokens <= cache.max_truncate:
        assert_same(run(model, ids[:, 15:], cache), whole[:, 15:])
        return
    refused(cache, "cache.reset after a failed one", lambda cache: run(model, ids[:, 15:], cache))
    refused(cache, "behind the farthest", lambda cache: cache.truncate(0))
    cache.reset()
    assert_same(run(model, ids, cache), whole)


def wrong_dtype(model: CSA2ForCausalLM, ids: Tensor) -> None:
    cache = CSA2Cache(model.cfg, 2, TOKENS, torch.float32)
    refused(cache, "cache has dtype", lambda cache: model.layers[1].attn(model.embed(ids), cache=cache))


def one_dense_layer(model: CSA2ForCausalLM, ids: Tensor) -> None:
    cache = CSA2Cache(model.cfg, 2, TOKENS, torch.float64)
    model.layers[2].attn.layout = AttentionLayout.DENSE
    refused(cache, "layout is dense", lambda cache: model(ids, cache))


def bad_mask_near_the_end(model: CSA2ForCausalLM, ids: Tensor) -> None:
    cache = CSA2Cache(model.cfg, 2, 4, torch.float64)
    refused(cache, "attention_mask has shape", lambda cache: model(ids, cache, torch.ones(5)))


def layer_cache_without_tokens(model: CSA2ForCausalLM, ids: Tensor) -> None:
    cache = CSA2Cache(model.cfg, 2, TOKENS, torch.float64)
    refused(cache, "tokens", lambda cache: model.layers[1].attn(model.embed(ids), cache=cache.layers[1]))


@pytest.mark.parametrize(
    "case",
    [wrong_dtype, one_dense_layer, bad_mask_near_the_end, layer_cache_without_tokens],
    ids=lambda case: case.__name__,
)
@torch.no_grad()
def test_refused_before_anything_is_computed(case: Callable[[CSA2ForCausalLM, Tensor], None]) -> None:
    model = make_model(CONFIGS["ratio 2"])
    case(model, make_ids(model.cfg, 5))


# Gradients


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_no_gradient_goes_through_a_cache(made_in_inference_mode: bool) -> None:
    model = make_model(CONFIGS["ratio 2"])
    ids = make_ids(model.cfg, 24)
    whole = run(model, ids).logits
    with torch.inference_mode(made_in_inference_mode):
        cache = CSA2Cache(model.cfg, 2, TOKENS, torch.float64)
    logits = model(ids[:, :13], cache)
    assert torch.is_grad_enabled()
    assert not logits.requires_grad
    with torch.inference_mode():
        inside = model(ids[:, 13:18], cache)
        cache.advance(5)
        cache.reorder(torch.arange(2))
        cache.truncate(1)
    after = model(ids[:, 17:], cache)
    assert not after.requires_grad
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in cache._all_buffers())
    assert relative_error(torch.cat([logits, inside[:, :4], after], dim=1), whole) <= SAME
    cache.reset()
    x = model.embed(ids[:, :9])
    assert x.requires_grad
    output = model.layers[1].attn(x, cache=cache)
    assert not output.hidden_states.requires_grad
    assert not any(p.compressed_kv.requires_grad for p in output.state.publications)
    assert model(ids).requires_grad  # without a cache there still is one
