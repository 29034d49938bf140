"""The FlashInfer backend over the package's own Python, against a naive float64 reference."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import (
    AttentionPlan,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
    SharedPrefix,
    fp8_pages,
)
from radixcache.kernels.kv_format import FP8, encode
from radixcache.runtime.model.cuda_graphs import Shape, pad
from tests.helpers.simulated_cuda import CUDA
from tests.kernels.backends import SHAPES, assert_written_pages_stay
from tests.kernels.reference import Step, inputs_of, make_step, random_step
from tests.kernels.reference import error as error_on_cpu

pytestmark = pytest.mark.usefixtures("gpu")


def kind_of(step: Step, scale: float, window: int | None = None, softcap: float | None = None):
    heads = (step.query.shape[1], step.key.shape[1], step.key.shape[2], step.value.shape[2])
    return LayerKind(*heads, scale, window, softcap)


def make_backend(*kinds: LayerKind, dtype: torch.dtype = torch.float32, **kv_dtype):
    from radixcache.kernels.flashinfer.attention import FlashInferAttention  # over the stand-in

    return FlashInferAttention(CUDA, dtype, kinds, **kv_dtype)


def attend(backend, step: Step, batch: PagedBatch | None = None, fixed: bool = False, **options):
    make = backend.plan_fixed if fixed else backend.plan
    return run(make(batch or step.batch), step, **options)


def run(plan: AttentionPlan, step: Step, **options) -> torch.Tensor:
    sides = (step.k_pages.nan_to_num(0), step.v_pages.nan_to_num(0))  # the pool starts as zeros
    query, key, value, *pages = (t.to(CUDA) for t in (step.query, step.key, step.value, *sides))
    inputs = inputs_of(step, **options)
    return plan.run(LayerInputs(query, key, value, LayerPages(*pages), *inputs[4:]))


def error(step: Step, out: torch.Tensor, **options) -> float:
    assert out.device == CUDA
    return error_on_cpu(step, out.cpu(), **options)


def with_shared(batch: PagedBatch, *groups: tuple[int, int, int]) -> PagedBatch:
    return PagedBatch(
        batch.qo_indptr,
        batch.kv_indptr,
        batch.kv_indices,
        batch.kv_last_page_len,
        batch.page_size,
        tuple(SharedPrefix(*group) for group in groups),
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_equal_the_reference(seed) -> None:
    """Where no layer has a window, those that decode and share pages attend in a cascade."""
    step, options = random_step(seed, (16, 64), (torch.float32,), most=500)
    windows, batch, decodes = {options["window"], None}, step.batch, step.batch.num_decodes
    backend = make_backend(*(kind_of(step, 0.3, one, options["softcap"]) for one in windows))
    if backend.reads_shared_once and decodes > 1 and step.share:
        batch = with_shared(batch, (0, decodes, step.share))
    plan = backend.plan(batch)
    sinks = None if options["sinks"] is None else options["sinks"].to(CUDA)
    for window in windows:  # layers of two kinds share one plan
        out = run(plan, step, **options | {"window": window, "sinks": sinks})
        assert error(step, out, **options | {"window": window}) < 2e-5


def test_a_layer_attends_over_what_another_has_written() -> None:
    step = make_step(8, SHAPES["mixed"], page_size=4)
    backend = make_backend(kind_of(step, 0.25))
    assert_written_pages_stay(step, backend.plan(step.batch), CUDA)


@pytest.mark.parametrize("seed", range(12))
def test_pages_of_fp8_hold_rounded_numbers_which_all_rows_read(gpu, seed) -> None:
    """Fresh prompts too, and cascades: of the wrapper without pages its stand-in knows no fp8."""
    step, options = random_step(seed, (16, 64), (torch.float32,), most=300)
    scales = ((1.0, 1.0), (0.25, 0.5))[seed % 2]
    step.key[0, 0, 0] = 1e4  # cut off

    def rounded(numbers: torch.Tensor, scale: float) -> torch.Tensor:
        return encode(numbers.nan_to_num(0), FP8, scale).float() * scale

    sides = [encode(side.nan_to_num(0), FP8, scale) for side, scale in zip(
        (step.k_pages, step.v_pages), scales, strict=True)]  # fmt: skip
    kind = kind_of(step, 0.3, options["window"], options["softcap"])
    backend, batch = make_backend(kind, kv_dtype=FP8), step.batch
    if backend.reads_shared_once and batch.num_decodes > 1 and step.share:
        batch = with_shared(batch, (0, batch.num_decodes, step.share))
    k_pages, v_pages = (side.view(torch.uint8).to(CUDA) for side in sides)
    pages = fp8_pages(k_pages, v_pages, *scales)
    query, key, value = (t.to(CUDA) for t in (step.query, step.key, step.value))
    sinks = None if options["sinks"] is None else options["sinks"].to(CUDA)
    out = backend.plan(batch).run(LayerInputs(query, key, value, pages, kind, sinks))
    held = replace(
        step,
        key=rounded(step.key, scales[0]), value=rounded(step.value, scales[1]),
        k_pages=rounded(step.k_pages, scales[0]), v_pages=rounded(step.v_pages, scales[1]),
    )  # fmt: skip
    assert error(held, out, **options) < 1e-4 and not gpu.kernels.calls["ragged"]
    assert "over fp8" in backend.name and backend.kv_dtypes == (FP8,)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("tail", "fixed"),
    [([], False), ([], True), ([(9, 70)], False)],
    ids=["decodes", "fixed", "mixed"],
)
def test_a_cascade_equals_the_reference_and_reads_shared_pages_once(gpu, page_size, tail, fixed):
    lens = [(1, 64 + n) for n in (3, 0, 17, 30, 6)] + tail
    share = 64 // page_size
    step = make_step(2, lens, page_size=page_size, heads=(4, 2), share=share)
    kind = kind_of(step, 0.3)
    flat = make_backend(kind)
    flat.allocate_fixed(8, 1000)
    attend(flat, step, fixed=fixed, scale=0.3)
    flat_reads = gpu.kernels.kv_tokens_read
    any_groups = [[(0, 2, share), (2, 3, share - 1 or 1)], [(1, 3, share)], [(0, 2, share)]]
    for groups in ([(0, 5, share)], [(0, 4, share)], *([] if fixed else any_groups)):
        backend = make_backend(kind)
        backend.allocate_fixed(8, 1000)
        gpu.kernels.kv_tokens_read = 0
        batch = with_shared(step.batch, *groups)
        out = attend(backend, step, batch, fixed=fixed, scale=0.3)
        assert error(step, out, scale=0.3) < 2e-5
        saved = sum((size - 1) * pages * page_size for _, size, pages in groups)
        gaps = 2  # the rows before and after the groups see one token each, which is not merged
        assert gpu.kernels.kv_tokens_read <= flat_reads - saved + gaps


def test_a_replay_reads_only_what_plan_fixed_rewrote() -> None:
    """Graphs of two sizes, flat and with a cascade, replayed with other tables in turn."""
    kind = kind_of(make_step(1, [(1, 30)]), 0.3)
    backend = make_backend(kind)
    backend.allocate_fixed(8, 600)
    pages = LayerPages(*torch.zeros(2, 200, 4, 2, 16, device=CUDA))
    captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, list, list, torch.Tensor]] = {}
    for seed in range(2, 26):
        rng = np.random.default_rng(seed)
        size, share = int(rng.choice([3, 8])), int(rng.integers(0, 2)) * 8
        lens = [(1, 4 * share + int(rng.integers(0, 50))) for _ in range(size)]
        step = make_step(seed, lens, page_size=4, share=share)
        choices = [[(0, size, share)], [(0, 4, share), (4, 4, share - 1)], [(0, 5, share)]]
        groups = choices[rng.integers(3) if size == 8 else 0]
        batch = with_shared(step.batch, *groups) if share else step.batch
        plan = backend.plan_fixed(batch, np.arange(size), batch.positions)
        if (size, bool(share)) not in captured:
            inputs = [torch.zeros(t.shape, device=CUDA) for t in (step.query, step.key, step.value)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = plan.run(LayerInputs(inputs[0], inputs[1], inputs[2], pages, kind))
            captured[size, bool(share)] = graph, inputs, plan.arrays, out
        graph, inputs, (ids, positions), out = captured[size, bool(share)]
        for fixed, new in zip(inputs, (step.query, step.key, step.value), strict=True):
            fixed.copy_(new)
        for side, new in zip(pages, (step.k_pages, step.v_pages), strict=True):
            side[: len(new)] = new.nan_to_num(0)
        graph.replay()
        assert error(step, out, scale=0.3) < 2e-5
        assert ids.tolist() == list(range(size)) and positions.tolist() == [n for _, n in lens]
    assert len(captured) == 4


@pytest.mark.parametrize("shape", [Shape(16, 2), Shape(64, 8), Shape(96, 24)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_replay_of_a_step_with_prefill_gives_the_bits_of_the_eager_one(shape, page_size) -> None:
    """Decodes, suffixes and prompts, as many as there is room for, in two kinds of layers; what
    fills the step up may be all but two tokens of it."""
    kind = kind_of(make_step(1, [(1, 30)]), 0.3)
    kinds = [kind, kind._replace(window=9)]
    backend, eager = make_backend(*kinds), make_backend(*kinds)
    backend.allocate_fixed(24, 4000)
    pages = LayerPages(*torch.zeros(2, 700, page_size, 2, 16, device=CUDA))
    inputs = [torch.zeros(shape.tokens, heads, 16, device=CUDA) for heads in (8, 2, 2)]
    graph, rng = None, np.random.default_rng(7)
    for seed in range(12):
        count = int(rng.integers(1, shape.sequences))
        cuts = rng.choice(np.arange(1, shape.tokens), count, replace=False)
        new = np.diff([0, *sorted(cuts)]).tolist() if seed % 3 else [1] * (count - 1) + [2]
        step = make_step(
            seed, [(int(n), int(rng.choice([0, 5, 40]))) for n in new], page_size=page_size
        )
        spare = len(pages.k) - 1
        padded = pad(step.batch, shape, spare)
        plan = backend.plan_fixed(padded, padded.positions)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [
                    plan.run(LayerInputs(inputs[0], inputs[1], inputs[2], pages, kind))
                    for kind in kinds
                ]
            addresses = [one.data_ptr() for one in plan.arrays]
        assert [one.data_ptr() for one in plan.arrays] == addresses
        total = len(step.query)
        for fixed, new in zip(inputs, (step.query, step.key, step.value), strict=True):
            fixed.zero_()
            fixed[:total].copy_(new)
        for side, new in zip(pages, (step.k_pages, step.v_pages), strict=True):
            side[: len(new)] = new.nan_to_num(0)
            side[spare] = torch.nan  # nobody reads what was there before
        graph.replay()
        for kind, out in zip(kinds, outs, strict=True):
            wanted = attend(eager, step, scale=0.3, window=kind.window)
            assert torch.equal(out[:total].cpu(), wanted.cpu())
            assert error(step, out[:total], scale=0.3, window=kind.window) < 2e-5


@pytest.mark.parametrize("compiles", [True, False])
def test_long_prefills_go_to_fa3_once_it_is_there(gpu, monkeypatch, compiles) -> None:
    """By the wrappers that are asked for: no stand-in has its arithmetic."""
    asked: list[str] = []

    def module(version: str, *key):
        if version == "fa3" and not compiles:
            raise RuntimeError("nvcc compiles nothing here")
        return gpu.kernels.prefill("fa2", *key)

    def wrapper(make):
        def made(workspace, *, backend, **options):
            asked.append(backend)
            return make(workspace, backend="fa2", **options)

        return made

    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        monkeypatch.setattr(gpu.flashinfer, name, wrapper(getattr(gpu.flashinfer, name)))
    monkeypatch.setattr(gpu.flashinfer.prefill, "get_batch_prefill_module", module)
    kind = kind_of(make_step(1, [(1, 30)]), 0.3)
    backend = make_backend(kind, kind._replace(window=9))
    for new, cached, then in ((600, 20, "fa3"), (600, 0, "fa3"), (300, 20, "fa2")):
        lens = [(1, 5), (new, cached)]
        for expected in ("fa2", then if compiles else "fa2"):
            step = make_step(new, lens)
            asked.clear()
            backend._wrappers.made.clear()
            backend.plan(step.batch)
            assert asked == [expected, "fa2"]  # windows are left to fa2
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", threading.Thread.run)
                backend.compile_in_background()
        backend._wrappers._fa3.clear()


def test_what_flashinfer_cannot_do_is_refused() -> None:
    step = make_step(4, SHAPES["mixed"])
    kind = kind_of(step, 0.3)
    with pytest.raises(ValueError, match="not torch"):
        make_backend(kind, dtype=torch.float64)
    with pytest.raises(ValueError, match="no kernel for heads of 16/32"):
        make_backend(kind._replace(value_dim=32))
    with pytest.raises(ValueError, match="no kernel for heads of 80/80"):
        make_backend(kind._replace(head_dim=80, value_dim=80))
    backend = make_backend(kind)
    assert backend.reads_shared_once
    assert not make_backend(kind, kind._replace(window=4)).reads_shared_once
    wide = kind._replace(query_heads=128, kv_heads=8, head_dim=128, value_dim=128)
    assert not make_backend(wide).reads_shared_once
