"""Simulations run on one thread: several test processes share the cores, and rounding is the same everywhere."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
