"""What the torch backend does beside being right: which prefixes it reads apart, and how."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixcache.kernels import torch_backend
from radixcache.kernels.torch_backend import TorchBackend
from tests.kernels.reference import error, make_step, run


def count_calls(monkeypatch, name: str) -> list[int]:
    """Counts the calls of a function of the backend's module; the rest of the test sees them."""
    counted, function = [0], vars(torch_backend)[name]

    def call(*args):
        counted[0] += 1
        return function(*args)

    monkeypatch.setattr(torch_backend, name, call)
    return counted


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lens", [[(1, 1100)], [(40, 1100)], [(1400, 0)], [(1, 1100), (9, 1024)]])
def test_a_long_prefix_in_consecutive_pages_is_read_in_place(monkeypatch, lens, page_size) -> None:
    step = make_step(14, lens, page_size=page_size, heads=(4, 2), consecutive=True)
    prefixes = count_calls(monkeypatch, "_attention_over_pages")
    assert error(step, run(step, TorchBackend(), scale=0.3), scale=0.3) < 2e-5
    assert prefixes[0] >= len(lens)
    prefixes[0] = 0
    for options in ({"window": 1050}, {"softcap": 4.0}):  # a window hides some of it
        assert (
            error(step, run(step, TorchBackend(), scale=0.3, **options), scale=0.3, **options)
            < 2e-5
        )
    assert prefixes[0] == 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("consecutive", [False, True])
def test_decodes_read_a_shared_prefix_once(monkeypatch, consecutive, page_size) -> None:
    share = 640 // page_size  # six times that is enough to be worth a call
    lens = [(1, 640 + 7 * i + 1) for i in range(5)] + [(1, 700), (3, 680)]
    step = make_step(15, lens, page_size=page_size, share=share, consecutive=consecutive)
    prefixes = count_calls(monkeypatch, "_attention_over_pages")
    assert error(step, run(step, TorchBackend(), scale=0.3), scale=0.3) < 2e-5
    assert prefixes[0] == 1
    few = make_step(15, lens[:4], page_size=page_size, share=share, consecutive=consecutive)
    assert error(few, run(few, TorchBackend(), scale=0.3), scale=0.3) < 2e-5
    assert prefixes[0] == 1


@pytest.mark.parametrize("seed", range(25))
def test_random_steps_over_long_prefixes(monkeypatch, seed) -> None:
    monkeypatch.setattr(torch_backend, "_MIN_SHARED", 16)
    monkeypatch.setattr(torch_backend, "_MIN_IN_PLACE", 24)
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 4, 8, 16]))
    share, consecutive = int(rng.integers(0, 64)) // page_size, bool(rng.integers(2))
    lens = [
        (1 if rng.random() < 0.7 else int(rng.integers(2, 300)), share * page_size + more)
        for more in rng.integers(120, size=rng.integers(1, 9)).tolist()
    ]
    lens.sort(key=lambda pair: pair[0] > 1)
    print(f"seed {seed}, page size {page_size}, shared {share}, {consecutive}, lens {lens}")
    step = make_step(seed, lens, page_size=page_size, share=share, consecutive=consecutive)
    prefixes = count_calls(monkeypatch, "_attention_over_pages")
    assert error(step, run(step, TorchBackend(), scale=0.25), scale=0.25) < 2e-5
    if share * page_size >= 16 and [queries for queries, _ in lens].count(1) > 1:
        assert prefixes[0]


def test_strided_inputs_are_accepted() -> None:
    step = make_step(10, [(1, 37), (20, 0), (1, 5), (9, 50)])
    expected = run(step, TorchBackend(), scale=0.3)
    step.query, step.key, step.value = (  # what transformers hands over: [1, heads, T, dim] views
        tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for tensor in (step.query, step.key, step.value)
    )
    assert torch.equal(run(step, TorchBackend(), scale=0.3), expected)
