"""CSA2ForCausalLM: logits, padding and packing, and the hook that runs its blocks."""

import pytest
import torch
from torch import Tensor

from csa2_compiled import CSA2Config, CSA2ForCausalLM, CSA2Output, CSA2State
from csa2_compiled.model import CSA2Block
from csa2_compiled.tokens import Tokens

CONFIG = CSA2Config.tiny()
SAME = 1e-13  # float64, relative to the largest logit; measured 1.6e-15


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> CSA2ForCausalLM:
    torch.manual_seed(seed)
    model = CSA2ForCausalLM(CONFIG, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # wide enough that the layers matter
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def make_ids(rows: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= SAME * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 37)])
def test_logits(dtype: torch.dtype, rows: int, tokens: int) -> None:
    model = make_model(dtype)
    with torch.no_grad():
        logits = model(make_ids(rows, tokens))
    assert logits.shape == (rows, tokens, CONFIG.vocab_size)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_runs_are_deterministic() -> None:
    ids = make_ids(2, 48)
    first, again, other = make_model(), make_model(), make_model(seed=1)
    with torch.no_grad():
        assert torch.equal(first(ids), first(ids))
        assert torch.equal(first(ids), again(ids))
        assert torch.equal(first(ids), first(ids.to(torch.int32)))
        assert not torch.equal(first(ids), other(ids))


@torch.no_grad()
def test_later_tokens_change_no_logits() -> None:
    model, ids = make_model(), make_ids(1, 40)
    whole = model(ids)
    for length in (1, 2, 23):
        assert_same(model(ids[:, :length]), whole[:, :length])


@torch.no_grad()
def test_padded_rows_equal_shorter_ones() -> None:
    model, ids, lengths = make_model(), make_ids(2, 40), (40, 21)
    mask = (torch.arange(40) < torch.tensor(lengths).unsqueeze(1)).long()
    logits = model(ids, attention_mask=mask)
    assert torch.equal(logits, model(ids, attention_mask=mask.bool()))
    for row, length in enumerate(lengths):
        assert_same(logits[row : row + 1, :length], model(ids[row : row + 1, :length]))
    assert not torch.equal(logits[1, 21:], model(ids)[1, 21:])


@torch.no_grad()
def test_packed_documents_equal_each_alone() -> None:
    model, ids = make_model(), make_ids(2, 40)
    documents = torch.zeros_like(ids)
    places = [(0, 0, 17), (0, 18, 22), (1, 0, 8), (1, 8, 31)]
    for number, (row, first, length) in enumerate(places, start=1):
        documents[row, first : first + length] = number
    logits = model(ids, document_ids=documents)
    assert torch.equal(logits, model(ids, None, (documents != 0).long(), documents))
    for row, first, length in places:
        span = slice(first, first + length)
        assert_same(logits[row : row + 1, span], model(ids[row : row + 1, span]))


@torch.no_grad()
def test_run_block_runs_every_block_once_in_order() -> None:
    model, ids = make_model(), make_ids(2, 24)
    mask = (torch.arange(24) < torch.tensor([[24], [9]])).long()
    calls: list[tuple[CSA2Block, CSA2State, Tokens]] = []
    states: list[CSA2State] = []

    def run_block(block: CSA2Block, x: Tensor, state: CSA2State, tokens: Tokens) -> CSA2Output:
        assert x.shape == (2, 24, CONFIG.hidden_size)
        calls.append((block, state, tokens))
        output = block(x, state, tokens)
        states.append(output.state)
        return output

    logits = model(ids, attention_mask=mask, run_block=run_block)
    assert torch.equal(logits, model(ids, attention_mask=mask))
    assert [block for block, _, _ in calls] == list(model.layers)
    assert calls[0][1] == CSA2State()
    assert all(state is before for (_, state, _), before in zip(calls[1:], states, strict=False))
    assert all(tokens is calls[0][2] for _, _, tokens in calls)  # laid out once
    assert calls[0][2].is_real is not None
    assert torch.equal(calls[0][2].is_real, mask.bool())


def test_weights_are_drawn_from_initializer_range() -> None:
    torch.manual_seed(0)
    model = CSA2ForCausalLM(CONFIG)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # 6 standard errors of an estimated deviation
            assert abs(parameter.std().item() / CONFIG.initializer_range - 1) < 6 / (2 * parameter.numel()) ** 0.5, name
        else:
            assert (parameter == (0 if name.endswith("attn_sink") else 1)).all(), name


def test_training_dtypes() -> None:
    model = make_model(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    wide = [name for name in dtypes if name.split(".")[-2].endswith("norm") or name.endswith("attn_sink")]
    assert all(dtypes[name] == torch.float32 for name in wide)
    assert {dtypes[name] for name in dtypes if name.endswith(("embed.weight", "head.weight", "w1.weight"))} == {
        torch.bfloat16
    }
