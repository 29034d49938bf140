"""Prints the library of the native kernels, and digests of what they compute: `python -m ...`.

Products in all formats, attention, and the bundled model's log-probabilities: two libraries for the
same width of vectors have to give the same.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from radixcache import LLM, SamplingParams
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.build import build
from radixcache.kernels.native.linear import PackedLinear
from tests.kernels.native.panels import FORMATS, make
from tests.kernels.reference import make_step, run


def digest(*tensors: torch.Tensor) -> str:
    parts = [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    print(build())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(30, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
        for kind in FORMATS:
            layer = PackedLinear(make(kind, 100, 576))
            print(dtype, kind, digest(layer(x), layer(x[:1]), layer(x[:7])))
        step = make_step(3, [(1, 700), (40, 300), (300, 0)], dim=40, dtype=dtype)
        print(dtype, "attention", digest(run(step, NativeAttention(), scale=0.2)))
    llm = LLM(kv_cache_memory_bytes="32MiB")
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5)
    (output,) = llm.generate(["| Name | Age |\n|---|---|\n| Mei | 64 |\nHow old is Mei?"], params)
    said = output.outputs[0].logprobs
    assert said is not None
    numbers = [number for position in said for number in position.values()]
    print("model", hashlib.sha256(struct.pack(f"{len(numbers)}d", *numbers)).hexdigest())


if __name__ == "__main__":
    main()
