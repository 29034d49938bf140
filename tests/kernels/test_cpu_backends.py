"""Every backend that runs on a CPU against a naive float64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import AttentionBackend, PagedBatch, SharedPrefix
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.library import problem
from radixcache.kernels.torch.attention import TorchAttention
from tests.kernels.backends import SHAPES, assert_written_pages_stay, attend
from tests.kernels.reference import (
    assert_only_rows_that_see_it_are_spoilt,
    behind_windows,
    error,
    inputs_of,
    make_step,
    random_step,
    run,
    with_images,
)

BACKENDS = [TorchAttention, NativeAttention]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=BACKENDS, ids=["torch", "native"])
def backend(request) -> AttentionBackend:
    if request.param is NativeAttention and problem():
        pytest.skip(str(problem()))
    return request.param()


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(25, 99))]
)
def test_output_equals_the_reference_and_unwritten_slots_never_leak(backend, seed) -> None:
    step, options = random_step(seed)
    assert step.k_pages.isnan().any()
    assert error(step, run(step, backend, **options), **options) < TOLERANCE[step.query.dtype]


@pytest.mark.parametrize("seed", range(12))
def test_a_table_of_one_window_gives_the_same(backend, seed) -> None:
    window = [1, 6, 40, 300, 700][seed % 5]
    step, options = random_step(seed, most=2000)
    options["window"] = window
    whole, short = (run(one, backend, **options) for one in (step, behind_windows(step, window)))
    if isinstance(backend, NativeAttention):
        assert torch.equal(short, whole), "other bits"
    assert error(step, short, **options) < TOLERANCE[step.query.dtype]


@pytest.mark.parametrize("window", [2, 11, 128, 700])
def test_rows_see_none_of_the_tokens_before_a_table(backend, window) -> None:
    """A prompt that resumes without a saved state has an empty table, wherever it begins."""
    first = np.array([0, 255, 256, 262, 301, 383, 511, 517, 620, 999], np.int32)
    lens = [([21, 1, 300][at % 3], [0, 0, 5, 200][at % 4]) for at in range(len(first))]
    step = make_step(window, lens, page_size=4)
    step = replace(step, batch=replace(step.batch, first=first))
    options = {"scale": 0.3, "window": window}
    assert error(step, run(step, backend, **options), **options) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("seed", range(16))
def test_rows_of_an_image_see_each_other_both_ways(backend, seed) -> None:
    step, options = random_step(seed, dtypes=(torch.float32,))
    step = with_images(seed, step)
    plain = run(step, backend, **options)
    assert error(step, plain, **options) < 2e-5  # layers of another kind
    options["both_ways"] = True
    found = run(step, backend, **options)
    assert error(step, found, **options) < 2e-5
    assert step.batch.ahead is not None
    assert torch.equal(found, plain) is not bool(step.batch.ahead.any())
    if options["window"] is not None:
        short = run(behind_windows(step, options["window"]), backend, **options)
        assert error(step, short, **options) < 2e-5


def test_one_plan_serves_layers_of_different_windows_and_pages(backend) -> None:
    step, other = (make_step(6, SHAPES["mixed"], dim=dim) for dim in (16, 32))
    plan = backend.plan(step.batch)
    for layer in (step, other, step):
        for window in (None, 8, 30, None):
            copied = replace(layer, k_pages=layer.k_pages.clone(), v_pages=layer.v_pages.clone())
            out = plan.run(inputs_of(copied, scale=0.3, window=window))
            assert error(layer, out, scale=0.3, window=window) < 2e-5


def test_a_layer_attends_over_what_another_has_written(backend) -> None:
    step = make_step(8, SHAPES["mixed"], page_size=4)
    assert_written_pages_stay(step, backend.plan(step.batch))


def test_new_tokens_are_written_and_nothing_else(backend) -> None:
    step = make_step(8, SHAPES["mixed"], page_size=4)
    k_pages, v_pages = step.k_pages.clone(), step.v_pages.clone()
    copied = replace(step, k_pages=k_pages, v_pages=v_pages)
    backend.plan(step.batch).run(inputs_of(copied, scale=0.3))
    slots = torch.from_numpy(step.batch.slots())
    for before, after, new in (
        (step.k_pages, k_pages, step.key),
        (step.v_pages, v_pages, step.value),
    ):
        before = before.clone()
        before.flatten(0, 1)[slots] = new
        torch.testing.assert_close(after, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(24))
def test_only_rows_that_see_a_token_with_no_finite_numbers_have_none(backend, seed) -> None:
    assert_only_rows_that_see_it_are_spoilt(attend, backend, seed, 1200)


def test_misuse_is_refused(backend) -> None:
    step = make_step(13, [(3, 0)])
    batch = step.batch
    short = PagedBatch(
        batch.qo_indptr, batch.kv_indptr, batch.kv_indices, np.array([2], np.int32), 16
    )
    with pytest.raises(ValueError, match="the last page of a sequence"):
        backend.plan(replace(batch, shared=(SharedPrefix(0, 1, 1),)))
    with pytest.raises(ValueError, match="more new tokens"):
        backend.plan(short)
