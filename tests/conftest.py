"""Session-wide settings of the tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    # The tensors are tiny: more threads only wait for each other.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
