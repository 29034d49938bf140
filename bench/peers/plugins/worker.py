# mypy: disable-error-code="import-not-found"
"""One engine's side: answers the chats of a line, so many at once; with the plugin, or without.

python -m bench.peers.plugins.worker vllm|sglang MODEL TOKENS BLOCK_SIZE on|off
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from bench.peers.process import serve

NAME, MODEL, TOKENS, BLOCK, PLUGIN = sys.argv[1:6]
ANSWER = 8


class VLLM:
    def __init__(self) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import vllm

        self.version = vllm.__version__
        self._vllm = vllm
        transfer = {"kv_connector": "RadixCacheConnector", "kv_role": "kv_producer"}
        self._llm = vllm.LLM(
            MODEL, skip_tokenizer_init=True, dtype="float32", block_size=int(BLOCK),
            enable_prefix_caching=True, num_gpu_blocks_override=int(TOKENS) // int(BLOCK),
            kv_cache_memory_bytes=256 << 20, disable_log_stats=False,
            **({"kv_transfer_config": transfer} if PLUGIN == "on" else {}),
        )  # fmt: skip

    def answer(self, chats: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False
        )
        prompts: list[Any] = [
            {"prompt_token_ids": chat["tokens"]}
            | ({"cache_salt": chat["salt"]} if chat["salt"] else {})
            for chat in chats
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


class SGLang:
    def __init__(self) -> None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        import sglang

        self.version = sglang.__version__
        self._llm = sglang.Engine(
            model_path=MODEL, device="cpu", attention_backend="torch_native", dtype="float32",
            disable_cuda_graph=True, skip_tokenizer_init=True, max_total_tokens=int(TOKENS),
            page_size=int(BLOCK), sampling_backend="pytorch", log_level="info",
            enable_metrics=True,
            **({"radix_cache_backend": "radixcache"} if PLUGIN == "on" else {}),
        )  # fmt: skip

    def answer(self, chats: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
        params = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        outputs = self._llm.generate(
            input_ids=[chat["tokens"] for chat in chats],
            sampling_params=params,
            cache_salt=[chat["salt"] or "" for chat in chats],
        )
        return [(list(o["output_ids"]), o["meta_info"]["cached_tokens"]) for o in outputs]


def load() -> tuple[VLLM | SGLang, str]:
    engine = VLLM() if NAME == "vllm" else SGLang()
    return engine, engine.version


def answer(engine: VLLM | SGLang, request: dict[str, Any]) -> dict[str, Any]:
    at_once, chats, told = request["at_once"], request["chats"], []
    start, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(chats), at_once):
        told += engine.answer(chats[first : first + at_once])
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"told": told, "seconds": seconds, "cpu": cpu}


if __name__ == "__main__":
    serve(load, answer)
