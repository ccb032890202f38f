"""Decoding on CUDA: compiled, captured, replayed; and what the passes do to it."""

import pytest
import torch
from golden_files import relative_error

from csa2_compiled import CSA2Cache, CSA2Config, CSA2ForCausalLM, DecodeStep, compile_model, generate
from csa2_compiled.passes.inductor import without_autograd_cache

PROMPT, STEPS = 150, 20


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = CSA2ForCausalLM(CSA2Config.tiny(), dtype=torch.float32, device="cuda").eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.fixture(scope="module")
def compiled(model):
    return compile_model(model, regional=True, dynamic=False)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1)).cuda()


def filled_cache(model, ids, **options):
    cache = CSA2Cache(model.cfg, 2, PROMPT + STEPS, dtype=torch.float32, device="cuda", **options)
    with torch.no_grad():
        model(ids[:, :PROMPT], cache)
    return cache


@pytest.mark.parametrize("combo_kernels", [False, True])
def test_replayed_steps_equal_one_prefill(model, compiled, ids, combo_kernels):
    if combo_kernels:
        compiled = compile_model(model, regional=True, dynamic=False, options={"combo_kernels": True})
    with torch.no_grad():
        expected = model(ids)[:, PROMPT:]
    step = DecodeStep(compiled, filled_cache(model, ids))
    compilations = None
    for i in range(STEPS):
        logits = step(ids[:, PROMPT + i : PROMPT + i + 1])
        # Another order of sums may move a quantized value into the next bin now and then.
        assert relative_error(logits[:, 0], expected[:, i]) <= 2e-2
        compilations = compilations or compiled.compilations
    assert compiled.compilations == compilations
    assert step.cache.lengths.tolist() == [PROMPT + STEPS] * 2
    assert step.cache.record.most == PROMPT + STEPS


def test_eager_models_are_captured_too(model, ids):
    with torch.no_grad():
        expected = model(ids)[:, PROMPT:]
    step = DecodeStep(model, filled_cache(model, ids))
    for i in range(STEPS):
        assert relative_error(step(ids[:, PROMPT + i : PROMPT + i + 1])[:, 0], expected[:, i]) <= 2e-2


def test_steps_never_wait_for_the_device(model, compiled, ids):
    step = DecodeStep(compiled, filled_cache(model, ids))
    token = step(ids[:, PROMPT : PROMPT + 1])[:, -1].argmax(-1, keepdim=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS - 1):
            token = step(token)[:, -1].argmax(-1, keepdim=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.cache.lengths.tolist() == [PROMPT + STEPS] * 2


def test_generation_never_waits_for_the_device(model, compiled, ids):
    cache = CSA2Cache(model.cfg, 2, PROMPT + STEPS, dtype=torch.float32, device="cuda")
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3}
    tokens = generate(compiled, ids[:, :PROMPT], STEPS, cache=cache, **options)
    drawn = [next(tokens), next(tokens)]  # prefill, then capture
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn += list(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = generate(compiled, ids[:, :PROMPT], STEPS, **options)
    assert torch.equal(torch.stack(drawn), torch.stack(list(again)))


def test_a_draft_is_verified_and_cut(model, compiled, ids):
    cache = filled_cache(model, ids)
    verify = DecodeStep(compiled, cache, num_tokens=4)
    verify(ids[:, PROMPT : PROMPT + 4])
    cache.advance(torch.tensor([1, 3], device="cuda"))
    logits = verify(torch.stack([ids[0, PROMPT + 1 : PROMPT + 5], ids[1, PROMPT + 3 : PROMPT + 7]])).clone()
    with torch.no_grad():
        expected = model(ids)
    assert relative_error(logits[0], expected[0, PROMPT + 1 : PROMPT + 5]) <= 2e-2
    assert relative_error(logits[1], expected[1, PROMPT + 3 : PROMPT + 7]) <= 2e-2


def test_packed_rows_give_the_same_logits(model, compiled, ids):
    steps = [DecodeStep(compiled, filled_cache(model, ids, packed=packed)) for packed in (False, True)]
    for i in range(3):
        one, other = (step(ids[:, PROMPT + i : PROMPT + i + 1]).clone() for step in steps)
        assert relative_error(one, other) <= 1e-5


def test_a_batch_in_bfloat16(model, ids):
    half = CSA2ForCausalLM(model.cfg, dtype=torch.bfloat16, device="cuda").eval()
    half.load_state_dict(model.state_dict())
    cache = CSA2Cache(model.cfg, 2, PROMPT + 2, dtype=torch.bfloat16, device="cuda")
    compiled = compile_model(half, regional=True, dynamic=False)
    with torch.no_grad(), without_autograd_cache():
        half(ids[:, :PROMPT], cache)
        got = compiled(ids[:, PROMPT : PROMPT + 1], cache)
        cache.truncate(1)
        expected = half(ids[:, PROMPT : PROMPT + 1], cache)
    assert relative_error(got, expected) <= 0.16  # two roundings to bfloat16; one is 0.08 away from float32 (on a CPU)
    fired = {report.name: report.fired for report in compiled.manager.totals()}["gemv"]
    assert fired["aten::mm"] > 0  # wq_a and wkv of the same rows, and the pooled projections
    assert fired["aten::bmm"] >= 6  # of each kind of layer
