"""One torch thread for tests of models so small that a second one only waits, badly so on busy cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
