"""DecodeStep on CPU, where it is a call of the model with the cache; compiled, one graph a kind of block serves all."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cached_runs import assert_unchanged, config_of_ratio, make_config, make_ids, make_model, snapshot
from golden_files import relative_error
from torch import Tensor

from csa2_compiled import CompiledModel, CSA2Cache, CSA2ForCausalLM, CSA2InputError, compile_model
from csa2_compiled.decode import DecodeStep
from csa2_compiled.generation import generate

CONFIG = config_of_ratio(2)
MODEL = make_model(CONFIG)
IDS = make_ids(CONFIG, 30)
PROMPT = 9


def filled_cache(**options: Any) -> CSA2Cache:
    """Of two rows and 30 tokens, nine of them taken."""
    cache = CSA2Cache(CONFIG, 2, 30, dtype=torch.float64, **options)
    with torch.no_grad():
        MODEL(IDS[:, :PROMPT], cache)
    return cache


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_steps_equal_calls_of_the_model(num_tokens: int, packed: bool) -> None:
    cache, other = filled_cache(packed=packed), filled_cache(packed=packed)
    step = DecodeStep(MODEL, cache, num_tokens)
    for start in range(PROMPT, 25, num_tokens)[:2]:
        ids = IDS[:, start : start + num_tokens]
        logits = step(ids)
        assert not logits.requires_grad
        assert torch.equal(logits, MODEL(ids, other))
        assert_unchanged(cache, snapshot(other))
    assert cache.lengths.tolist() == [PROMPT + 2 * num_tokens] * 2


def test_steps_equal_one_prefill() -> None:
    step = DecodeStep(MODEL, filled_cache())
    logits = torch.cat([step(token) for token in IDS[:, PROMPT:].split(1, dim=1)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, MODEL(IDS)[:, PROMPT:], rtol=1e-9, atol=1e-9)


def test_a_draft_is_verified_and_cut() -> None:
    cache = filled_cache()
    verify = DecodeStep(MODEL, cache, num_tokens=4)
    verify(IDS[:, PROMPT : PROMPT + 4])
    cache.advance(torch.tensor([1, 3]))
    logits = verify(torch.stack([IDS[0, PROMPT + 1 : PROMPT + 5], IDS[1, PROMPT + 3 : PROMPT + 7]]))
    with torch.no_grad():
        whole = MODEL(IDS)
    for row, start in enumerate((PROMPT + 1, PROMPT + 3)):
        torch.testing.assert_close(logits[row], whole[row, start : start + 4], rtol=1e-9, atol=1e-9)
    assert cache.lengths.tolist() == [PROMPT + 5, PROMPT + 7]


@pytest.mark.parametrize(("max_truncate", "num_tokens"), [(8, 0), (8, -1), (8, 9), (3, 4), (0, 1)])
def test_num_tokens_is_bounded_by_what_can_be_taken_back(max_truncate: int, num_tokens: int) -> None:
    cache = CSA2Cache(CONFIG, 2, 30, dtype=torch.float64, max_truncate=max_truncate)
    message = f"num_tokens is {num_tokens}; 1 to the cache's max_truncate = {max_truncate} are allowed"
    with pytest.raises(CSA2InputError, match=message):
        DecodeStep(MODEL, cache, num_tokens)
    if max_truncate:
        DecodeStep(MODEL, cache, max_truncate)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3), (1, 2), (3, 2), (2, 2, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    cache = filled_cache()
    step, before = DecodeStep(MODEL, cache, num_tokens=2), snapshot(cache)
    with pytest.raises(CSA2InputError, match=r"input_ids has shape \(.*\); it must be \[2, 2\]"):
        step(torch.zeros(shape, dtype=torch.int64))
    assert_unchanged(cache, before)


def test_ids_and_room_are_checked_and_nothing_changes() -> None:
    cache = filled_cache()
    step = DecodeStep(MODEL, cache, num_tokens=7)
    for _ in range(3):
        before = snapshot(cache)
        with pytest.raises(CSA2InputError, match="input_ids holds 0 to 256"):
            step(torch.tensor([[0] * 7, [256] * 7]))
        with pytest.raises(CSA2InputError, match=r"dtype torch\.float32"):
            step(torch.zeros(2, 7))
        assert_unchanged(cache, before)
        step(IDS[:, :7])
    before = snapshot(cache)
    with pytest.raises(CSA2InputError, match="cache has room for max_seq_len = 30"):
        step(IDS[:, :7])
    assert_unchanged(cache, before)
    cache.truncate(7)
    step(IDS[:, :7])


def test_a_cache_of_another_batch_or_config_is_refused() -> None:
    with pytest.raises(CSA2InputError, match=r"it must be \[3, 1\]"):
        DecodeStep(MODEL, CSA2Cache(CONFIG, 3, 30, dtype=torch.float64))(IDS[:, :1])
    other = CSA2Cache(config_of_ratio(4), 2, 30, dtype=torch.float64)
    with pytest.raises(CSA2InputError, match="cache was made for another config"):
        DecodeStep(MODEL, other)(IDS[:, :1])


# Compiled: window twice, full.
SMALL = make_config((0, 0, 2), (2,), (2,))
KINDS = 2


@dataclass
class Steps:
    """A regional model after ten steps of one token each."""

    model: CSA2ForCausalLM
    compiled: CompiledModel
    ids: Tensor
    logits: list[Tensor] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)  # after each step


@pytest.fixture(scope="module")
def compiled_steps() -> Steps:
    torch._dynamo.reset()
    model = make_model(SMALL, torch.float32)
    steps = Steps(model, compile_model(model, passes="inline", regional=True, dynamic=False), make_ids(SMALL, 20))
    cache = CSA2Cache(SMALL, 2, SMALL.max_position_embeddings)  # the size that generate makes
    with torch.no_grad():
        model(steps.ids[:, :10], cache)
    step = DecodeStep(steps.compiled, cache)
    for i in range(10, 20):
        steps.logits.append(step(steps.ids[:, i : i + 1]))
        steps.compilations.append(steps.compiled.compilations)
    return steps


@pytest.mark.slow
def test_each_kind_of_block_compiles_once_for_all_steps(compiled_steps: Steps) -> None:
    assert len({block.kind for block in compiled_steps.model.layers}) == KINDS
    assert compiled_steps.compilations == [KINDS] * 10


@pytest.mark.slow
def test_compiled_steps_equal_one_prefill(compiled_steps: Steps) -> None:
    with torch.no_grad():
        expected = compiled_steps.model(compiled_steps.ids)[:, 10:]
    # 4e-7 measured (torch 2.13, AVX-512)
    assert relative_error(torch.cat(compiled_steps.logits, dim=1), expected) <= 1e-5


@pytest.mark.slow
def test_generation_takes_the_same_graphs(compiled_steps: Steps) -> None:
    """Its caches come in whole blocks, here all the model takes; another size would be other shapes of buffers."""
    model, compiled, ids = compiled_steps.model, compiled_steps.compiled, compiled_steps.ids[:, :9]
    expected = list(generate(model, ids, 12, stop=[7]))
    got = list(generate(compiled, ids, 12, stop=[7]))
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert compiled.compilations == KINDS
