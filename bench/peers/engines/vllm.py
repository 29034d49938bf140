# mypy: disable-error-code="import-not-found"
"""vLLM on the CPU, set up for speed: one process, no tokenizer, no text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import KV_BYTES, Answer, Request

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it binds its threads to one core here
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
from vllm import LLM, SamplingParams


class VLLM:
    """Blocks of 32 tokens, unless `options` say otherwise."""

    version = vllm.__version__

    def __init__(self, folder: Path, **options: Any) -> None:
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enable_prefix_caching=True,
            kv_cache_memory_bytes=KV_BYTES,
            disable_log_stats=False,
            **{"block_size": 32, **options},
        )

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        prompts: list[Any] = [
            {"prompt_token_ids": request.tokens}
            | ({"cache_salt": request.salt} if request.salt else {})
            for request in requests
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            Answer(
                output.metrics.first_token_latency,
                list(output.outputs[0].token_ids),
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
