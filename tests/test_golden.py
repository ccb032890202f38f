"""The released code's outputs, eager and compiled, in every layout, through the public layer."""

import pytest
import torch
from golden_files import FILES, check_prefill, load_golden, run_prefill

from csa2_compiled import AttentionLayout, compile_model

FLEX_LAYOUTS = (AttentionLayout.DENSE, AttentionLayout.SLOTS)


@pytest.mark.parametrize("layout", [*FLEX_LAYOUTS, AttentionLayout.PLAIN])
@pytest.mark.parametrize("name", FILES)
def test_eager_prefill_equals_the_released_code(name, layout):
    golden = load_golden(name)
    model = golden.model(layout)
    results = run_prefill(golden, model)
    check_prefill(golden, results, moved_keys=0.0)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("layout", FLEX_LAYOUTS)
@pytest.mark.parametrize("name", FILES)
def test_compiled_prefill_equals_the_released_code(name, layout):
    golden = load_golden(name)
    model = golden.model(layout)
    compiled = compile_model(model, regional=True)
    results = run_prefill(golden, model, compiled.run_block)
    # Bit-equal when measured (torch 2.13, AVX-512); another vector width sums norms in another order.
    check_prefill(golden, results, moved_keys=1e-3)
