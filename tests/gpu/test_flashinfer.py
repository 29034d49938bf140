"""Whether FlashInfer runs, and what becomes of the rest if it does not."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.models import engine_on, random_llama, run_all
from tests.gpu.place import LAYER, Place, problem_of_flashinfer


def test_flashinfer_runs(place: Place) -> None:
    if isinstance(place.problem, ModuleNotFoundError):
        pytest.skip(str(place.problem))
    if place.problem is not None:
        raise place.problem  # with its traceback, which says where


def test_a_broken_flashinfer_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    place.backend(LAYER)
    backend = sys.modules["radixcache.kernels.flashinfer.attention"]
    monkeypatch.setattr(backend, "FlashInferAttention", breaks)
    assert "libcudart.so.13" in str(problem_of_flashinfer(place))


def test_without_flashinfer_engines_run_and_its_own_tests_are_skipped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flashinfer", "radixcache.kernels.flashinfer.attention"):
        monkeypatch.setitem(sys.modules, name, None)
    without = replace(place, problem=problem_of_flashinfer(place))
    assert isinstance(without.problem, ModuleNotFoundError)
    with pytest.raises(pytest.skip.Exception, match="FlashInfer does not run here"):
        without.backend(LAYER)
    with engine_on(without, random_llama(place, place.clear), num_tokens=512) as engine:
        (request,) = run_all(engine, [np.arange(20, dtype=np.int32)], 3)
        assert len(request.sequences[0].generated) == 3
        assert "FlashInfer" not in engine.model.placement
