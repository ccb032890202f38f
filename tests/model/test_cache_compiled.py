"""Compiled steps with a cache: how many graphs there are, and what they write.

Measured with torch 2.13.0 on CPU (AVX-512), float32: a step's logits are within 5.3e-7 (relative) of eager ones, and
those of a compiled packed cache are bit-equal to those of a compiled unpacked one.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from cached_runs import make_config, make_ids, make_model, run
from golden_files import relative_error
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from csa2_compiled import CompiledModel, CSA2Cache, CSA2ForCausalLM, compile_model
from csa2_compiled.passes.inductor import without_autograd_cache

# Window, full, reuse, reindex, reuse twice.
CONFIG = make_config((0, 2, 2, 2, 2, 2), (1,), (1, 3), max_position_embeddings=4096)
KINDS = 4
PAIR = make_config((2, 2), (0,), (0,))
CAPACITY = 1009  # compressed positions of CONFIG's cache: a number that nothing else has
NO_CACHE = {"fx_graph_cache": False}
CLOSE = 1e-5

pytestmark = pytest.mark.slow


@dataclass
class Steps:
    """A regional model after an eager prefill of 20 tokens and 20 compiled steps of one token."""

    model: CSA2ForCausalLM
    compiled: CompiledModel
    ids: Tensor
    cache: CSA2Cache
    logits: list[Tensor] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)  # after each step
    code: list[str] = field(default_factory=list)  # of every graph


def make_cache() -> CSA2Cache:
    return CSA2Cache(CONFIG, 2, 2 * CAPACITY)


@pytest.fixture(scope="module")
def regional() -> Iterator[Steps]:
    torch._dynamo.reset()
    model = make_model(CONFIG, torch.float32)
    compiled = compile_model(model, regional=True, dynamic=False, options=NO_CACHE)
    steps = Steps(model, compiled, make_ids(CONFIG, 40), make_cache())
    with torch.no_grad(), without_autograd_cache():
        model(steps.ids[:, :20], steps.cache)
        for i in range(20, 40):
            if i == 20:
                logits, steps.code = run_and_get_code(compiled, steps.ids[:, i : i + 1], cache=steps.cache)
            else:
                logits = compiled(steps.ids[:, i : i + 1], cache=steps.cache)
            steps.logits.append(logits)
            steps.compilations.append(compiled.compilations)
        yield steps


def eager_steps(model: CSA2ForCausalLM, ids: Tensor, cache: CSA2Cache) -> Tensor:
    return torch.cat([run(model, token, cache).logits for token in ids.split(1, dim=1)], dim=1)


def test_every_kind_of_block_compiles_once(regional: Steps) -> None:
    assert len({block.kind for block in regional.model.layers}) == KINDS
    assert regional.compilations == [KINDS] * 20


def test_compiled_steps_equal_eager_ones(regional: Steps) -> None:
    cache = make_cache()
    run(regional.model, regional.ids[:, :20], cache)
    expected = eager_steps(regional.model, regional.ids[:, 20:], cache)
    assert relative_error(torch.cat(regional.logits, dim=1), expected) <= CLOSE
    whole = run(regional.model, regional.ids)
    assert relative_error(torch.cat(regional.logits, dim=1), whole.logits[:, 20:]) <= CLOSE


def test_another_cache_and_other_lengths_take_the_same_graphs(regional: Steps) -> None:
    """Rows of different lengths too, drafts that are cut, reordered rows, and a cache that was reset."""
    before = regional.compilations[-1]
    cache, eager = make_cache(), make_cache()
    mask = torch.tensor([[1] * 13, [1] * 6 + [0] * 7])
    with torch.no_grad():
        for each in (cache, eager):
            regional.model(regional.ids[:, :13], each, mask)
        for i in range(13, 25):
            tokens = regional.ids[:, i : i + 1]
            got, expected = regional.compiled(tokens, cache=cache), regional.model(tokens, eager)
            assert relative_error(got, expected) <= CLOSE, i
            for each in (cache, eager):
                if i == 16:
                    each.advance(torch.tensor([0, 1]))
                elif i == 19:
                    each.truncate(torch.tensor([2, 1]))
                elif i == 21:
                    each.reorder(torch.tensor([1, 0]))
                elif i == 23:
                    each.reset()
            assert torch.equal(cache.lengths, eager.lengths)
    assert regional.compiled.compilations == before


def allocated(code: str) -> list[int]:
    """Elements of every buffer that a graph's wrapper makes."""
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


def test_graphs_write_rows_in_place(regional: Steps) -> None:
    """No graph makes a buffer as large as a cache's: a row that is not written in place needs a copy of all rows.

    Scores have one number for every index head and position, far less than the channels of one.
    """
    assert len(regional.code) == KINDS
    rows = CAPACITY * CONFIG.head_dim
    sizes = [size for code in regional.code for size in allocated(code)]
    assert max(sizes) >= CAPACITY  # scores are among them
    assert max(sizes) < rows
    assert not any("copy_(" in code for code in regional.code)


def test_a_copied_cache_would_be_seen() -> None:
    def step(buffer: Tensor, row: Tensor, value: Tensor) -> Tensor:
        return buffer.index_put((row,), value)

    buffer, row, value = torch.zeros(CAPACITY + 1, 32), torch.tensor([3]), torch.ones(1, 32)
    with without_autograd_cache():
        _, (code,) = run_and_get_code(torch.compile(step, options=NO_CACHE), buffer, row, value)
    assert max(allocated(code)) == buffer.numel()


def test_one_graph_of_the_whole_model_serves_all_steps() -> None:
    """With packed rows."""
    torch._dynamo.reset()
    model, ids = make_model(PAIR, torch.float32), make_ids(PAIR, 30)
    compiled = compile_model(model, passes="none", dynamic=False)
    caches = [CSA2Cache(PAIR, 2, 40, packed=True) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :9], cache)
        for i in range(9, 30):
            token = ids[:, i : i + 1]
            got, expected = compiled(token, cache=caches[0]), model(token, caches[1])
            assert relative_error(got, expected) <= CLOSE, i
            assert compiled.compilations == 1, i
    assert caches[0].lengths.tolist() == [30, 30]


def test_steps_of_many_sizes_share_a_dynamic_graph() -> None:
    """One graph for steps of one token and one for those of 2 to max_truncate, in one layer that is compiled alone.

    A full layer whose groups are two tokens has three: Dynamo makes a graph of its own where a size is 1, and a step
    of two tokens completes one group. Longer steps read the ring before they write it, which is another graph.
    """
    torch._dynamo.reset()
    cfg = make_config((1,), (0,), (0,))
    layer = make_model(cfg, torch.float32).layers[0].attn
    compiled = compile_model(layer, passes="none", dynamic=True)
    x = torch.randn(2, 60, cfg.hidden_size, generator=torch.Generator().manual_seed(0))
    cache, eager, done = CSA2Cache(cfg, 2, 60), CSA2Cache(cfg, 2, 60), 0
    with torch.no_grad():
        for size in (3, 8, 1, 5, 2, 4, 7, 6, 1):
            inputs = x[:, done : done + size]
            got, expected = compiled(inputs, cache=cache), layer(inputs, cache=eager)
            assert torch.equal(got.state.topk_indices[..., :4], _padded(expected.state.topk_indices))
            assert relative_error(got.hidden_states, expected.hidden_states) <= CLOSE, size
            for each in (cache, eager):
                each.advance(size)
            done += size
    assert compiled.compilations == 2


def _padded(picks: Tensor) -> Tensor:
    return torch.nn.functional.pad(picks, (0, 4 - picks.shape[-1]), value=-1)
