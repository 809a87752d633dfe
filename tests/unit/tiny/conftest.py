"""Of all tests of the tiny policy."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny operations only lose time to threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
