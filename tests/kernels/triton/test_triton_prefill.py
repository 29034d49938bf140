"""Steps with prefill in graphs of FlashInfer's backend that Triton computes, on a simulated GPU:
FlashInfer's kernels are stand-ins, and Triton's run in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import SamplingParams
from radixcache.kernels.attention import LayerInputs, LayerKind, LayerPages
from radixcache.kernels.choose import make_flashinfer
from radixcache.runtime.model.cuda_graphs import Shape, pad
from radixcache.runtime.model.load import load_model
from tests.helpers import engines
from tests.helpers.decoders import DECODERS
from tests.helpers.engines import generated, is_greedy, run
from tests.helpers.models import tiny_model
from tests.helpers.simulated_cuda import CUDA
from tests.kernels.gpu import Gpu, simulated_gpu
from tests.kernels.reference import error, make_step
from tests.kernels.triton.triton_launches import launch_triton

pytest.importorskip("triton", reason="`make test-gpu` brings it")
from radixcache.kernels.triton import prefill as triton_prefill
from radixcache.kernels.triton.prefill import TritonPrefill

if not triton_prefill.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

KIND = LayerKind(8, 2, 16, 16, 0.3)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Gpu]:
    with simulated_gpu() as gpu:
        launch_triton(gpu.device, monkeypatch)
        monkeypatch.setattr(
            "radixcache.kernels.flashinfer.wrappers.TRITON_HEADS", 512
        )  # of few heads
        yield gpu


@pytest.fixture
def ran(monkeypatch) -> list[TritonPrefill]:
    """The prefills that Triton runs."""
    ran, plain = list[TritonPrefill](), TritonPrefill.run

    def noted(self: TritonPrefill, *args, **options) -> None:
        ran.append(self)
        plain(self, *args, **options)

    monkeypatch.setattr(TritonPrefill, "run", noted)
    return ran


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        (Shape(64, 2), [[(64, 300)], [(2, 0)], [(33, 257)]]),
        (Shape(64, 8), [[(1, 300), (40, 20)], [(1, 9)] * 5 + [(9, 300), (30, 0)]]),
    ],
    ids=str,
)
def test_a_replay_equals_the_reference(gpu, ran, shape, steps) -> None:
    """Decodes and prompts, fresh, and behind prefixes longer than a part of the keys; with sinks or
    without, and what fills the step up may be all but two tokens of it."""
    backend: Any = make_flashinfer(CUDA, torch.float32, [KIND])
    backend.allocate_fixed(24, 4000)
    ran.clear()
    sinks = torch.linspace(-2, 2, 8)
    there = sinks.to(CUDA)
    pages = LayerPages(*torch.zeros(2, 80, 16, 2, 16, device=CUDA))
    inputs = [torch.zeros(shape.tokens, heads, 16, device=CUDA) for heads in (8, 2, 2)]
    graph = None
    for seed, lens in enumerate(steps):
        step = make_step(seed, lens, page_size=16)
        padded = pad(step.batch, shape, len(pages.k) - 1)
        plan = backend.plan_fixed(padded, padded.positions)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [
                    plan.run(LayerInputs(inputs[0], inputs[1], inputs[2], pages, KIND, sink))
                    for sink in (None, there)
                ]
            assert len(ran) == 2
        for fixed, new in zip(inputs, (step.query, step.key, step.value), strict=True):
            fixed.zero_()
            fixed[: len(new)].copy_(new)
        for side, new in zip(pages, (step.k_pages, step.v_pages), strict=True):
            side[: len(new)] = new.nan_to_num(0)
            side[-1] = torch.nan  # nobody reads what was there before
        graph.replay()
        for sink, out in zip((None, sinks), outs, strict=True):
            assert error(step, out[: len(step.query)].cpu(), scale=0.3, sinks=sink) < 2e-5


@pytest.mark.parametrize(
    ("shape", "kind", "by_triton"),
    [
        (Shape(64, 2), KIND, True),
        (Shape(32, 2), KIND, False),
        (Shape(64, 2), KIND._replace(query_heads=16, kv_heads=8), False),
        (Shape(64, 2), KIND._replace(window=9), False),
        (Shape(64, 2), KIND._replace(softcap=9.0), False),
        (Shape(64, 2), KIND._replace(head_dim=256, value_dim=256), False),
    ],
    ids=str,
)
def test_what_fa2_computes_faster_is_left_to_it(gpu, shape, kind, by_triton) -> None:
    backend: Any = make_flashinfer(CUDA, torch.float32, [kind])
    backend.allocate_fixed(8, 600)
    plan = backend.plan_fixed(pad(make_step(3, [(9, 20)]).batch, shape, 40))
    assert isinstance(plan.parts[0].wrappers[kind], TritonPrefill) == by_triton


@pytest.mark.parametrize("broken", [False, True])
def test_without_triton_fa2_prefills_and_the_log_says_why(gpu, ran, broken, monkeypatch, caplog):
    caplog.set_level("INFO", "radixcache")
    if broken:
        monkeypatch.setattr(triton_prefill, "prefill_kernel", {})  # a launch fails
    backend: Any = make_flashinfer(CUDA, torch.float32, [KIND])
    backend.allocate_fixed(8, 600)
    step = make_step(3, [(9, 20)])
    plan = backend.plan_fixed(pad(step.batch, Shape(64, 2), 40))
    made = plan.parts[0].wrappers[KIND]
    assert isinstance(made, TritonPrefill) != broken
    assert ("prompts in graphs run in FlashInfer's fa2: Triton" in caplog.text) == broken


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_an_engine_gives_the_same_tokens(gpu, ran, family, tmp_path: Path, monkeypatch) -> None:
    """Hits in mid-page, and other prompts in one step, in float32."""
    options = DECODERS.get(family, {})
    path = tiny_model(family, tmp_path, tokenizer=False, head_dim=16, **options)
    load = partial(load_model, device="cuda", dtype="float32")
    monkeypatch.setattr(engines, "paged_model", lambda path, *_: load(path))
    engine = engines.make_engine(path, page_size=4, max_num_batched_tokens=64)
    rng = np.random.default_rng(5)
    stem = rng.integers(0, 256, 300).tolist()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for tails in ([5], [40], [17, 3]):
        prompts = [stem + rng.integers(0, 256, n).tolist() for n in tails]
        for prompt, (answer,) in zip(prompts, generated(run(engine, prompts, params)), strict=True):
            with _disable_current_modes():
                assert is_greedy(path, prompt, answer, 1e-3)
    assert ran and engine.cache.stats.hit_tokens > 800
