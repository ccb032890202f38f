"""Run the kernels on a GPU where there is one, else under Triton's interpreter on CPU tensors.

The interpreter has to be chosen before anything imports Triton, and csa2_compiled does, through FlexAttention.
So where Triton came first (the whole test suite, on a machine with Triton and without a GPU) this directory is
skipped: run it by itself, or set TRITON_INTERPRET=1.
"""

import importlib.util
import os
import sys

import pytest
import torch


def _reason_to_skip() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        return None
    if "triton" in sys.modules:
        if sys.modules["triton"].knobs.runtime.interpret:
            return None
        return "Triton was imported without its interpreter; run tests/kernels by itself or set TRITON_INTERPRET=1"
    os.environ["TRITON_INTERPRET"] = "1"
    return None


REASON_TO_SKIP = _reason_to_skip()


class SkippedModule(pytest.Module):
    """A module that is not imported, since its imports need Triton."""

    def collect(self):
        pytest.skip(REASON_TO_SKIP or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if REASON_TO_SKIP else None


def _mend_interpreter() -> None:
    """Triton 3.6 makes an int of a one-element array, as loop bounds, which numpy refuses since 2.4."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index


if REASON_TO_SKIP is None and os.environ.get("TRITON_INTERPRET") == "1":
    _mend_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    import triton

    interprets = triton.knobs.runtime.interpret or not torch.cuda.is_available()
    return torch.device("cpu" if interprets else "cuda")
