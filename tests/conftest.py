"""Settings of the whole test run, and of the processes that tests start."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kernels.gpu import Gpu

# Two test processes share two cores, and threads that share a busy core wait for each other more
# than they work. Both are read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# libgomp's threads spin while they wait, which takes up to 25 times as long as sleeping.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# hypothesis would import trio for its plugin, and look through all memory for its random state.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

if "TEST_THREADS" in os.environ:  # more than there are cores: not by OMP_NUM_THREADS
    import torch

    torch.set_num_threads(int(os.environ["TEST_THREADS"]))

# Fixtures, and what a test module imports, that make a simulated GPU.
_MAKES_A_GPU = {"gpu", "Place", "simulated_gpu", "pinning_cuda", "simulating"}

# What is imported stays: to look through it for garbage, again and again, takes a second or two.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Mark what runs on a simulated GPU, by FlashInfer's own Python where that is here."""
    for item in items:
        names = {*getattr(item, "fixturenames", ()), *vars(getattr(item, "module", item))}
        if names & _MAKES_A_GPU:
            item.add_marker("simulated_gpu")


def pytest_collection_finish(session: pytest.Session):
    gc.freeze()
    gc.enable()
    if session.items:  # where tests run, not where xdist hands them out
        from tests.helpers.forks import open_nursery

        open_nursery()


def pytest_sessionfinish():
    from tests.helpers.forks import close_nursery

    close_nursery()


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are bytes."""
    from tests.helpers.models import tiny_model

    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    from tests.kernels.gpu import simulated_gpu

    with simulated_gpu() as gpu:
        yield gpu
