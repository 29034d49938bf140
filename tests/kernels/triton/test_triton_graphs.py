"""Engines over the Triton backend with CUDA graphs, on a simulated GPU: its kernels run in Triton's
interpreter, on the memory of the simulated tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import SamplingParams
from radixcache.runtime.model.load import load_model
from tests.helpers import engines
from tests.helpers.decoders import DECODERS
from tests.helpers.drafts import speculate
from tests.helpers.engines import generated, is_greedy, run
from tests.helpers.models import tiny_model
from tests.helpers.simulated_cuda import Device, simulated_cuda
from tests.kernels.triton.triton_launches import launch_triton
from tests.runtime.engine.gpu_schedules import compare_graphs

pytest.importorskip("triton", reason="`make test-gpu` brings it")
from radixcache.kernels.triton import prefill as triton_prefill

if not triton_prefill.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    with simulated_cuda() as device:
        launch_triton(device, monkeypatch)
        yield device


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: tiny_model(family, root / family, tokenizer=False, head_dim=32, **options)
        for family, options in (("llama", {}), ("gemma2", {}), ("gpt_oss", DECODERS["gpt_oss"]))
    }


@pytest.mark.parametrize(
    ("family", "windows", "kv"),
    [
        ("llama", False, "auto"),
        ("gemma2", True, "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("llama", False, "int8"),
                ("gemma2", True, "auto"),
                ("gpt_oss", False, "auto"),
                ("gpt_oss", True, "float16"),
                ("gpt_oss", True, "int8"),
            )
        ),
    ],
)
def test_graphs_compute_what_single_launches_do(folders, device, family, windows, kv, monkeypatch):
    """Mixed steps, hits in mid-page, drafts, windows kept apart, sinks, pages of 8 bits."""
    load = partial(load_model, device="cuda", dtype="float32", kv_cache_dtype=kv)
    monkeypatch.setattr(engines, "paged_model", lambda path, *_: load(path))
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 256, 18).tolist()
    prompts = [stem + rng.integers(0, 256, n).tolist() for n in (2, 7)] + [[1, 2, 3]]
    made = engines.make_engine(
        folders[family], page_size=4, max_num_batched_tokens=16, windows=windows
    )
    assert made.model.attention.name.startswith("Triton")
    assert (made.kv_pool.windows is not None) == windows
    proposer, seen = speculate(made), Counter[str]()
    compare_graphs(made, seen)
    for _ in range(2):
        answers = generated(run(made, prompts, GREEDY))
        for prompt, (answer,) in zip(prompts, answers, strict=True):
            with _disable_current_modes():
                assert kv == "int8" or is_greedy(folders[family], prompt, answer, 1e-3)
    assert seen["mixed in graphs"] >= 2 <= seen["decodes in graphs"]
    assert proposer.num_accepted_tokens.total() and made.cache.stats.hit_tokens > 30
