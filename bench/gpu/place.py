"""Where the check runs (an NVIDIA GPU, or a simulated one in a rehearsal), and its sizes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from radixcache.bench.gpu.report import NotRun
from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.kernels.choice import make_flashinfer, make_triton
from radixcache.runtime.model import cuda_graphs

Work = Callable[[], Any]

_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def llama(*values: int) -> dict[str, int]:
    return dict(zip(_FIELDS, values, strict=True))


LLAMA_1B = llama(0, 2048, 8192, 16, 32, 8, 64, 131_072)
"""The shape of Llama-3.2-1B, but for its vocabulary."""

LLAMA_8B = llama(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072)
"""The shape of Llama-3.1-8B."""

_CLEAR = llama(2048, 512, 1024, 4, 8, 2, 64, 4096)


class Sizes(NamedTuple):
    """Sizes that the sections use, with their values on a GPU. Lengths are in tokens."""

    repeat: int = 7
    # Ceilings
    copy_bytes: int = 8 << 30
    matmul: int = 8192
    # Correctness
    head_dims: tuple[int, ...] = (64, 128)
    shrink: int = 1  # lengths are divided by it
    far_elements: int = (1 << 31) + (1 << 24)  # of one page tensor, whose last pages are used
    other_dtypes: tuple[torch.dtype, ...] = (torch.float16,)
    # Equality, LLM
    small: dict[str, int] = _CLEAR  # a model in whose logits greedy choices are clear
    stem: int = 1100
    answer: int = 24
    # Decode, TTFT
    big: dict[str, int] = LLAMA_8B
    decode_batches: tuple[int, ...] = (1, 16, 64, 256)
    decode_context: int = 1024
    steps: int = 15
    cached: tuple[int, ...] = (4096, 16_384, 32_768)
    questions: tuple[int, ...] = (16, 64, 256)
    chunk: int = 8192  # max_num_batched_tokens
    # Serving: each request is a question on the shortest of `cached`
    served: dict[str, int] = LLAMA_1B
    served_answer: int = 64
    clients: int = 32
    requests: int = 256
    # Cascade
    heads: tuple[tuple[int, int], ...] = ((32, 8), (8, 1))  # (query heads, KV heads)
    head_dim: int = 128
    rows: tuple[int, ...] = (4, 8, 16, 64)
    shared: tuple[int, ...] = (256, 512, 1024, 2048, 8192)
    own: int = 128
    experts: tuple[int, ...] = (128, 8, 2048, 768)  # count, active, hidden and inner: Qwen3-30B-A3B
    beyond_l2: int = 200 << 20  # bytes of pages in all layers together


@dataclass
class Place:
    """A device, with the sizes to run there, and ways to run and time work on it.

    Attributes:
        out: the folder of the results.
        with_flashinfer: whether FlashInfer runs there; else plain torch alone.
        bandwidth: the device's best bytes per second; 0 if not measured.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    out: Path
    with_flashinfer: bool
    make_triton: Callable[..., AttentionBackend] = make_triton
    bandwidth: float = 0.0

    def make_backend(
        self, *kinds: LayerKind, dtype: torch.dtype | None = None, **kv_dtype: torch.dtype
    ) -> AttentionBackend:
        if not self.with_flashinfer:
            raise NotRun("FlashInfer does not run here")
        return make_flashinfer(self.device, dtype or self.dtype, kinds, **kv_dtype)

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).mul_(scale)

    def capture(self, work: Work) -> Work:
        """Capture `work` as a graph with its own memory; returns its replay."""
        return cuda_graphs.Capture(self.device)(work)

    def gpu_seconds(self, works: Sequence[Work], repeat: int = 7) -> float:
        """Median seconds per work on the device; the host's launches do not count.

        All works are captured into one graph. They should touch different memory, larger than the
        L2 cache together, as a model's layers do.
        """

        def all_works() -> torch.Tensor:
            for work in works:
                work()
            return torch.zeros(1, device=self.device)

        return self.replay_seconds(self.capture(all_works), repeat) / len(works)

    def replay_seconds(self, replay: Work, repeat: int = 7) -> float:
        """Median seconds of `replay` on the device."""
        taken = []
        for _ in range(repeat + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        return statistics.median(taken[2:])


def gpu_place(out: Path, with_flashinfer: bool) -> Place:
    torch.backends.cuda.matmul.allow_tf32 = False  # the references are float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # which plans anew for every shape in transformers
    if not with_flashinfer:
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # so nobody can import it
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(device, torch.bfloat16, Sizes(), out, with_flashinfer)
