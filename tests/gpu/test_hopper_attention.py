"""The Gluon kernel against float64 and against the Triton kernel; the passes choose it at the released shapes."""

from dataclasses import replace

import pytest
import torch

from csa2_compiled import CSA2Attention, CSA2Config, CSA2State, compile_model, ops
from csa2_compiled.attention_math import gather_kv_body
from csa2_compiled.passes.inductor import why_no_gluon_for_hopper, without_autograd_cache
from csa2_compiled.rope import apply_rope_body

REASON = why_no_gluon_for_hopper(torch.device("cuda")) if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no Gluon kernel here: {REASON}")
DIM = 512


def random_indices(batch, tokens, slots, rows, filled):
    """int32 [batch, tokens, slots], a share `filled` of them, -1 elsewhere."""
    indices = torch.randint(0, rows, (batch, tokens, slots), device="cuda", dtype=torch.int32)
    return indices.masked_fill(torch.rand(indices.shape, device="cuda") >= filled, -1)


def inputs(heads, window, topk, dtype, batch=2, tokens=5, filled=0.8, rotary=64):
    torch.manual_seed(heads + window + topk)
    q = torch.randn(batch, tokens, heads, DIM, device="cuda", dtype=dtype)
    sink = torch.randn(heads, device="cuda")
    window_kv = torch.randn(batch, 200, DIM, device="cuda", dtype=dtype)
    recent = random_indices(batch, tokens, window, 200, filled)
    compressed_kv = torch.randn(batch, 300, DIM, device="cuda", dtype=dtype) if topk else None
    selected = random_indices(batch, tokens, topk, 300, filled) if topk else None
    angles = torch.rand(batch, tokens, rotary // 2, device="cuda") * 6
    return q, sink, window_kv, recent, compressed_kv, selected, torch.stack([angles.cos(), angles.sin()], -1)


def in_float64(q, sink, window_kv, recent, compressed_kv, selected, rotations, rotate_q, rotate_output):
    q = ops.apply_rope(q, rotations, False) if rotate_q else q
    keys, visible = gather_kv_body(window_kv, recent).double(), recent
    if selected is not None:
        keys = torch.cat([keys, gather_kv_body(compressed_kv, selected).double()], dim=2)
        visible = torch.cat([recent, selected], dim=-1)
    logits = torch.einsum("bshd,bskd->bshk", q.double(), keys) * DIM**-0.5
    logits = logits.masked_fill((visible < 0).unsqueeze(2), float("-inf"))
    sink = sink.double().view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    out = torch.cat([sink, logits], dim=-1).softmax(-1)[..., 1:] @ keys
    return apply_rope_body(out, rotations, True) if rotate_output else out


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "window", "topk"), [(64, 128, 512), (64, 128, 0), (128, 100, 70), (64, 8, 1), (64, 300, 129)]
)
def test_as_close_to_float64_as_the_triton_kernel(heads, window, topk, dtype, turned):
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention

    given = inputs(heads, window, topk, dtype)
    expected = in_float64(*given, turned, turned)
    logs = torch.empty(given[0].shape[:3], device="cuda")
    triton = error(sparse_attention(*given, rotate_q=turned, rotate_output=turned, logsumexp=logs), expected)
    out, logsumexp = hopper_attention(*given, turned, turned)
    assert error(out, expected) <= 1.1 * triton
    torch.testing.assert_close(logsumexp, logs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("filled", [0.0, 0.02])
def test_empty_slots_and_queries(filled):
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention

    given = inputs(64, 128, 512, torch.bfloat16, filled=filled)
    for kv in (given[2], given[4]):
        kv[:, 0] = float("nan")  # what an index of -1 must not read
    recent, selected = (indices.where(indices != 0, -1) for indices in (given[3], given[5]))
    given = (*given[:3], recent, given[4], selected, given[6])
    clean = (*given[:2], given[2].nan_to_num(), recent, given[4].nan_to_num(), selected, given[6])
    (out, _), expected = hopper_attention(*given, False, False), in_float64(*clean, False, False)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=1e-2)


def test_strided_inputs():
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention

    given = inputs(64, 128, 512, torch.bfloat16)
    apart = (given[0].transpose(1, 2).contiguous().transpose(1, 2), *given[1:])
    assert not apart[0].is_contiguous()
    assert torch.equal(hopper_attention(*apart, True, True)[0], hopper_attention(*given, True, True)[0])


@pytest.mark.parametrize("rotary", [16, 32, 256])
def test_other_rotary_dims(rotary):
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention
    from csa2_compiled.passes.kernels.sparse_attention import sparse_attention

    given = inputs(64, 128, 512, torch.bfloat16, rotary=rotary)
    expected = in_float64(*given, True, True)
    triton = error(sparse_attention(*given, rotate_q=True, rotate_output=True), expected)
    assert error(hopper_attention(*given, True, True)[0], expected) <= 1.1 * triton


@pytest.mark.parametrize("trains", [False, True])
def test_the_passes_choose_it_at_the_released_shapes(trains):
    torch.compiler.reset()
    cfg = replace(CSA2Config.v41_flash(), max_position_embeddings=65536)
    layer = CSA2Attention(cfg, 0, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(1, 128, cfg.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=trains)
    with torch.set_grad_enabled(trains), without_autograd_cache():
        compiled = compile_model(layer, dynamic=False)
        out = compiled(x, CSA2State()).hidden_states
        if trains:
            out.sum().backward()
    counts = {report.name: dict(report.fired) for report in compiled.manager.totals()}
    assert counts["attend" if trains else "kv_gather"]["csa2::hopper_attention"] == 1


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("programs", [1, 3, 7])
def test_few_programs_that_walk_over_many_items_give_the_same_bits(programs, turned):
    from csa2_compiled.passes.kernels.hopper_attention import hopper_attention

    given = inputs(128, 128, 512, torch.bfloat16, tokens=17, filled=0.3)
    for expected, got in zip(
        hopper_attention(*given, turned, turned),
        hopper_attention(*given, turned, turned, programs=programs),
        strict=True,
    ):
        assert torch.equal(got, expected)
