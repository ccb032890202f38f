"""RoPE: frequencies and rotations against float64 formulas, the two bodies bit for bit, the shared table."""

import cmath
import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import Tensor

from csa2_compiled import ops
from csa2_compiled.config import CSA2Config, RotaryParameters, YarnScaling
from csa2_compiled.rope import (
    RotaryEmbedding,
    apply_rope_body,
    apply_rope_real_body,
    rope_frequencies,
    rotary_table,
)

YARN = YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
# (rotary dim, base, YaRN): the released window and compressed layers, then ramps at the ends of the channels.
FREQUENCIES = {
    "window": (64, 10000.0, None),
    "compressed": (64, 160000.0, YARN),
    "small": (8, 10000.0, None),
    "one pair": (2, 10000.0, None),
    "factor 1": (
        32,
        10000.0,
        YarnScaling(factor=1, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096),
    ),
    "short": (
        32,
        10000.0,
        YarnScaling(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=64),
    ),
    "step": (
        32,
        10000.0,
        YarnScaling(factor=40, beta_fast=1, beta_slow=1, original_max_position_embeddings=3000),
    ),
    "ramp past the end": (
        32,
        10000.0,
        YarnScaling(factor=8, beta_fast=1 << 20, beta_slow=1, original_max_position_embeddings=1 << 30),
    ),
    "long": (
        32,
        100.0,
        YarnScaling(factor=8, beta_fast=4, beta_slow=2, original_max_position_embeddings=1 << 30),
    ),
}
SHAPES = {
    f"{batch}x{tokens}{f'x{heads}' if heads else ''}x{dim}, {pairs} pairs": (batch, tokens, heads, dim, pairs)
    for (batch, tokens, heads), (dim, pairs) in itertools.product(
        [(1, 1, 0), (1, 1, 1), (1, 1, 5), (2, 1, 0), (1, 7, 0), (2, 5, 3), (3, 16, 4), (1, 130, 2), (2, 0, 0)],
        [(2, 1), (6, 3), (10, 3), (8, 4), (12, 4), (24, 8), (22, 11), (32, 16), (48, 17), (64, 24), (96, 32)],
    )
}

all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
both_ways = pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
released = RotaryParameters(160000.0, YARN)


def exact_frequencies(rotary_dim: int, base: float, yarn: YarnScaling | None) -> list[float]:
    """SPEC section 2 in float64, by its other reading: a channel's place on the ramp by its number."""
    plain = [math.exp(-2 * j / rotary_dim * math.log(base)) for j in range(rotary_dim // 2)]
    if yarn is None:
        return plain
    length = yarn.original_max_position_embeddings

    def channel(turns: float) -> float:  # where a frequency turns so often over the original length
        return rotary_dim / 2 * math.log(length / (turns * math.tau), base)

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), rotary_dim - 1)
    width = max(high - low, 0.001)
    ramps = [min(max((j - low) / width, 0.0), 1.0) for j in range(rotary_dim // 2)]
    return [f * (ramp / yarn.factor + 1 - ramp) for f, ramp in zip(plain, ramps, strict=True)]


@pytest.mark.parametrize("arguments", FREQUENCIES.values(), ids=FREQUENCIES.keys())
def test_frequencies_follow_the_formula(arguments: tuple[int, float, YarnScaling | None]):
    frequencies = rope_frequencies(*arguments)
    assert frequencies.dtype == torch.float32
    expected = torch.tensor(exact_frequencies(*arguments), dtype=torch.float64)
    # An exponent up to ln(base), rounded, its power, and the ramp's four roundings.
    bound = (math.log(arguments[1]) + 8) * 2**-24
    assert ((frequencies.double() / expected - 1).abs() <= bound).all()


def test_yarn_slows_only_the_slow_frequencies():
    plain, scaled = rope_frequencies(64, 160000.0), rope_frequencies(64, 160000.0, YARN)
    turns = plain * YARN.original_max_position_embeddings / math.tau
    kept, divided = turns > 2 * YARN.beta_fast, turns < YARN.beta_slow / 2
    assert kept.sum() >= 5
    assert divided.sum() >= 5
    assert torch.equal(scaled[kept], plain[kept])
    torch.testing.assert_close(scaled[divided], plain[divided] / YARN.factor, rtol=2**-23, atol=0)
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize("parameters", [released, RotaryParameters(10000.0, None)], ids=["yarn", "plain"])
def test_the_table_holds_cosine_and_sine_of_float32_angles(parameters: RotaryParameters):
    length = 70000
    table = rotary_table(64, parameters, length, torch.device("cpu"))
    assert table.dtype == torch.float32
    assert table.shape == (length, 32, 2)
    frequencies = rope_frequencies(64, parameters.base, parameters.yarn).double()
    exact = torch.arange(length, dtype=torch.float64).unsqueeze(-1) * frequencies
    angles = exact.float().double()  # the angle is rounded to float32, as in the released code
    expected = torch.stack([angles.cos(), angles.sin()], dim=-1)
    assert (table.double() - expected).abs().max() <= 2**-23
    # Against angles that are not rounded, with float64 frequencies: at most two roundings of the angle.
    frequencies = torch.tensor(exact_frequencies(64, parameters.base, parameters.yarn), dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(-1) * frequencies
    error = (table.double() - torch.stack([angles.cos(), angles.sin()], dim=-1)).abs().amax(-1)
    assert (error <= angles * ((math.log(parameters.base) + 8) * 2**-24) + 2**-23).all()


def test_a_position_is_looked_up_also_behind_the_original_length():
    rotary = RotaryEmbedding(8, released, 200000)
    positions = torch.tensor([[0, 1, 65535], [65536, 131072, 199999]])
    rotations = rotary(positions)
    assert rotations.shape == (2, 3, 4, 2)
    assert torch.equal(rotations[0, 0], torch.tensor([[1.0, 0.0]] * 4))
    frequencies = rope_frequencies(8, 160000.0, YARN).tolist()
    for b, s, j in itertools.product(range(2), range(3), range(4)):
        angle = float(torch.tensor(positions[b, s].item() * frequencies[j], dtype=torch.float32))
        assert rotations[b, s, j].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=2**-23)


def random_rotations(batch: int, tokens: int, pairs: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    angles = 6.3 * torch.rand(batch, tokens, pairs, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dim, pairs = shape
    x = torch.randn(*(s for s in (batch, tokens, heads, dim) if s or s is tokens), generator=seeded())
    return x.to(dtype), random_rotations(batch, tokens, pairs)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@all_dtypes
@both_ways
def test_the_bodies_agree_bit_for_bit(dtype: torch.dtype, inverse: bool):
    different = []
    for name, shape in SHAPES.items():
        x, rotations = inputs(shape, dtype)
        for turn in (rotations, rotations[:1]):
            complex_result = apply_rope_body(x, turn, inverse)
            real_result = apply_rope_real_body(x, turn, inverse)
            assert complex_result.shape == real_result.shape == x.shape
            assert complex_result.dtype == real_result.dtype == dtype
            if not torch.equal(bits(complex_result), bits(real_result)):
                different.append(name)
    assert not different


@both_ways
@pytest.mark.parametrize("dim", [24, 32], ids=["12 pairs", "16 pairs"])
def test_the_compiled_real_body_rounds_like_the_op(inverse: bool, dim: int):
    x = torch.randn(2, 9, 3, dim, generator=seeded())
    rotations = random_rotations(2, 9, dim // 2)
    compiled = torch.compile(lambda x, turn: apply_rope_real_body(x, turn, inverse))
    assert torch.equal(bits(compiled(x, rotations)), bits(ops.apply_rope(x, rotations, inverse)))


@both_ways
def test_the_op_is_right_from_the_first_compiled_call_on(inverse: bool):
    """The first call runs inside the compiler, where PyTorch forgets the lazy conj() of complex tensors."""
    x = torch.randn(2, 5, 8, generator=seeded()).requires_grad_()
    rotations = random_rotations(2, 5, 4)
    compiled = torch.compile(lambda x: ops.apply_rope(x, rotations, inverse), backend="aot_eager")
    upstream = torch.randn(2, 5, 8, generator=seeded())
    for _ in range(2):
        result = compiled(x)
        assert torch.equal(result, ops.apply_rope(x, rotations, inverse))
        (gradient,) = torch.autograd.grad(result, x, upstream)
        assert torch.equal(gradient, ops.apply_rope(upstream, rotations, not inverse))


@all_dtypes
@both_ways
@pytest.mark.parametrize("shape", [(2, 5, 0, 10, 3), (2, 5, 3, 10, 4), (1, 3, 2, 8, 4)], ids=str)
def test_rotation_is_a_complex_product(dtype: torch.dtype, inverse: bool, shape: tuple[int, ...]):
    x, rotations = inputs(shape, dtype)
    result = ops.apply_rope(x, rotations, inverse)
    assert result.dtype == dtype
    pairs, heads = shape[4], shape[2] or 1
    assert torch.equal(result[..., : -2 * pairs], x[..., : -2 * pairs])  # the first channels stay
    before = x.reshape(*shape[:2], heads, -1)[..., -2 * pairs :].tolist()
    after = result.reshape(*shape[:2], heads, -1)[..., -2 * pairs :].tolist()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-22
    for b, s, h, j in itertools.product(range(shape[0]), range(shape[1]), range(heads), range(pairs)):
        turn = complex(*rotations[b, s, j].tolist())
        value = complex(*before[b][s][h][2 * j : 2 * j + 2]) * (turn.conjugate() if inverse else turn)
        assert abs(complex(*after[b][s][h][2 * j : 2 * j + 2]) - value) <= 1.5 * tolerance * abs(value)


@all_dtypes
def test_the_inverse_undoes(dtype: torch.dtype):
    rotary = RotaryEmbedding(32, released, 1 << 17)
    rotations = rotary(torch.tensor([[0, 1, 1000, 65535, 131071]]))
    x = torch.randn(2, 5, 3, 48, generator=seeded()).to(dtype)
    for there, back in ((False, True), (True, False)):
        turned = ops.apply_rope(x, rotations, there)
        assert not torch.equal(turned[:, 1:], x[:, 1:])
        assert torch.equal(turned[:, 0], x[:, 0])
        returned = ops.apply_rope(turned, rotations, back)
        # Two roundings of a pair's length each way; cosine and sine are rounded as well.
        length = x.double()[..., 16:].unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True)
        unit = 2**-8 if dtype == torch.bfloat16 else 2**-24
        error = (returned.double() - x.double()).abs()[..., 16:].unflatten(-1, (-1, 2))
        assert (error <= (2 * unit + 6 * 2**-24) * length).all()


def test_rotation_keeps_relative_positions():
    rotary = RotaryEmbedding(16, RotaryParameters(10000.0, None), 256)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=seeded()).unbind(0)
    products = []
    for shift in (0, 100, 200):
        turned = [ops.apply_rope(x, rotary(torch.tensor([[p + shift]])), False) for x, p in ((q, 7), (k, 3))]
        products.append(float((turned[0] * turned[1]).sum()))
    assert products[1:] == pytest.approx(products[:1] * 2, rel=1e-4)
    pair = complex(*q[0, 0, :2].tolist()) * cmath.exp(7j)
    turned = ops.apply_rope(q, rotary(torch.tensor([[7]])), False)
    assert complex(*turned[0, 0, :2].tolist()) == pytest.approx(pair, rel=1e-6)


def test_modules_that_rotate_alike_share_a_table():
    first, second = RotaryEmbedding(8, released, 100), RotaryEmbedding(8, RotaryParameters(160000.0, YARN), 100)
    assert first.table is second.table
    others = [
        RotaryEmbedding(16, released, 100),
        RotaryEmbedding(8, RotaryParameters(160000.0, None), 100),
        RotaryEmbedding(8, RotaryParameters(10000.0, YARN), 100),
        RotaryEmbedding(8, released, 101),
    ]
    assert len({id(module.table) for module in [first, *others]}) == 5


def test_a_model_has_a_table_for_each_kind_of_layer():
    cfg = CSA2Config.tiny()
    kinds = {cfg.rotary_parameters(i) for i in range(cfg.num_hidden_layers)}
    modules = [
        RotaryEmbedding(cfg.qk_rope_head_dim, cfg.rotary_parameters(i), 64) for i in range(cfg.num_hidden_layers)
    ]
    assert len({module.table.data_ptr() for module in modules}) == len(kinds) == 2


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_leaves_the_table_shared_and_float32(cast: torch.dtype):
    first, second = RotaryEmbedding(8, released, 100), RotaryEmbedding(8, released, 100)
    before = first.table
    model = torch.nn.Sequential(first, torch.nn.Linear(2, 2)).to(cast)
    assert model[1].weight.dtype == cast
    assert first.table is second.table is before
    assert first.table.dtype == torch.float32


def test_moving_to_meta_and_back():
    first, second = RotaryEmbedding(8, released, 100), RotaryEmbedding(8, released, 100)
    expected = first.table.clone()
    first.to("meta")
    assert first.table.device.type == "meta"
    assert first.table.shape == expected.shape
    assert first.table.dtype == torch.float32
    assert second.table.device.type == "cpu"  # its table stays where it is
    second.to(device="meta", dtype=torch.bfloat16)
    assert first.table is second.table
    first.to_empty(device="cpu")
    assert torch.equal(first.table, expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_construction_under_a_default_device(explicit: bool):
    expected = RotaryEmbedding(8, released, 100).table.clone()
    gc.collect()
    with torch.device("meta"):
        rotary = RotaryEmbedding(8, released, 100, device="cpu" if explicit else None)
        assert rotary.table.device.type == ("cpu" if explicit else "meta")
        rotary.to_empty(device="cpu")
    assert torch.equal(rotary.table, expected)


def test_the_table_is_no_part_of_the_state_and_gets_no_gradient():
    rotary = RotaryEmbedding(8, released, 100)
    assert not rotary.state_dict()
    assert not list(rotary.parameters())
    assert not rotary.table.requires_grad


def test_the_table_dies_with_its_last_module():
    parameters = RotaryParameters(12345.0, None)  # of this test alone
    first, second = RotaryEmbedding(8, parameters, 100), RotaryEmbedding(8, parameters, 100)
    table = weakref.ref(first.table)
    first(torch.tensor([[1, 2]]))
    del first
    gc.collect()
    assert table() is second.table
    second.to("meta")
    gc.collect()
    assert table() is None
    again = RotaryEmbedding(8, parameters, 100)
    assert again.table.device.type == "cpu"


def test_a_copied_module_rotates_alike():
    rotary = RotaryEmbedding(8, released, 100)
    twin = copy.deepcopy(rotary)
    positions = torch.tensor([[3, 99]])
    assert torch.equal(twin(positions), rotary(positions))
    assert twin.float().table is rotary.table  # shared again once it is moved or cast


def test_tables_of_fake_and_real_modules_are_kept_apart():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    parameters = RotaryParameters(54321.0, None)
    real = RotaryEmbedding(8, parameters, 100)
    with FakeTensorMode():
        fake = RotaryEmbedding(8, parameters, 100)
    assert isinstance(fake.table, FakeTensor)
    assert not isinstance(real.table, FakeTensor)
    assert not isinstance(RotaryEmbedding(8, parameters, 100).table, FakeTensor)
    del real
    gc.collect()
    assert not isinstance(RotaryEmbedding(8, parameters, 100).table, FakeTensor)
