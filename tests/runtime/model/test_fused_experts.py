"""Experts by FlashInfer's `cutlass_fused_moe`: its own Python over a stand-in for its C++."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.flashinfer.experts import FusedExperts
from radixcache.kernels.spec import MLP, Experts
from radixcache.kernels.torch.experts import GroupedExperts
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner
from radixcache.runtime.model.load import load_model
from tests.helpers.decoders import DECODERS
from tests.helpers.models import tiny_model
from tests.helpers.simulated_cuda import CUDA
from tests.kernels import moe
from tests.runtime.model.steps import STEPS, assert_right

pytestmark = pytest.mark.usefixtures("gpu")

KINDS = [("silu", True), ("gelu", True), ("gelu_tanh", True), ("clamped", True), ("relu2", False)]
FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe", "nemotron_h")
ODD = "qwen3_moe, 12 wide"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    options = {name: DECODERS[name] for name in FAMILIES}
    options[ODD] = {**DECODERS["qwen3_moe"], "moe_intermediate_size": 12}
    return {
        name: tiny_model(name.partition(",")[0], root / name, tokenizer=False, **each)
        for name, each in options.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_computes_the_experts_of_a_model(folders, gpu, family, caplog, monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(GroupedExperts, "mixed", counted(tried, GroupedExperts.mixed))
    for step in range(len(STEPS)):
        assert_right(folders[family], step)
    assert gpu.kernels.calls["cutlass_fused_moe"] > len(tried) == len(STEPS)
    assert not [each for each in caplog.records if each.name.startswith("radixcache")]


def counted(calls: list[int], method: Any) -> Any:
    def call(*args: Any) -> Any:
        calls.append(1)
        return method(*args)

    return call


def random_experts(kind: tuple[str, bool], dtype: torch.dtype, bias: bool = True) -> FusedExperts:
    """With weights as models have them: 256 wide, of variance 1 / 256."""
    inner, count = 96, 6
    activation, gated = kind
    each = MLP(inner, activation, gated, bias)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    names = {"up": (inner, 256), "down": (256, inner)}
    names |= {"gate": (inner, 256)} if gated else {}
    weights: dict[str, Any] = {"router": torch.zeros(count, 256, device=CUDA)}
    for name, shape in names.items():
        sizes = {f"experts.{name}": shape, f"experts.{name}.bias": shape[:1]}
        for key, size in list(sizes.items())[: 1 + bias]:
            made = torch.randn(count, *size, generator=generator) / size[-1] ** 0.5
            weights[key] = [*made.to(CUDA, dtype)]
    return FusedExperts(Experts(count, 2, each), weights, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding_is_no_difference(kind, dtype) -> None:
    for bias in (True, False):
        random_experts(kind, dtype, bias).compare()


RIGHT = moe._activated


def swapped(both: torch.Tensor, name: str, limits: dict[str, float]) -> torch.Tensor:
    return RIGHT(both.roll(both.shape[1] // 2, 1), name, limits)


FAULTS: dict[str, Any] = {
    "gate and up in the other order": swapped,
    "without a limit": lambda x, name, limits: RIGHT(x, name, limits | {"limit": torch.inf}),
    "another alpha": lambda x, name, limits: RIGHT(x, name, limits | {"alpha": 1.0}),
    "nothing added": lambda x, name, limits: RIGHT(x, name, limits | {"beta": 0.0}),
    "no number": lambda x, name, limits: RIGHT(x, name, limits) * torch.nan,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_another_activation_is_seen(fault, dtype, monkeypatch) -> None:
    monkeypatch.setattr(moe, "_activated", FAULTS[fault])
    with pytest.raises(RuntimeError, match="its kernel for experts is off by"):
        random_experts(("clamped", True), dtype).compare()


@pytest.mark.parametrize("of", ["factors", "experts", "biases", "sum"])
def test_another_sum_is_seen(of, gpu, monkeypatch) -> None:
    right = gpu.kernels.moe.cutlass_fused_moe

    def wrong(x, chosen, factors, fc1, bias1, fc2, bias2, out, *rest) -> None:
        if of == "factors":
            factors = factors.flip(1)
        if of == "experts":
            fc2 = fc2.roll(1, 0)
        if of == "biases":
            bias2 = None
        right(x, chosen, factors, fc1, bias1, fc2, bias2, out, *rest)
        if of == "sum":
            out.mul_(2)

    monkeypatch.setattr(gpu.kernels.moe, "cutlass_fused_moe", wrong)
    with pytest.raises(RuntimeError, match="off by"):
        random_experts(("silu", True), torch.bfloat16).compare()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("not built", "is not built; `flashinfer download-kernels` fetches it"),
        ("SM80", "is not for GPUs of SM80"),
        ("fails", "no kernel image is available"),
        ("wrong", "is off by"),
        ("waits", "operation not permitted when stream is capturing"),
    ],
)
def test_grouped_products_stand_in_with_one_warning(folders, gpu, fault, why, caplog, monkeypatch):
    def broken(*args: Any) -> None:
        if fault == "fails":
            raise RuntimeError("no kernel image is available\nmore lines")
        gpu.device.wait("it reads the rows of each expert")

    if fault == "not built":
        gpu.kernels.moe.is_compiled = False
    elif fault == "SM80":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    elif fault == "wrong":
        monkeypatch.setattr(moe, "_activated", swapped)
    else:
        run = SimpleNamespace(run_moe=broken)
        monkeypatch.setattr(gpu.kernels.moe, "init", lambda *_: run)
    stream = torch.cuda.current_stream()
    assert_right(folders["gpt_oss"])
    (record,) = caplog.records
    assert record.getMessage().startswith("experts run in torch, as grouped products: FlashInfer: ")
    assert why in record.getMessage() and "\n" not in record.getMessage()
    assert torch.cuda.current_stream() is stream


def test_sizes_that_the_kernel_does_not_take_run_as_grouped_products(folders, gpu, caplog) -> None:
    assert_right(folders[ODD])
    assert not gpu.kernels.calls["cutlass_fused_moe"] and not caplog.records


def test_a_graph_replays_the_kernel_with_each_steps_experts(folders) -> None:
    """Its weights, and nothing of one step's routing, are baked in."""
    model = load_model(folders["gpt_oss"], device="cuda", dtype="float32")
    rng = np.random.default_rng(2)
    steps = []
    for _ in range(3):
        batch = PagedBatch.of([np.array([n], np.int32) for n in range(3)], [1, 2, 3], [1, 2, 3], 4)
        steps.append((rng.integers(0, 256, 6).astype(np.int32), batch, np.array([0, 2, 5])))
    eager_pool, pool = model.allocate(8, 4), model.allocate(8, 4)
    graphs = CudaGraphRunner(model, pool, 4)
    graphs.capture()
    for tokens, batch, rows in steps:
        eager = model.forward(tokens, batch, rows, eager_pool).cpu()
        found = graphs.run(tokens, batch, rows)
        assert found is not None
        torch.testing.assert_close(found.cpu(), eager, rtol=1e-5, atol=1e-5)
