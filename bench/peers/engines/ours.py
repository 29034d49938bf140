"""radixcache, as it is."""

from __future__ import annotations

from pathlib import Path

import radixcache
from bench.peers.engines.cases import KV_BYTES, Answer, Request
from radixcache import LLM, SamplingParams


class Ours:
    """`LLM` with its default page size."""

    version = radixcache.__version__

    def __init__(self, path: Path, dtype: str = "auto") -> None:
        self.llm = LLM(path, kv_cache_memory_bytes=KV_BYTES, dtype=dtype)

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": request.tokens} for request in requests], params, use_tqdm=False
        )
        answers = []
        for output in outputs:
            ttft = output.metrics.ttft
            assert ttft is not None
            tokens = output.outputs[0].token_ids
            answers.append(Answer(ttft, tokens, output.num_cached_tokens))
        return answers

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
