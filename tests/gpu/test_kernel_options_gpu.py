"""The shared memory that FlexAttention's kernels really take, against what the rule says."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from csa2_compiled.kernel_options import forward_tiles

KIB = 1024


@pytest.fixture
def compiled_kernels(monkeypatch):
    """(name, shared bytes) of every Triton kernel loaded meanwhile."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    seen: list[tuple[str, int]] = []
    original = compiler.CompiledKernel.__init__

    def record(self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.append((self.metadata.name, self.metadata.shared))

    monkeypatch.setattr(compiler.CompiledKernel, "__init__", record)
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        torch._dynamo.reset()
        yield seen


@pytest.mark.parametrize("limit", [99 * KIB, 163 * KIB, 227 * KIB])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (512, torch.bfloat16)])
def test_kernels_take_no_more_than_computed(compiled_kernels, head_dim, dtype, limit):
    tiles = forward_tiles(head_dim, dtype.itemsize, limit, query_rows=64)
    q = torch.randn(64, 1, 64, head_dim, dtype=dtype, device="cuda")
    kv = torch.randn(64, 1, 256, head_dim, dtype=dtype, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    got = compiled(q, kv, kv, kernel_options=tiles.as_kernel_options())
    assert got.isfinite().all()
    taken = [shared for name, shared in compiled_kernels if "flex" in name]
    print(f"computed {tiles}, taken {taken}")
    assert taken
    assert max(taken) <= tiles.shared_bytes <= limit
