"""Launching kernels so that a compiler can see them."""
# mypy: disable-error-code="import-not-found"

from typing import Any

import torch
import triton


def traceable(kernel: Any) -> Any:
    """The kernel, for ``traceable(kernel)[grid](...)``: while a graph is traced its launch becomes a node of it."""
    return kernel if triton.knobs.runtime.interpret else torch.library.wrap_triton(kernel)
