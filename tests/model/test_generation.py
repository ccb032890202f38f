"""Generation: greedy tokens are those of uncached forwards, what sampling draws, and what is refused.

Models are float64, where a cache changes logits by 1e-12 or so, far less than two tokens' logits differ.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached_runs import assert_unchanged, config_of_ratio, make_config, make_ids, make_model, snapshot
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from csa2_compiled import CSA2Attention, CSA2Cache, CSA2InputError, compile_model
from csa2_compiled.decode import DecodeStep
from csa2_compiled.generation import STOPPED, generate, prefill, sample

# Window, full with candidates, reuse, reindex and a second full within them, reuse.
CONFIG = config_of_ratio(2)
MODEL = make_model(CONFIG)
IDS = make_ids(CONFIG, 23, rows=3)
NEW = 12


@torch.no_grad()
def greedy(ids: Tensor, new_tokens: int) -> Tensor:
    """The likeliest token [B], again and again, each from a forward over all that came before: [B, new_tokens]."""
    start = ids.shape[1]
    for _ in range(new_tokens):
        ids = torch.cat([ids, MODEL(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[:, start:]


def generated(*args: Any, **options: Any) -> Tensor:
    """All steps, [B, steps]."""
    return torch.stack(list(generate(MODEL, *args, **options)), dim=1)


def make_cache(rows: int = 3, tokens: int = 60, **options: Any) -> CSA2Cache:
    return CSA2Cache(CONFIG, rows, tokens, dtype=torch.float64, **options)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return greedy(IDS, NEW)


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100])
def test_greedy_tokens_are_those_of_uncached_forwards(expected: Tensor, chunk_size: int) -> None:
    got = generated(IDS, NEW, chunk_size=chunk_size)
    assert got.dtype is torch.int64
    assert torch.equal(got, expected)
    assert len(set(expected.flatten().tolist())) > NEW  # it is not one token forever


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=3), st.integers(1, 22), st.booleans())
def test_ragged_rows_equal_each_row_alone(lengths: list[int], chunk_size: int, as_bool: bool) -> None:
    ids = make_ids(CONFIG, max(lengths), rows=len(lengths), seed=sum(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    got = generated(ids, 4, attention_mask=mask if as_bool else mask.long(), chunk_size=chunk_size)
    for row, length in enumerate(lengths):
        assert torch.equal(got[row : row + 1], greedy(ids[row : row + 1, :length], 4))


def test_prompts_as_bytes_and_int32(expected: Tensor) -> None:
    row = IDS[1:2]
    assert torch.equal(generated(bytes(row[0].tolist()), NEW), expected[1:2])
    assert torch.equal(generated(IDS.int(), NEW), expected)


@settings(max_examples=4, deadline=None)
@given(first=st.integers(1, NEW - 1), chunk_size=st.integers(4, 30), packed=st.booleans())
def test_a_cache_goes_on_where_it_was(expected: Tensor, first: int, chunk_size: int, packed: bool) -> None:
    """The last token that came out has not gone in yet: it is the next prompt."""
    cache = make_cache(packed=packed)
    one = generated(IDS, first, cache=cache, chunk_size=chunk_size)
    assert cache.lengths.tolist() == [23 + first - 1] * 3
    other = generated(one[:, -1:], NEW - first, cache=cache)
    assert torch.equal(torch.cat([one, other], dim=1), expected)


def test_a_prompt_follows_what_a_cache_holds(expected: Tensor) -> None:
    cache = make_cache(tokens=23 + NEW - 1)
    prefill(MODEL, IDS[:, :9], cache)
    assert torch.equal(generated(IDS[:, 9:], NEW, cache=cache, chunk_size=4), expected)
    assert cache.lengths.tolist() == [cache.max_seq_len] * 3


def test_rows_end_at_stop_tokens(expected: Tensor) -> None:
    stop = [int(expected[0, 3]), int(expected[1, 7]), int(expected[2, 5])]
    ends = [min(row.tolist().index(token) for token in stop if token in row) for row in expected]
    assert len(set(ends)) > 1
    got = generated(IDS, NEW, stop=stop)
    assert got.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        assert torch.equal(got[row, : end + 1], expected[row, : end + 1])  # the stop token comes out itself
        assert (got[row, end + 1 :] == STOPPED).all()


def test_a_row_that_does_not_stop_goes_on(expected: Tensor) -> None:
    stop = {int(expected[0, 0])}
    unstopped = [row for row in (1, 2) if not stop & set(expected[row].tolist())]
    assert unstopped
    got = generated(IDS, NEW, stop=frozenset(stop))
    assert got.shape[1] == NEW
    assert got[0].tolist() == [stop.pop(), *[STOPPED] * (NEW - 1)]
    assert torch.equal(got[unstopped], expected[unstopped])


def test_stop_as_bytes(expected: Tensor) -> None:
    row = expected[1:2]
    stop = bytes(row[0, 2:4].tolist())
    end = min(row[0].tolist().index(token) for token in stop)
    assert torch.equal(generated(IDS[1:2], NEW, stop=stop), row[:, : end + 1])


def test_seeds_reproduce_and_differ() -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}
    first, again, other = (generated(IDS, 5, seed=seed, **options) for seed in (7, 7, 2**63))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    unseeded = [generated(IDS, 5, **options) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    generated(IDS[:1], 3, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_token_runs_no_step(monkeypatch: pytest.MonkeyPatch, expected: Tensor) -> None:
    def step(*_: Any) -> Tensor:
        raise AssertionError("a step ran")

    monkeypatch.setattr(DecodeStep, "__call__", step)
    cache = make_cache()
    assert torch.equal(generated(IDS, 1, cache=cache), expected[:, :1])
    assert cache.lengths.tolist() == [23] * 3


def test_no_step_runs_after_the_last_stop(monkeypatch: pytest.MonkeyPatch, expected: Tensor) -> None:
    cache = make_cache(rows=1)
    got = generated(IDS[:1], NEW, cache=cache, stop=[int(expected[0, 0])])
    assert torch.equal(got, expected[:1, :1])
    assert cache.lengths.tolist() == [23]


def test_nothing_runs_before_the_first_token_is_asked_for() -> None:
    cache = make_cache()
    before = snapshot(cache)
    tokens = generate(MODEL, IDS, 3, cache=cache)
    assert_unchanged(cache, before)
    next(tokens)
    assert cache.lengths.tolist() == [23] * 3


def test_gradients_are_off_inside_and_on_between() -> None:
    for token in generate(MODEL, IDS, 2):
        assert torch.is_grad_enabled()
        assert not token.requires_grad
    assert not prefill(MODEL, IDS, make_cache()).requires_grad


def test_prompts_run_eagerly_through_a_compiled_model(expected: Tensor) -> None:
    compiled = compile_model(MODEL, passes="none", regional=True)
    (token,) = generate(compiled, IDS, 1)
    assert torch.equal(token, expected[:, 0])
    assert compiled.compilations == 0


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 22), st.booleans())
def test_prefill_gives_the_logits_after_each_last_token(lengths: list[int], chunk_size: int, filled: bool) -> None:
    rows = len(lengths)
    ids = make_ids(CONFIG, 5 + max(lengths), rows=rows, seed=sum(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    cache, past = make_cache(rows), 5 if filled else 0
    if filled:
        prefill(MODEL, ids[:, :5], cache)
    got = prefill(MODEL, ids[:, 5:], cache, mask.int(), chunk_size)
    assert cache.lengths.tolist() == [past + length for length in lengths]
    for row, length in enumerate(lengths):
        with torch.no_grad():
            whole = MODEL(ids[row : row + 1, 5 - past : 5 + length])
        torch.testing.assert_close(got[row], whole[0, -1], rtol=1e-9, atol=1e-9)


# What is refused, when, and that nothing has changed by then.

SHORT = make_ids(CONFIG, 8)
MASK = torch.ones(2, 8, dtype=torch.int64)


def with_zeros(row: int, tokens: slice) -> Tensor:
    mask = MASK.clone()
    mask[row, tokens] = 0
    return mask


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature below 0": ({"temperature": -0.1}, "temperature is -0.1"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature is inf"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature is nan"),
    "top_k 0": ({"top_k": 0}, "top_k is 0"),
    "top_k no integer": ({"top_k": 2.0}, "top_k is 2.0"),
    "top_k a bool": ({"top_k": True}, "top_k is True"),
    "top_p 0": ({"top_p": 0.0}, "top_p is 0.0"),
    "top_p above 1": ({"top_p": 1.01}, "top_p is 1.01"),
    "top_p NaN": ({"top_p": float("nan")}, "top_p is nan"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    "new tokens no integer": ({"max_new_tokens": 3.0}, "max_new_tokens is 3.0"),
    "chunk_size 0": ({"chunk_size": 0}, "chunk_size is 0"),
    "stop as text": ({"stop": "\n"}, r"stop is '\\n'; it must be bytes, or integers within 0 and 255"),
    "stop outside of the vocabulary": ({"stop": [10, 256]}, r"stop is \[10, 256\]"),
    "stop no integer": ({"stop": [1.5]}, r"stop is \[1.5\]"),
    "seed below 0": ({"seed": -1}, "seed is -1"),
    "seed too large": ({"seed": 2**64}, "seed is 18446744073709551616"),
    "seed no integer": ({"seed": 0.5}, "seed is 0.5"),
    "empty bytes": ({"prompt": b""}, r"input_ids has shape \(1, 0\); it needs at least one row"),
    "no tokens": ({"prompt": SHORT[:, :0]}, r"input_ids has shape \(2, 0\)"),
    "one dimension": ({"prompt": SHORT[0]}, r"input_ids has shape \(8,\)"),
    "ids as floats": ({"prompt": SHORT.double()}, "dtype torch.float64"),
    "unknown id": ({"prompt": SHORT + 256}, "vocab_size - 1 = 255"),
    "long prompt": ({"prompt": SHORT.repeat(1, 17)}, "max_position_embeddings 128"),
    "other rows than the cache": ({"prompt": SHORT[:1]}, "cache has batch_size 2; this call has 1 rows"),
    "mask shape": ({"attention_mask": MASK[:, :7]}, r"attention_mask has shape \(2, 7\)"),
    "mask as floats": ({"attention_mask": MASK.float()}, "attention_mask has dtype torch.float32"),
    "left padding": ({"attention_mask": with_zeros(1, slice(0, 2))}, "attention_mask has a token at row 1, index 2"),
    "empty row": ({"attention_mask": with_zeros(0, slice(None))}, "attention_mask has a row without a token"),
    "too many tokens for the cache": (
        {"max_new_tokens": 4},
        r"max_seq_len = 15 tokens a row; it holds up to 5, and prompt and new tokens need 11 more",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_at_the_call(case: str) -> None:
    changes, message = REFUSED[case]
    cache = make_cache(rows=2, tokens=15)
    prefill(MODEL, SHORT[:, :5], cache)
    arguments: dict[str, Any] = {"prompt": SHORT, "max_new_tokens": 3, "cache": cache, **changes}
    before, state = snapshot(cache), torch.get_rng_state()
    with pytest.raises(CSA2InputError, match=message):
        generate(MODEL, **arguments)  # not iterated
    assert_unchanged(cache, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert generated(SHORT, 3, cache=cache).shape == (2, 3)  # as much as fits still runs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_cache(rows=2, max_truncate=0), "num_tokens is 1; 1 to the cache's max_truncate = 0"),
        (lambda: CSA2Cache(CONFIG, 2, 60), "cache has dtype torch.float32; the model's is torch.float64"),
        (lambda: CSA2Cache(make_config((0,), (), ()), 2, 60, dtype=torch.float64), "cache was made for another config"),
        (dict, "cache is a dict; it must be a CSA2Cache"),
    ],
)
def test_unfit_caches_are_refused_at_the_call(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(CSA2InputError, match=message):
        generate(MODEL, SHORT, 3, cache=make())


def test_more_than_the_model_takes_is_refused_at_the_call() -> None:
    with pytest.raises(CSA2InputError, match="max_seq_len is 129; it must be an integer from 1 to 128"):
        generate(MODEL, SHORT, 122)
    generate(MODEL, SHORT, 121)


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), CSA2Attention(CONFIG, 0), compile_model(CSA2Attention(CONFIG, 0), passes="none")]
)
def test_other_modules_are_refused_at_the_call(module: nn.Module) -> None:
    with pytest.raises(TypeError, match="must be a CSA2ForCausalLM, compiled or not"):
        generate(module, IDS, 1)


# What sample() draws.

DRAWS = 20_000


def draws(logits: Tensor, seed: int = 0, count: int = DRAWS, **options: Any) -> Tensor:
    """How often each token of logits [V] came, [V]."""
    tokens = sample(logits.expand(count, -1), generator=torch.Generator().manual_seed(seed), **options)
    return torch.bincount(tokens, minlength=len(logits))


def assert_frequencies(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's statistic, whose mean is the degrees of freedom, within about six standard deviations."""
    assert not counts[probabilities == 0].any()
    wanted, came = (t[probabilities > 0].double() for t in (probabilities * counts.sum(), counts))
    freedom = len(wanted) - 1
    assert ((came - wanted).square() / wanted).sum() <= freedom + 6 * (2 * freedom) ** 0.5 + 6


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.9, -0.2, 1.4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature: float, dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    counts = draws(logits, temperature=temperature)
    assert counts.min() > 0
    assert_frequencies(counts, (logits.double() / temperature).softmax(-1))


def test_the_bound_on_frequencies_sees_a_wrong_temperature() -> None:
    with pytest.raises(AssertionError):
        assert_frequencies(draws(LOGITS, temperature=1.0), (LOGITS.double() / 1.1).softmax(-1))


def test_top_k_draws_among_the_k_likeliest() -> None:
    probabilities = torch.where(LOGITS >= 0.9, LOGITS.double(), float("-inf")).softmax(-1)
    assert_frequencies(draws(LOGITS, temperature=1.0, top_k=3), probabilities)
    assert_frequencies(draws(LOGITS, temperature=1.0, top_k=100), LOGITS.double().softmax(-1))


def test_top_k_keeps_what_ties_with_the_last() -> None:
    counts = draws(torch.tensor([1.0, 0.0, 1.0, 1.0]), temperature=1.0, top_k=2)
    assert_frequencies(counts, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 4), (1.0, 4), (1e-50, 1)],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    """1/2, 1/4, 1/8, 1/8: sums are exact."""
    probabilities = torch.tensor([0.125, 0.5, 0.125, 0.25], dtype=torch.float64)
    counts = draws(probabilities.log2() * torch.tensor(2.0).log(), temperature=1.0, top_p=top_p)
    assert int((counts > 0).sum()) == kept
    likeliest = (-probabilities).argsort(stable=True)[:kept]
    if kept < 3:
        expected = torch.zeros(4, dtype=torch.float64).index_copy(0, likeliest, probabilities[likeliest])
        assert_frequencies(counts, expected / expected.sum())


def test_top_p_keeps_as_many_of_ties_as_it_needs() -> None:
    counts = draws(torch.zeros(8), temperature=1.0, top_p=0.5)
    assert int((counts > 0).sum()) == 4
    assert_frequencies(counts[counts > 0], torch.full((4,), 0.25))


def test_top_p_counts_what_top_k_left() -> None:
    """Of 1/2, 1/4, 1/8, 1/8 top_k leaves 2/3 and 1/3."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert (draws(logits, temperature=1.0, top_k=2, top_p=0.6) > 0).tolist() == [True, False, False, False]
    assert (draws(logits, temperature=1.0, top_k=2, top_p=0.7) > 0).tolist() == [True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=8),
    st.floats(0.05, 5),
    st.integers(1, 9),
    st.floats(0.01, 1),
    st.integers(0, 1000),
)
def test_only_likely_tokens_come(tenths: list[int], temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Against float64: k likeliest with ties, then the fewest of them that reach p."""
    logits = torch.tensor(tenths, dtype=torch.float64) / 10
    least = logits.sort(descending=True).values[min(top_k, len(logits)) - 1]
    probabilities = torch.where(logits >= least, logits / temperature, float("-inf")).softmax(-1)
    ranked = probabilities.sort(descending=True).values
    sums = ranked.cumsum(0)
    assume(((sums - top_p).abs() > 1e-5).all())
    kept = int((sums < top_p).sum()) + 1
    counts = draws(logits.float(), seed, 500, temperature=temperature, top_k=top_k, top_p=top_p)
    came = counts > 0
    assert came.sum() <= kept
    assert (probabilities[came] >= ranked[min(kept, len(ranked)) - 1] * (1 - 1e-9)).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-(10**4), 10**4), min_size=1, max_size=9, unique=True), st.floats(0.1, 1e30))
def test_the_likeliest_token_alone_is_greedy(tenths: list[int], temperature: float) -> None:
    logits = torch.tensor(tenths) / 10
    best = sample(logits)
    assert best == logits.argmax()
    assert sample(logits, temperature, top_k=1) == best
    assert sample(logits, min(temperature, 1.0), top_p=1e-9) == best


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_temperatures_are_greedy(temperature: float, dtype: torch.dtype) -> None:
    assert draws(LOGITS.to(dtype), temperature=temperature)[2] == DRAWS


def test_huge_temperatures_are_uniform_over_top_k() -> None:
    counts = draws(LOGITS, temperature=1e38, top_k=3)
    assert_frequencies(counts, (LOGITS >= 0.9) / 3)


def test_masked_tokens_never_come() -> None:
    logits = torch.tensor([float("-inf"), 1.0, float("-inf"), 0.0])
    assert_frequencies(draws(logits, temperature=1.0), logits.double().softmax(-1))
    assert_frequencies(draws(logits, temperature=1.0, top_p=0.999), logits.double().softmax(-1))


def test_rows_and_other_dimensions_are_independent() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        tokens = sample(logits, temperature, generator=torch.Generator().manual_seed(0))
        assert tokens.shape == (2, 3)
        assert tokens.dtype is torch.int64
    pairs = sample(torch.zeros(DRAWS, 2, 2), 1.0, generator=torch.Generator().manual_seed(0))
    assert_frequencies(torch.bincount(pairs[:, 0] * 2 + pairs[:, 1]), torch.full((4,), 0.25))


def test_a_prompt_of_another_type_is_refused() -> None:
    with pytest.raises(CSA2InputError, match="prompt is a str; it must be bytes or an integer tensor"):
        generate(MODEL, "text", 3)  # type: ignore[arg-type]
