"""The Triton backend in Triton's interpreter, against a naive float64 reference and transformers;
its kernels compiled for GPUs that are not here. `make test-gpu` brings what this needs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from radixcache import LLM, SamplingParams
from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.engine import build
from radixcache.runtime.model.cuda_graphs import Shape, pad
from radixcache.runtime.model.load import load_model
from tests.helpers.cover import seeds
from tests.helpers.models import tiny_model
from tests.helpers.sources import ROOT
from tests.kernels.backends import SHAPES, assert_written_pages_stay, attend, held
from tests.kernels.reference import (
    Step,
    assert_only_rows_that_see_it_are_spoilt,
    behind_windows,
    error,
    inputs_of,
    make_step,
    random_step,
    run,
)

pytest.importorskip("triton", reason="`make test-gpu` brings it")
from radixcache.kernels.triton import attention as triton_attention
from radixcache.kernels.triton import prefill as triton_prefill

if not triton_prefill.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")
KERNELS = [
    (triton_attention, "append_kernel"),
    (triton_prefill, "prefill_kernel"),
    (triton_prefill, "merge_kernel"),
]


def make_backend(dtype: torch.dtype = torch.float32):
    return triton_attention.TritonAttention(CPU, dtype, [LayerKind(4, 2, 16, 16, 1.0)])


@seeds(0, 8, 8)
def test_output_equals_the_reference(seed) -> None:
    step, options = random_step(seed, (16, 64, 80, 128), (torch.float32,), most=48)
    assert error(step, run(step, make_backend(), **options), **options) < 2e-5
    options["window"] = options["window"] or 9
    short = behind_windows(step, options["window"])
    assert error(step, run(short, make_backend(), **options), **options) < 2e-5


def test_a_layer_attends_over_what_another_has_written() -> None:
    step = make_step(8, SHAPES["mixed"], page_size=4)
    assert_written_pages_stay(step, make_backend().plan(step.batch))


@seeds(0, 4, 4)
def test_pages_of_fewer_bits_hold_what_torch_writes_there(seed) -> None:
    """With slots that hold what is no number. (The interpreter does not round to bfloat16.)"""
    dtype = (torch.int8, torch.float16)[seed % 2]
    kinds = (torch.float32, torch.bfloat16) if dtype == torch.int8 else (torch.float32,)
    step, options = random_step(seed, (32, 64, 96, 128), kinds, most=48)
    out, *sides = attend(step, make_backend(step.query.dtype), dtype, **options)
    _, *others = attend(step, TorchAttention(), dtype, **options)
    limit = 5e-5 if step.query.dtype == torch.float32 else 8e-2
    assert error(held(step, dtype), out, **options) < limit
    for side, other in zip(sides, others, strict=True):
        np.testing.assert_array_equal(side.view(torch.int8), other.view(torch.int8))


@seeds(0, 4, 5)
def test_only_rows_that_see_a_token_with_no_finite_numbers_have_none(seed) -> None:
    assert_only_rows_that_see_it_are_spoilt(attend, make_backend(), seed, 48)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_16_bits_are_off_by_their_rounding(dtype, limit) -> None:
    step = make_step(3, SHAPES["mixed"], dim=64, dtype=dtype)
    assert error(step, run(step, make_backend(dtype), scale=0.125), scale=0.125) < limit


@pytest.mark.parametrize("lens", [[(3, 5)], [(1, 5)] * 3], ids=["prefill", "decode"])
def test_rows_are_found_where_32_bits_count_too_few(lens) -> None:
    """As of 210,000 tokens whose queries, keys and values lie side by side: 80 heads of 128."""
    step = make_step(3, lens, dtype=torch.float16)
    memory = torch.empty((1 << 31) + 256, dtype=torch.float16)  # nearly all is never touched

    def far(rows: torch.Tensor, column: int) -> torch.Tensor:
        return memory[column:].as_strided(rows.shape, (1 << 30, 16, 1)).copy_(rows)

    apart = replace(
        step, query=far(step.query, 0), key=far(step.key, 128), value=far(step.value, 192)
    )
    assert error(step, run(apart, make_backend(torch.float16), scale=0.3), scale=0.3) < 5e-3


@pytest.mark.parametrize("window", [None, 600])
def test_keys_in_several_parts_are_merged(window) -> None:
    size = triton_prefill.MIN_SPLIT
    step = make_step(5, [(1, 4 * size + 70), (1, 3), (70, 3 * size - 9)], heads=(2, 1), dim=16)
    options = {"scale": 0.25, "window": window}
    assert error(step, run(step, make_backend(), **options), **options) < 1e-5


@pytest.mark.parametrize("window", [None, 30])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(window) -> None:
    lens = [(1, 300), (1, 40), (9, 70), (33, 0)]
    step = make_step(4, lens, heads=(4, 2), dim=16)
    together, first = run(step, make_backend(), scale=0.25, window=window), 0
    for number, (count, _) in enumerate(lens):
        rows = slice(first, first + count)
        batch = step.batch.rows(number, number + 1)
        new = (step.query[rows], step.key[rows], step.value[rows])
        alone = Step(
            batch, [step.tables[number]], [count], [step.kv_lens[number]], *new,
            step.k_pages, step.v_pages,
        )  # fmt: skip
        assert torch.equal(run(alone, make_backend(), scale=0.25, window=window), together[rows])
        first += count


@pytest.mark.parametrize("shape", [Shape(16, 2), Shape(64, 8)], ids=str)
def test_a_step_with_prefill_in_a_graph_launches_the_same_and_is_filled_up(shape, monkeypatch):
    """A graph is a list of launches: their grids must not depend on the batch. Decodes are rows of
    the prefill kernel, so all but their last bits are the eager step's."""
    backend, grids = make_backend(), list[list[tuple[int, ...]]]()
    backend.allocate_fixed(8, 2000)
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, Spy(getattr(module, kernel), grids))
    for seed, lens in enumerate(
        [
            [(2, 30)],
            [(shape.tokens, 5)],
            [(1, 70)] * (shape.sequences - 2) + [(9, 40)],
            [(shape.tokens // 2, 9)],  # and as many of padding: fewer tiles would do
        ]
    ):
        grids.append([])
        step = make_step(seed, lens, heads=(4, 2), dim=16)
        spare = len(step.k_pages)
        pages = [
            torch.cat([side, torch.zeros_like(side[:1])]) for side in (step.k_pages, step.v_pages)
        ]
        missing = shape.tokens - len(step.query)
        new = [
            torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
            for rows in (step.query, step.key, step.value)
        ]
        k_pages, v_pages = (side.nan_to_num(0) for side in pages)
        padded = replace(
            step, query=new[0], key=new[1], value=new[2], k_pages=k_pages, v_pages=v_pages
        )
        plan = backend.plan_fixed(pad(step.batch, shape, spare))
        out = plan.run(inputs_of(padded, scale=0.25))
        assert error(step, out[: len(step.query)], scale=0.25) < 2e-5
    assert all(each == grids[0] for each in grids) and len(grids[0]) == 3


class Spy:
    """A kernel whose grids are noted."""

    def __init__(self, kernel, grids: list[list[tuple[int, ...]]]) -> None:
        self._kernel, self._grids = kernel, grids

    def __getitem__(self, grid: tuple[int, ...]):
        self._grids[-1].append(grid)
        return self._kernel[grid]


def test_more_tokens_than_pages_are_refused_and_so_is_mla() -> None:
    with pytest.raises(ValueError, match="no kernel for MLA"):
        triton_attention.TritonAttention(
            CPU, torch.float32, [LayerKind(4, 1, 16, 8, 1.0, mla=True)]
        )
    counts = np.array([0, 3], np.int32)
    pages, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match="more new tokens"):
        make_backend().plan(PagedBatch(counts, np.array([0, 1], np.int32), pages, one, 4))


def in_the_interpreter(path: Path | str, **options) -> LLM:
    """An `LLM` whose model attends with Triton."""
    model = load_model(path, device=CPU, attention=make_backend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load", lambda *args: model)
        return LLM(path, kv_cache_memory_bytes="32MiB", **options)


def test_an_engine_gives_the_same_tokens_over_its_page_tables(tmp_path: Path) -> None:
    """Hits in mid-page, chunks and decodes of several sequences in one step."""
    path = tiny_model("qwen3", tmp_path)
    stem = "abcdefghijklmnopqrstuvwxyz"
    prompts = [stem[:n] + tail for n, tail in ((20, "x"), (26, "yz"), (11, "Q"))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = {"page_size": 4, "max_num_batched_tokens": 16}
    with in_the_interpreter(path, **options) as triton, LLM(path) as llm:
        for _ in range(2):
            found = triton.generate(prompts, params, use_tqdm=False)
            wanted = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in found] == [
                o.outputs[0].token_ids for o in wanted
            ]
        assert triton.cache.stats.hit_tokens > 40


FEW, MORE = ("64", "512"), ("128", "256")
COMPILED = [
    ("bf16", FEW[:1], 48),
    ("int8", FEW[1:], 24),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ("bf16", FEW + MORE, 93),
            ("int8", FEW + MORE, 69),
            ("fp16", FEW + MORE, 93),
            ("fp32", FEW + MORE, 88),
        )
    ),
]


@pytest.mark.parametrize(("dtype", "dims", "count"), COMPILED)
def test_kernels_compile_for_gpus_that_are_not_here(dtype, dims, count, tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = (sys.executable, "-m", "tests.kernels.triton.compile_triton", dtype, *dims)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == count
