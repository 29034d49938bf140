"""Random schedules in CUDA graphs on the simulated GPU: see `gpu_schedules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cover import seeds
from tests.runtime.engine.gpu_schedules import make_models, run_schedule, simulating

pytest.importorskip("flashinfer", reason="`make test-gpu` brings it")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def gpu(folders) -> Iterator[None]:
    with simulating():
        yield


@seeds(0, 9)
def test_every_answer_is_as_without_a_cache_and_graphs_compute_what_single_kernels_do(
    folders, seed: int
) -> None:
    """Twenty schedules each, of which five are of hybrids."""
    seen = Counter[str]()
    for number in range(20 * seed, 20 * seed + 20):
        seen += run_schedule(folders, number)
    print(dict(seen))
    for what in ("mixed in graphs", "cascades in graphs", "preempted", "failures", "nothing left",
                 "accepted", "loaded", "states in graphs"):  # fmt: skip
        assert seen[what] > 2, f"{what}: {seen}"
