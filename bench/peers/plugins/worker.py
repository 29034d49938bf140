# mypy: disable-error-code="import-not-found"
"""One engine's side: answers the chats of a line, so many at once; with the plugin, or without.

python -m bench.peers.plugins.worker vllm|sglang MODEL TOKENS BLOCK_SIZE on|off
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.engines.cases import Answer, Engine, Request
from bench.peers.process import serve

ANSWER = 8


class SGLang:
    def __init__(self, folder: Path, **options: Any) -> None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        import sglang

        self.version = sglang.__version__
        self._llm = sglang.Engine(
            model_path=str(folder), device="cpu", attention_backend="torch_native", dtype="float32",
            disable_cuda_graph=True, skip_tokenizer_init=True, sampling_backend="pytorch",
            log_level="info", enable_metrics=True, **options,
        )  # fmt: skip

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        outputs = self._llm.generate(
            input_ids=[request.tokens for request in requests],
            sampling_params=params,
            cache_salt=[request.salt or "" for request in requests],
        )
        return [
            Answer(0.0, list(o["output_ids"]), o["meta_info"]["cached_tokens"]) for o in outputs
        ]

    def forget(self) -> None:
        self._llm.flush_cache()


def load() -> tuple[Engine, str]:
    name, model, tokens, block, plugin = sys.argv[1:6]
    options: dict[str, Any]
    settings: dict[str, Any]
    if name == "sglang":
        options = {"max_total_tokens": int(tokens), "page_size": int(block)}
        settings = {"radix_cache_backend": "radixcache"}
        make: Any = SGLang
    else:
        blocks = int(tokens) // int(block)
        options = {"num_gpu_blocks_override": blocks, "block_size": int(block)}
        transfer = {"kv_connector": "RadixCacheConnector", "kv_role": "kv_producer"}
        settings = {"kv_transfer_config": transfer}
        make = import_module("bench.peers.engines.vllm").VLLM
    engine: Engine = make(Path(model), **options, **(settings if plugin == "on" else {}))
    return engine, engine.version


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    asked = [Request(chat["tokens"], salt=chat["salt"]) for chat in request["chats"]]
    at_once, served, start = request["at_once"], [], time.perf_counter()
    for first in range(0, len(asked), at_once):
        answers = engine.generate(asked[first : first + at_once], ANSWER)
        served += [(one.tokens, one.cached) for one in answers]
    return {"answers": served, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    serve(load, answer)
