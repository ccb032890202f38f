"""Session-wide settings of the tests."""

from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    # The tensors are tiny: more threads only wait for each other.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
