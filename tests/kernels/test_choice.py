"""Which backend is taken, and what is said when it is not the fast one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from radixcache.kernels import choose
from radixcache.kernels.attention import LayerKind
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.torch.attention import TorchAttention
from tests.kernels.gpu import Gpu, simulated_gpu
from tests.kernels.gpu_attention import Attention

KINDS = [LayerKind(8, 2, 64, 64, 0.125), LayerKind(8, 2, 64, 64, 0.125, window=100)]
GPU = torch.device("cuda", 0)
NAME = "radixcache.kernels.flashinfer.attention"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu(any_dtype=False) as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("problem", "dtype", "taken"),
    [
        (None, torch.float32, NativeAttention),
        (None, torch.bfloat16, NativeAttention),
        (None, torch.float16, TorchAttention),
        ("no C++ compiler", torch.float32, TorchAttention),
    ],
)
def test_a_cpu_takes_native_kernels_or_torch_and_says_nothing(
    monkeypatch, caplog, problem, dtype, taken
) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.setattr(choose, "problem", lambda: problem)
    backend = choose.choose_attention(torch.device("cpu"), dtype, KINDS)
    assert type(backend) is taken and not caplog.records


def test_a_gpu_takes_flashinfer_after_every_kernel_has_run(gpu, caplog) -> None:
    caplog.set_level(logging.INFO)
    backend = choose.choose_attention(GPU, torch.bfloat16, KINDS)
    assert backend.name.startswith("FlashInfer 0.")
    assert gpu.kernels.calls.keys() >= {"paged", "ragged", "append"}
    assert not gpu.kernels.calls["merge"]
    assert "compiles kernels" in caplog.text and "is ready after" in caplog.text
    backend = choose.choose_attention(GPU, torch.bfloat16, KINDS[:1])  # no window: cascades
    assert backend.reads_shared_once
    assert gpu.kernels.calls["merge"]


def test_without_flashinfer_one_sentence_names_the_extra(gpu, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    backend = choose.choose_attention(GPU, torch.bfloat16, KINDS)
    assert isinstance(backend, TorchAttention)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    assert "pip install '.[cuda]' in a checkout" in record.getMessage()


def test_triton_is_taken_where_flashinfer_does_not_run(gpu, monkeypatch, caplog) -> None:
    triton = TorchAttention(GPU)
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.setattr(choose, "make_triton", lambda *_: triton)
    assert choose.choose_attention(GPU, torch.bfloat16, KINDS) is triton
    (record,) = caplog.records
    assert record.getMessage().startswith("attention runs in Triton: FlashInfer is not installed")


@pytest.mark.parametrize(("dtype", "kinds", "reason"), [
    (torch.float64, KINDS, "not torch.float64"),
    (torch.bfloat16, [LayerKind(4, 4, 80, 80, 0.1)], "no kernel for heads of 80/80"),
])  # fmt: skip
def test_what_flashinfer_cannot_do_falls_back_with_the_reason(gpu, caplog, dtype, kinds, reason):
    assert isinstance(choose.choose_attention(GPU, dtype, kinds), TorchAttention)
    assert reason in caplog.text


def test_kernels_that_fail_or_compute_nonsense_fall_back(gpu, monkeypatch, caplog) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("nvcc not found\nmore lines")

    monkeypatch.setattr(Attention, "paged_run", fail)
    assert isinstance(choose.choose_attention(GPU, torch.bfloat16, KINDS), TorchAttention)
    assert "does not run here: nvcc not found" in caplog.text and "more lines" not in caplog.text
    monkeypatch.undo()
    caplog.clear()
    monkeypatch.setattr(Attention, "_attend", lambda self, q, k, v, *_: (q + 1, q[..., 0]))
    assert isinstance(choose.choose_attention(GPU, torch.bfloat16, KINDS), TorchAttention)
    assert "wrong results" in caplog.text
