"""The layout rule: explicit requests, what the calls can and cannot do, and the cost model's threshold."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from csa2_compiled import CSA2Attention, CSA2Config
from csa2_compiled.masks import AttentionLayout, LayoutChoice, choose_layout
from csa2_compiled.masks.layout import KEY_BLOCK, SLOTS_PER_DENSE_PAIR, pairs_per_query
from csa2_compiled.sparse_attention import layout_for

AUTO, DENSE, SLOTS, PLAIN = (
    AttentionLayout.AUTO,
    AttentionLayout.DENSE,
    AttentionLayout.SLOTS,
    AttentionLayout.PLAIN,
)
RELEASED = {"num_tokens": 4096, "num_compressed": 4096, "topk": 512, "window": 128}


@pytest.mark.parametrize("requested", [DENSE, SLOTS, PLAIN])
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("flex_takes_dtype", [False, True])
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("num_compressed", [0, 4096])
def test_an_explicit_request_is_followed(requested, needs_gradient, flex_takes_dtype, compiling, num_compressed):
    shape = {**RELEASED, "num_compressed": num_compressed}
    choice = choose_layout(
        requested,
        **shape,
        needs_gradient=needs_gradient,
        flex_takes_dtype=flex_takes_dtype,
        compiling=compiling,
    )
    assert choice == LayoutChoice(requested, "requested")


@pytest.mark.parametrize(
    ("obstacle", "word"),
    [
        ({"needs_gradient": True}, "gradient"),
        ({"flex_takes_dtype": False}, "dtype"),
        ({"compiling": False}, "eager"),
        ({"needs_gradient": True, "flex_takes_dtype": False, "compiling": False}, "gradient"),
    ],
    ids=str,
)
def test_what_flex_attention_cannot_serve_runs_plain(obstacle, word):
    choice = choose_layout(AUTO, **RELEASED, **obstacle)
    assert choice.layout is PLAIN
    assert word in choice.reason


@pytest.mark.parametrize(
    ("num_compressed", "topk", "layout"),
    [
        (4096, 512, SLOTS),  # ratio 1
        (2048, 512, SLOTS),  # ratio 2
        (0, 0, SLOTS),  # a window layer
    ],
)
def test_released_shapes(num_compressed, topk, layout):
    choice = choose_layout(AUTO, 4096, num_compressed, topk, window=128)
    assert choice.layout is layout
    dense, slots = pairs_per_query(num_compressed, topk, 128)
    assert f"{dense:.0f}" in choice.reason
    assert f"{slots:.0f}" in choice.reason


@pytest.mark.parametrize(("window", "topk"), [(128, 512), (8, 4), (100, 27), (100, 28)])
def test_threshold_of_the_cost_model(window, topk):
    """The first number of compressed positions from which dense costs more than slots on a CPU, and the one before."""
    slot_blocks = -(-(1 + window + topk) // KEY_BLOCK)
    slots = slot_blocks * KEY_BLOCK * SLOTS_PER_DENSE_PAIR["cpu"]
    over = next(t for t in range(topk, 8192) if window + KEY_BLOCK + t / 2 > slots)
    assert over > topk
    assert pairs_per_query(over, topk, window, "cpu") == (window + KEY_BLOCK + over / 2, slots)
    assert choose_layout(AUTO, 8192, over, topk, window, "cpu").layout is SLOTS
    assert choose_layout(AUTO, 8192, over - 1, topk, window, "cpu").layout is DENSE
    # On CUDA a slot costs less than a dense pair.
    assert choose_layout(AUTO, 8192, topk, topk, window).layout is SLOTS


def test_threshold_lies_at_equal_cost():
    # On a CPU 5 blocks of slots cost 5 * 128 * 2.3 = 1472 pairs, a whole number.
    window, topk = 128, 384
    compressed = 2 * (1472 - window - KEY_BLOCK)
    dense, slots = pairs_per_query(compressed, topk, window, "cpu")
    assert dense == pytest.approx(slots)
    assert choose_layout(AUTO, 4096, compressed - 1, topk, window, "cpu").layout is DENSE
    assert choose_layout(AUTO, 4096, compressed + 1, topk, window, "cpu").layout is SLOTS


class Traced:
    """A function that asks for the layout while it is traced, and what it was told."""

    def __init__(self, dynamic: bool, topk: int = 512, window: int = 128) -> None:
        self.choices: list[LayoutChoice] = []
        self.counter = CompileCounterWithBackend("eager")
        torch._dynamo.reset()

        def ask(x: Tensor) -> Tensor:
            choice = choose_layout(
                AUTO,
                num_tokens=x.shape[1],
                num_compressed=x.shape[1] // 2,
                topk=topk,
                window=window,
                device_type="cpu",
                compiling=torch.compiler.is_compiling(),
            )
            # The graph remembers the choice as a number that it adds.
            return x + list(AttentionLayout).index(choice.layout)

        self.ask = torch.compile(ask, dynamic=dynamic, backend=self.counter, fullgraph=True)

    def layout(self, tokens: int) -> AttentionLayout:
        added = self.ask(torch.zeros(1, tokens)).unique().tolist()
        return list(AttentionLayout)[int(*added)]


def test_a_symbolic_length_goes_to_slots_in_one_graph():
    traced = Traced(dynamic=True)
    assert [traced.layout(tokens) for tokens in (64, 600, 4096)] == [SLOTS] * 3
    assert traced.counter.frame_count == 1


def test_a_static_length_goes_by_cost():
    traced = Traced(dynamic=False)
    assert traced.layout(64) is DENSE
    assert traced.layout(16384) is SLOTS
    assert traced.counter.frame_count == 2


def test_a_symbolic_context_of_a_static_query_goes_to_slots_in_one_graph():
    """One decoded token over a growing context: S is static, T and with it min(K, T) are not."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True)
    def ask(token: Tensor, context: Tensor) -> tuple[Tensor, str]:
        compressed = context.shape[1]
        choice = choose_layout(AUTO, token.shape[1], compressed, torch.sym_min(512, compressed), window=128)
        return token + context.sum(), choice.layout.value

    for compressed in (3, 600, 4096):
        context = torch.zeros(1, compressed)
        torch._dynamo.mark_dynamic(context, 1)
        assert ask(torch.zeros(1, 1), context)[1] == "slots"
    assert counter.frame_count == 1


def shape_of(dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    return torch.empty(1, 4096, 64, 512, dtype=dtype, device="meta", requires_grad=requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_eager_call_runs_plain(dtype):
    choice = layout_for(shape_of(dtype), 4096, 512, 128, AUTO)
    assert choice.layout is PLAIN
    assert ("dtype" if dtype == torch.float64 else "eager") in choice.reason


def test_gradients_are_seen_only_where_they_are_recorded():
    q = shape_of(torch.float32)
    assert "gradient" in layout_for(q, 4096, 512, 128, AUTO, trains=True).reason
    with torch.no_grad():
        assert "eager" in layout_for(q, 4096, 512, 128, AUTO, trains=True).reason


@pytest.mark.parametrize("trained", ["wq_b", "wkv", "attn_sink"])
def test_a_layer_trained_in_part_takes_the_plain_layout(trained, monkeypatch):
    layer = CSA2Attention(CSA2Config.tiny(), 0)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    reasons = []
    choose = layer.choose_layout
    monkeypatch.setattr(layer, "choose_layout", lambda *a: reasons.append(choose(*a).reason) or choose(*a))
    layer(torch.randn(1, 8, 128)).hidden_states.sum().backward()
    assert "gradients" in reasons[0]


def test_layouts_are_named_by_strings():
    assert [AttentionLayout(name) for name in ("auto", "dense", "slots", "plain")] == list(AttentionLayout)
