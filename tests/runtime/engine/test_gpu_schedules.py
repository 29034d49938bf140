"""Random schedules in CUDA graphs on the simulated GPU: see `gpu_schedules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixcache import SamplingParams
from radixcache.runtime.engine.pooling_inputs import POOLED
from tests.helpers.cover import seeds
from tests.helpers.engines import finish, generated, make_engine, prompts
from tests.helpers.pooling_models import judging_model, rows
from tests.runtime.engine.gpu_schedules import make_models, run_schedule, simulating

pytest.importorskip("flashinfer", reason="`make test-gpu` brings it")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def gpu(folders) -> Iterator[None]:
    with simulating():
        yield


def test_rows_come_beside_answers_that_are_launched_ahead(folders, tmp_path):
    given, params = prompts(), SamplingParams(temperature=0, max_tokens=9)
    path = judging_model(tmp_path)
    expected, said = rows(path, given), list[Any]()
    for pages in (512, 60):
        engine = make_engine(path, page_size=4, num_pages=pages, max_num_batched_tokens=24)
        assert engine.overlap
        pairs = [
            (engine.add_request(prompt, POOLED, pools=True), engine.add_request(prompt, params))
            for prompt in given * 2
        ]
        finish(engine)
        for (request, _), row in zip(pairs, expected * 2, strict=True):
            assert request.pooled is not None and np.abs(request.pooled - row).max() < 1e-4
        said.append(generated([answer for _, answer in pairs]))
    assert said[0] == said[1]


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
