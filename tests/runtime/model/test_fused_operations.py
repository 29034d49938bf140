"""The decoder loop with FlashInfer's fused kernels, on a simulated GPU with a stand-in for them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.fallback.model import TransformersModel
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers.decoders import DECODERS
from tests.helpers.models import tiny_model
from tests.runtime.model.steps import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gemma2", "gemma3_text", "olmo3", "cohere2", "glm4", "granite", "phi3", "arcee",
          "qwen3_moe", "gpt_oss", "olmoe")  # fmt: skip

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, int], Path]:
    """Of each family, with two and with three layers. They are made before a GPU is simulated,
    which forgets the modules that are imported meanwhile."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for family, count in [*product(FAMILIES, (2, 3)), *((family, 2) for family in OTHERS)]:
        options = DECODERS[family] if family in OTHERS else {"num_hidden_layers": count}
        folder = root / f"{family}-{count}"
        made[family, count] = tiny_model(family, folder, tokenizer=False, **options)
    return made


def load(folder: Path) -> PagedModel:
    return load_model(folder, device="cuda", dtype="float32")


def batch(*lens: int, new: int = 1) -> PagedBatch:
    """Sequences on pages of 4, each with its last `new` tokens to be computed."""
    counts = [-(-length // 4) for length in lens]
    return PagedBatch(
        np.arange(len(lens) + 1, dtype=np.int32) * np.int32(new),
        np.cumsum([0, *counts], dtype=np.int32),
        np.arange(sum(counts), dtype=np.int32),
        np.array([(length - 1) % 4 + 1 for length in lens], np.int32),
        4,
    )


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_logits_are_those_of_plain_transformers(folders, family) -> None:
    sequences = random_sequences()
    with _disable_current_modes():
        plain = plain_logits(folders[family, 2], sequences)
    model = load(folders[family, 2])
    assert isinstance(model, Decoder)
    assert "layers by radixcache with FlashInfer" in model.placement
    got = [rows.cpu() for rows in run_steps(model, sequences, STEPS[0], 4)]
    assert relative_error(got, plain) < 1e-4


@pytest.mark.parametrize("graph", [None, "decodes", "suffixes"])
@pytest.mark.parametrize(("family", "most"), [*((f, 12) for f in FAMILIES[:3]), ("qwen3", 14)])
def test_a_layer_is_few_kernels(folders, gpu, family, most, graph) -> None:
    """In graphs, and in suffixes that are launched kernel by kernel."""
    launched: list[Counter[str]] = []
    new = 1 if graph == "decodes" else 3
    step = np.arange(2 * new, dtype=np.int32), batch(9, 8, new=new), np.arange(1, 3) * new - 1
    for count in (2, 3):
        model = load(folders[family, count])
        pool = model.allocate(16, 4)
        graphs = CudaGraphRunner(model, pool, 2)
        gpu.device.ops.clear()
        if graph:
            assert graphs.run(*step) is not None
        else:
            model.forward(*step, pool)
        launched.append(Counter(gpu.device.ops))
    if graph:
        gpu.device.ops.clear()
        assert graphs.run(*step) is not None
        outside = Counter(gpu.device.ops)
        assert sum(outside.values()) <= 12, f"outside of the graph: {outside}"
    runs = 2 if graph else 1  # once to try it out, and the capture
    layer = launched[1] - launched[0]
    layer -= Counter({name: layer[name] for name in ("empty_like", "new_empty")})  # no kernels
    # Attention is one kernel, and where it splits the KV, as in a graph, one more that merges.
    assert sum(layer.values()) / runs + 1 <= most, layer
    names = ("fused_add_rmsnorm", "rope", "silu_and_mul")
    assert [layer[name] / runs for name in names] == [2, 1, 1]
    products = layer["mm"] + layer["addmm"]
    assert products / runs == 4, "one product for queries, keys and values, one for gate and up"


KERNELS = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "apply_rope_with_cos_sin_cache_inplace")


def written(kernel: str, result: Any, args: Any, options: Any) -> torch.Tensor:
    """What a kernel has written; RoPE, among others, the keys."""
    found = {"rmsnorm": [result], "silu_and_mul": [options.get("out")]}.get(kernel, args)
    tensor: torch.Tensor = found[2 if kernel.startswith("apply_rope") else 0]
    return tensor


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_scale_in_any_kernel_is_refused_at_load(folders, gpu, kernel, monkeypatch, caplog):
    right = getattr(gpu.flashinfer, kernel)

    def wrong(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        written(kernel, result, args, options).mul_(1.05)
        return result

    monkeypatch.setattr(gpu.flashinfer, kernel, wrong)
    caplog.set_level("INFO", "radixcache")
    assert isinstance(load(folders["qwen3", 2]), TransformersModel)
    assert "come out wrong" in caplog.text


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fails", [True, False])
def test_torch_stands_in_for_kernels_that_do_not_run(
    folders, gpu, kernel, fails, monkeypatch, caplog
) -> None:
    right = getattr(gpu.flashinfer, kernel)

    def broken(*args: Any, **options: Any) -> Any:
        if fails:
            raise RuntimeError("no kernel image is available\nmore lines")
        result = right(*args, **options)
        written(kernel, result, args, options).fill_(torch.nan)
        return result

    sequences = random_sequences()
    with _disable_current_modes():
        plain = plain_logits(folders["qwen3", 2], sequences)
    monkeypatch.setattr(gpu.flashinfer, kernel, broken)
    model = load(folders["qwen3", 2])
    assert isinstance(model, Decoder) and "layers by radixcache with torch" in model.placement
    (record,) = caplog.records
    why = "no kernel image is available" if fails else "its kernels give wrong results"
    assert record.getMessage().endswith(why)
    got = [rows.cpu() for rows in run_steps(model, sequences, STEPS[1], 4)]
    assert relative_error(got, plain) < 1e-4
