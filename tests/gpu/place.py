"""Where the tests of a GPU run: on a real one, or on a simulated one at a fraction of the sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.kernels.capture import Capture
from radixcache.kernels.choose import make_flashinfer, probe_attention
from radixcache.runtime.engine import model_runner
from radixcache.runtime.model import cuda_graphs
from release.flashinfer_kernels import build_llama

Work = Callable[[], Any]

LAYER = LayerKind(32, 8, 128, 128, 128**-0.5)
"""A layer of Llama-3.1-8B."""

_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def llama(*values: int) -> dict[str, int]:
    return dict(zip(_FIELDS, values, strict=True))


@dataclass
class Place:
    """A device, and the sizes of what runs there.

    Attributes:
        shrink: lengths, rows and sizes are divided by it.
        clear: shape of a model in whose logits greedy choices are clear.
        served: shape of the model whose speed is measured.
        tolerance: the largest error of an attention's output over its largest value.
        problem: why FlashInfer does not run there, if it does not.
    """

    device: torch.device
    dtype: torch.dtype
    shrink: int
    clear: dict[str, int]
    served: dict[str, int]
    tolerance: float
    problem: Exception | None = None

    def backend(self, kind: LayerKind) -> AttentionBackend:
        """FlashInfer for these layers; the test is skipped where it does not run."""
        if self.problem is not None:
            pytest.skip(f"FlashInfer does not run here: {self.problem}")
        return make_flashinfer(self.device, self.dtype, [kind])

    def short(self, count: int, least: int = 1) -> int:
        return max(least, count // self.shrink)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def capture(self, work: Work) -> Work:
        """Capture `work` as a graph with its own memory; returns its replay."""
        return Capture(self.device)(work)

    def gpu_seconds(self, works: Sequence[Work]) -> float:
        """Median seconds per work on the device; the host's launches do not count."""

        def all_works() -> torch.Tensor:
            for work in works:
                work()
            return torch.zeros(1, device=self.device)

        return self.replay_seconds(self.capture(all_works)) / len(works)

    def replay_seconds(self, replay: Work) -> float:
        """Median seconds of `replay` on the device."""
        taken = []
        for _ in range(self.short(9, least=3)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        return statistics.median(taken[2:])


@contextmanager
def real_place() -> Iterator[Place]:
    """Skips where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every shape in transformers
    device = torch.device("cuda", torch.cuda.current_device())
    clear = llama(2048, 512, 1024, 4, 8, 2, 64, 4096)
    served = llama(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072)  # Llama-3.1-8B
    place = Place(device, torch.bfloat16, 1, clear, served, 2e-2)
    place.problem = problem_of_flashinfer(place)
    yield place


@contextmanager
def simulated_place() -> Iterator[Place]:
    """All lines run, and no time means anything. Skips without FlashInfer's Python."""
    from tests.helpers.simulated_cuda import CUDA
    from tests.kernels.gpu import simulated_gpu

    tiny = llama(256, 64, 64, 2, 4, 2, 16, 2048)
    with (
        simulated_gpu(),
        patch.object(model_runner, "MIN_SAVED", 1),
        patch.object(cuda_graphs, "batch_sizes", _three_sizes),
    ):
        yield Place(CUDA, torch.float32, 32, tiny, tiny, 1e-5)


def _three_sizes(largest: int) -> list[int]:
    """Of graphs: there are up to eleven, each of which is captured operation by operation."""
    return sorted({1, min(4, largest), largest})


def problem_of_flashinfer(place: Place) -> Exception | None:
    """Build its kernels where that is possible, and try it once."""
    try:
        backend = make_flashinfer(place.device, place.dtype, [LAYER])
        build_llama(place.dtype)
        probe_attention(backend, place.device, place.dtype, [LAYER])
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return None
