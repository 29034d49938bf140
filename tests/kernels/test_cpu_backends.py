"""Every backend that runs on a CPU against a naive float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import problem
from radixcache.kernels.torch_backend import TorchBackend
from tests.kernels.reference import error, make_step, run

# (new tokens, cached tokens) of each sequence
SHAPES = {
    "fresh": [(7, 0), (33, 0), (1, 0), (16, 0)],
    "suffix": [(5, 40), (17, 3), (2, 16), (31, 33)],
    "decode": [(1, 1), (1, 40), (1, 15), (1, 16), (1, 200), (1, 63), (1, 60)],
    "mixed": [(1, 37), (20, 0), (1, 5), (9, 50), (1, 120), (3, 31)],
}
BACKENDS = [TorchBackend, NativeBackend]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=BACKENDS, ids=["torch", "native"])
def backend(request) -> AttentionBackend:
    if request.param is NativeBackend and problem():
        pytest.skip(str(problem()))
    return request.param()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"window": 1000}, {"softcap": 5.0}, {"window": 20, "softcap": 5.0}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_equals_the_reference_and_unwritten_slots_never_leak(
    backend, page_size, shape, options, dtype
) -> None:
    step = make_step(7, SHAPES[shape], page_size=page_size, dtype=dtype)
    assert step.k_pages.isnan().any()
    out = run(step, backend, scale=0.3, **options)
    assert error(step, out, scale=0.3, **options) < TOLERANCE[dtype]


SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0, 40.0, -40.0, 1.0, 0.0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 5.0}], ids=str)
def test_a_sink_takes_its_share(backend, shape, options) -> None:
    step = make_step(9, SHAPES[shape], page_size=4)
    options = {"scale": 0.3, "sinks": SINKS, **options}
    assert error(step, run(step, backend, **options), **options) < 2e-5


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("dim", [16, 64])
def test_query_heads_share_kv_heads_in_any_group_size(backend, heads, dim) -> None:
    step = make_step(11, SHAPES["mixed"], page_size=4, heads=heads, dim=dim)
    assert error(step, run(step, backend, scale=dim**-0.5), scale=dim**-0.5) < 2e-5


@pytest.mark.parametrize("seed", range(25))
def test_random_steps_with_shared_prefixes(backend, seed) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 4, 8, 16]))
    share = int(rng.integers(0, 5))
    lens = [
        (
            1 if rng.random() < 0.7 else int(rng.integers(2, 40)),
            share * page_size + int(rng.integers(90)),
        )
        for _ in range(rng.integers(1, 9))
    ]
    options: dict[str, Any] = {
        "scale": 0.25,
        "window": [None, 1, 13, 64][rng.integers(4)],
        "softcap": [None, None, 4.0][rng.integers(3)],
    }
    print(f"seed {seed}, page size {page_size}, shared pages {share}, lens {lens}, {options}")
    step = make_step(seed, lens, page_size=page_size, share=share)
    assert error(step, run(step, backend, **options), **options) < 2e-5


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("lens", [(600, 0), (300, 900)], ids=["fresh", "suffix"])
def test_long_prefills_are_cut_into_blocks(backend, lens, window) -> None:
    step = make_step(3, [lens], heads=(2, 1))
    out = run(step, backend, scale=0.3, window=window)
    assert error(step, out, scale=0.3, window=window) < 2e-5


def test_many_long_decodes_exceed_one_tile(backend) -> None:
    lens = [(1, 700 + 97 * i) for i in range(6)]
    step = make_step(4, lens, heads=(8, 8), dim=64)
    assert error(step, run(step, backend, scale=0.1), scale=0.1) < 2e-5


def test_one_plan_serves_layers_of_different_windows_and_pages(backend) -> None:
    step, other = (make_step(6, SHAPES["mixed"], dim=dim) for dim in (16, 32))
    backend.plan(step.batch)
    for layer in (step, other, step):
        for window in (None, 8, 30, None):
            pages = layer.k_pages.clone(), layer.v_pages.clone()
            out = backend.run(layer.query, layer.key, layer.value, *pages, scale=0.3, window=window)
            assert error(layer, out, scale=0.3, window=window) < 2e-5


def test_new_tokens_are_written_and_nothing_else(backend) -> None:
    step = make_step(8, SHAPES["mixed"], page_size=4)
    k_pages, v_pages = step.k_pages.clone(), step.v_pages.clone()
    backend.plan(step.batch)
    backend.run(step.query, step.key, step.value, k_pages, v_pages, scale=0.3)
    slots = torch.from_numpy(step.batch.slots())
    for before, after, new in (
        (step.k_pages, k_pages, step.key),
        (step.v_pages, v_pages, step.value),
    ):
        before = before.clone()
        before.flatten(0, 1)[slots] = new
        torch.testing.assert_close(after, before, atol=0, rtol=0, equal_nan=True)


def test_misuse_is_refused(backend) -> None:
    step = make_step(13, [(3, 0)])
    with pytest.raises(RuntimeError, match="before plan"):
        backend.run(step.query, step.key, step.value, step.k_pages, step.v_pages, scale=1.0)
    batch = step.batch
    short = PagedBatch(
        batch.qo_indptr, batch.kv_indptr, batch.kv_indices, np.array([2], np.int32), 16
    )
    with pytest.raises(ValueError, match="more new tokens"):
        backend.plan(short)
