"""Triton's products of rows with their experts, in its interpreter, against plain products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.spec import MLP, Experts
from radixcache.kernels.torch import experts
from radixcache.runtime.model.load import load_model
from tests.helpers.decoders import DECODERS
from tests.helpers.models import tiny_model
from tests.kernels.gpu import simulated_gpu
from tests.kernels.triton.triton_launches import launch_triton
from tests.runtime.model.steps import assert_right

pytest.importorskip("triton", reason="`make test-gpu` brings it")
from radixcache.kernels.triton import experts as triton_experts
from radixcache.kernels.triton import prefill as triton_prefill

if not triton_prefill.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize("seed", range(12))
def test_each_row_meets_its_expert(seed) -> None:
    """Experts without rows, with more than a tile of them, and sizes that fill no tile."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    count = int(rng.choice([2, 5, 128]))
    active, tokens = int(rng.integers(1, min(count, 4) + 1)), int(rng.choice([1, 3, 40]))
    columns, depth = int(rng.choice([16, 70, 128])), int(rng.choice([16, 64, 200]))
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    weight = torch.randn(count, columns, depth).to(dtype)
    bias = torch.randn(count, columns).to(dtype) if rng.random() < 0.5 else None
    used = torch.from_numpy(rng.permutation(count)[: max(active, count // 2)])
    flat = torch.stack([used[torch.randperm(len(used))[:active]] for _ in range(tokens)]).flatten()
    order = flat.argsort(stable=True)
    ends = (flat[:, None] <= torch.arange(count)).sum(0, dtype=torch.int32)

    def expected(rows: torch.Tensor) -> torch.Tensor:
        """Of rows [N, depth] in the order of `flat`."""
        each = zip(flat.tolist(), rows.double(), strict=True)
        found = torch.stack([weight[e].double() @ row for e, row in each])
        return found if bias is None else found + bias[flat].double()

    x = torch.randn(tokens, depth).to(dtype)
    found = triton_experts.grouped_product(x, weight, bias, ends, order, active)
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (8e-3, 5e-2)
    wanted = expected(x.repeat_interleave(active, 0))
    torch.testing.assert_close(found.double(), wanted[order], rtol=rtol, atol=atol)
    rows = torch.randn(len(order), depth).to(dtype)
    found = triton_experts.grouped_product(rows[order], weight, bias, ends, order)
    torch.testing.assert_close(found.double(), expected(rows), rtol=rtol, atol=atol)


def test_experts_add_up_to_what_torch_finds(monkeypatch) -> None:
    torch.manual_seed(3)
    spec = Experts(6, 2, MLP(40, bias=True))
    weights: dict[str, Any] = {"router": torch.randn(6, 32)}
    for name, shape in (("gate", (40, 32)), ("up", (40, 32)), ("down", (32, 40))):
        weights[f"experts.{name}"] = [*torch.randn(6, *shape)]
        weights[f"experts.{name}.bias"] = [*torch.randn(6, shape[0])]
    x = torch.randn(9, 32)
    wanted = experts.GroupedExperts(spec, weights, torch.float32)(x)
    product = triton_experts.grouped_product
    found = experts.GroupedExperts(spec, weights, torch.float32, product)
    torch.testing.assert_close(found(x), wanted, rtol=1e-4, atol=1e-3)


def test_a_model_of_experts_runs_by_them(tmp_path: Path, monkeypatch) -> None:
    path = tiny_model("qwen3_moe", tmp_path, tokenizer=False, **DECODERS["qwen3_moe"])
    with simulated_gpu() as gpu:
        launch_triton(gpu.device, monkeypatch)
        gpu.kernels.moe.is_compiled = False
        assert_right(path)
        model: Any = load_model(path, device="cuda", dtype="float32")
        made = model._layers._layers[0].experts
        assert made._product is triton_experts.grouped_product
