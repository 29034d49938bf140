"""Steps in CUDA graphs, and the engine on a GPU: simulated, with a stand-in for FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import LLM, SamplingParams
from radixcache.kernels import cascade
from radixcache.kernels.capture import Capture
from radixcache.runtime.engine import model_runner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner, Shape
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers import engines
from tests.helpers.cover import covering
from tests.helpers.drafts import speculate
from tests.helpers.engines import generated, plain_greedy, run
from tests.helpers.models import tiny_model
from tests.kernels.gpu import Gpu, simulated_gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_model(name, root / name) for name in ("llama", "qwen3", "gemma2")}


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> Iterator[Gpu]:
    monkeypatch.setattr(engines, "paged_model", load)
    with simulated_gpu() as gpu:
        yield gpu


def load(path: Path, *_: str) -> PagedModel:
    """A model of its own on the GPU: backends keep state."""
    return load_model(path, device="cuda", dtype="float32")


def graphs_of(made: Engine) -> set[Shape]:
    """What was captured."""
    assert made.runner.graphs is not None
    return {key for key, replay in made.runner.graphs._replays.items() if replay is not None}


@covering(
    family=["llama", "qwen3", "gemma2"],
    page_size=[1, 4, 16],
    cache=["radix", "none"],
    drafts=[True, False],
    windows=[True, False],
)
def test_greedy_tokens_equal_plain_transformers(folders, family, page_size, cache, drafts, windows):
    rng = np.random.default_rng(page_size)
    stem = rng.integers(0, 256, 40).tolist()
    prompts = [stem + rng.integers(0, 256, int(n)).tolist() for n in rng.integers(1, 30, 7)]
    made = engines.make_engine(
        folders[family], cache, page_size, max_num_batched_tokens=64, windows=windows
    )
    assert family != "gemma2" or (made.kv_pool.windows is not None) == windows
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    proposer = speculate(made) if drafts else None
    for _ in range(1 + drafts):
        requests = run(made, prompts, params)
        assert generated(requests) == [[plain_greedy_all(folders[family], p)] for p in prompts]
    assert graphs_of(made), "no step took a graph"
    if proposer is not None:
        assert proposer.num_accepted_tokens["tree"] > 20
        decodes = [shape.tokens for shape in graphs_of(made) if shape.only_decodes]
        assert max(decodes) > 8, "a draft is as many decodes"


def plain_greedy_all(path: Path, prompt: list[int]) -> list[int]:
    """12 greedy tokens, whatever they are."""
    with _disable_current_modes():
        return plain_greedy(path, prompt, 12, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_without_flashinfer_plain_torch_serves_the_gpu(folders, family) -> None:
    sys.modules["radixcache.kernels.flashinfer.attention"] = None  # type: ignore[assignment]  # `gpu` mends it
    rng = np.random.default_rng(6)
    stem = rng.integers(0, 256, 40).tolist()
    prompts = [stem + rng.integers(0, 256, int(n)).tolist() for n in rng.integers(1, 30, 5)]
    made = engines.make_engine(folders[family], page_size=4, max_num_batched_tokens=64)
    assert made.model.attention.name.startswith("torch")
    requests = run(made, prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert generated(requests) == [[plain_greedy_all(folders[family], p)] for p in prompts]


def test_sharers_are_attended_in_two_levels_with_the_same_tokens(folders, gpu, monkeypatch) -> None:
    """Launched ahead, as on a GPU: the next step's tokens never leave the device."""
    grouped = []

    def group(tables, min_saved):
        order, shared = cascade.group_by_prefix(tables, 1, 4)
        grouped.append(len(shared))
        return order, shared

    rng = np.random.default_rng(5)
    stems = [rng.integers(0, 256, 50).tolist() for _ in range(2)]
    prompts = [stems[i % 2] + rng.integers(0, 256, 3 + i).tolist() for i in range(11)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    flat = [[plain_greedy_all(folders["llama"], p)[:10]] for p in prompts]
    for cascades in (False, True):
        if cascades:
            monkeypatch.setattr(model_runner, "group_by_prefix", group)
        made = engines.make_engine(folders["llama"], page_size=4)
        gpu.kernels.calls.clear()  # which were to try the kernels out
        requests, ahead = [made.add_request(prompt, params) for prompt in prompts], 0
        while made.has_work:
            made.step()
            made.cache.check()
            ahead += made._ahead is not None
        assert generated(requests) == flat and ahead > 3 and graphs_of(made)
        assert bool(gpu.kernels.calls["merge"]) == cascades
    made = engines.make_engine(folders["llama"], page_size=4)
    proposer = speculate(made)
    for _ in range(2):
        assert generated(run(made, prompts, params)) == flat
    assert max(grouped) == 2 and proposer.num_accepted_tokens["tree"] > 20
    assert gpu.kernels.calls["merge"]
    assert Shape(16, 16, True) in graphs_of(made)  # eleven rows, filled up


def test_drafts_from_the_end_of_a_shared_page_keep_it_as_their_first_rows_last(
    folders, gpu, monkeypatch
) -> None:
    """The prompt's last token is computed again in each completion, and the draft behind it is in
    the next page: a cascade may not take the page that the first of these rows ends in."""
    group = cascade.group_by_prefix
    monkeypatch.setattr(model_runner, "group_by_prefix", lambda tables, least: group(tables, 1, 4))
    made, prompt = engines.make_engine(folders["llama"], page_size=4), [*range(12)]
    made.scheduler.admission.logits_cache = None
    proposer = speculate(made)
    wanted = plain_greedy_all(folders["llama"], prompt)
    for n in (1, 6):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=n)
        assert generated(run(made, [prompt], params)) == [[wanted] * n]
    assert proposer.num_accepted_tokens["tree"] > 20 and gpu.kernels.calls["merge"]


def test_without_a_graph_decodes_run_all_the_same(folders, gpu, monkeypatch, caplog) -> None:
    """A capture that fails, for want of memory say, is told once and not tried again."""
    tries: list[int] = []

    def fail(self, *inputs):
        if gpu.device.capturing is None:
            return computes(self, *inputs)
        tries.append(1)
        raise RuntimeError("out of memory\nmore lines")

    main = torch.cuda.current_stream()
    computes, plans = CudaGraphRunner._compute, gpu.backend.FlashInferAttention.plan_fixed
    planned: list[int] = []

    def plan(self, *args):
        planned.append(1)
        return plans(self, *args)

    monkeypatch.setattr(CudaGraphRunner, "_compute", fail)
    monkeypatch.setattr(gpu.backend.FlashInferAttention, "plan_fixed", plan)
    prompt = [1, 2, 3, 4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = run(engines.make_engine(folders["llama"]), [prompt], params)
    assert generated(requests) == [[plain_greedy_all(folders["llama"], prompt)]]
    (record,) = caplog.records
    assert torch.cuda.current_stream() is main
    assert len(tries) == len(planned) == 2  # the prompt's step, and the decodes'
    assert record.getMessage().endswith("without a CUDA graph: out of memory")


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # with a cascade, and without
def test_an_llm_has_all_its_graphs_before_the_first_request(
    folders, gpu, monkeypatch, caplog, family
) -> None:
    caplog.set_level("INFO", "radixcache")
    group = cascade.group_by_prefix
    monkeypatch.setattr(model_runner, "group_by_prefix", lambda tables, least: group(tables, 1))
    llm = LLM(
        folders[family], device="cuda", dtype="float32", kv_cache_memory_bytes="4MiB", page_size=4,
        max_num_seqs=9,
    )  # fmt: skip
    decodes = [Shape(n, n, cascade) for n in (9, 8, 4, 2, 1) for cascade in (False, True)]
    decodes = [s for s in decodes if not s.cascade or (family == "llama" and s.tokens >= 4)]
    prefills = [Shape(n, s) for n in (512, 384, 256, 192, 128, 64, 32, 16) for s in (24, 8, 2)]
    wanted = [s for s in prefills if 2 * s.sequences <= s.tokens] + decodes
    graphs = llm.engine.runner.graphs
    assert graphs is not None and list(graphs._replays) == wanted
    assert graphs_of(llm.engine) == set(wanted)
    (line,) = [r.getMessage() for r in caplog.records if "captured" in r.getMessage()]
    assert line.startswith(f"captured {len(wanted)} CUDA graphs in ")
    prompts = [[*range(30), i] for i in range(7)] + [[5, 6]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    monkeypatch.setattr(Capture, "__call__", None)
    engines.finish(llm.engine)
    assert generated(requests) == [[plain_greedy_all(folders[family], p)] for p in prompts]
    assert list(graphs._replays) == wanted


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_small_pool_has_all_its_graphs(folders, page_size) -> None:
    """An empty step of 512 tokens is filled up with more page numbers than the pool has pages."""
    made = engines.make_engine(
        folders["llama"], page_size=page_size, num_pages=96 // page_size, max_num_seqs=1
    )
    made.capture_graphs()
    assert made.runner.graphs is not None and None not in made.runner.graphs._replays.values()
    prompt = [*range(40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert generated(run(made, [prompt], params)) == [[plain_greedy_all(folders["llama"], prompt)]]


def test_an_interrupt_in_a_capture_leaves_the_stream_as_it_was(folders, gpu, monkeypatch) -> None:
    main, computes = torch.cuda.current_stream(), CudaGraphRunner._compute
    interrupts = [KeyboardInterrupt()]

    def interrupted(self, *inputs):
        if gpu.device.capturing is not None and interrupts:
            raise interrupts.pop()
        return computes(self, *inputs)

    monkeypatch.setattr(CudaGraphRunner, "_compute", interrupted)
    made = engines.make_engine(folders["llama"])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    request = made.add_request([1, 2, 3, 4], params)
    with pytest.raises(KeyboardInterrupt):
        engines.finish(made)
    assert torch.cuda.current_stream() is main
    engines.finish(made)
    assert generated([request]) == [[plain_greedy_all(folders["llama"], [1, 2, 3, 4])]]
    assert Shape(1, 1) in graphs_of(made)  # nor does it count as a capture that failed


@pytest.mark.parametrize(("temperature", "logprobs"), [(0.0, None), (0.8, None), (0.0, 2)])
def test_the_device_goes_on_while_the_host_waits_for_tokens(folders, gpu, temperature, logprobs):
    """Also while sequences draw, and end one after the other."""
    made = engines.make_engine(folders["llama"], page_size=4)
    rng = np.random.default_rng(4)
    for length in range(4, 9):
        params = SamplingParams(
            temperature=temperature, top_k=9, top_p=0.9, seed=length % 2 or None,
            max_tokens=length, ignore_eos=True, logprobs=logprobs,
        )  # fmt: skip
        made.add_request(rng.integers(0, 256, 20).tolist(), params)
    made.step()  # the prompts
    while made.has_work:
        captured = graphs_of(made)
        gpu.device.waits.clear()
        runs_ahead = made._ahead is not None
        made.step()
        if graphs_of(made) == captured and runs_ahead:
            # For the plan's pinned buffers, and for what is read: not for the step that follows.
            assert len(gpu.device.waits) <= 2
            assert all(gpu.device.waits) or made._ahead is None
    assert graphs_of(made)


@pytest.mark.parametrize("length", [128, 120])
def test_a_hit_of_64_tokens_is_a_graph_and_twelve_operations_beside_it(folders, gpu, length):
    """From the schedule to the token, however many layers there are; with a page to copy, too."""
    made, rng = engines.make_engine(folders["llama"]), np.random.default_rng(7)
    document, params = (
        rng.integers(0, 256, length).tolist(),
        SamplingParams(temperature=0, max_tokens=1),
    )
    run(made, [document], params)
    for _ in range(2):  # the first one captures
        made.add_request(document + rng.integers(0, 256, 64).tolist(), params)
        gpu.device.ops.clear()
        made.step()
        launched = [*gpu.device.ops]
        engines.finish(made)
    assert Shape(64, 2) in graphs_of(made)
    assert len(launched) <= 12, launched
    assert bool(made.cache.stats.copied_pages) == bool(length % 16)


@pytest.mark.parametrize("ends_first", [True, False])
def test_logprobs_are_of_the_step_that_gave_the_token(folders, ends_first) -> None:
    """The next replay overwrites the logits, also if it is for others alone."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    long, short = 12, 6
    params = SamplingParams(
        temperature=0, logprobs=2, max_tokens=short if ends_first else long, ignore_eos=True
    )
    found = []
    for others in ([], [[2, 7, 1, 8]]):
        made = engines.make_engine(folders["llama"], page_size=4)
        request = made.add_request(prompt, params)
        for other in others:
            rest = SamplingParams(
                temperature=0, max_tokens=long if ends_first else short, ignore_eos=True
            )
            made.add_request(other, rest)
        engines.finish(made)
        assert graphs_of(made)
        found.append(request.sequences[0].logprobs)
    for alone, together in zip(*found, strict=True):
        assert together == pytest.approx(alone, abs=1e-4)
