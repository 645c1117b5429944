"""Fixtures that all tests share."""

import pytest
import torch

pytest_plugins = ["tests.bases"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test that draws from the global generator draws the same in every process and order."""
    torch.manual_seed(0)
