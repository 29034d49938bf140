"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test may set torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
