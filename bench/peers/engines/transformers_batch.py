"""transformers' continuous batching, its loop kept running from request to request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from bench.peers.engines.cases import MAX_TOKENS, Answer, Request
from bench.peers.engines.transformers import greedy

PAGE = 256  # its default


class TransformersBatch:
    """The manager behind `generate_batch`, which would start a thread for every call."""

    version = transformers.__version__

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        self.manager = self._start()

    def _start(self) -> Any:
        config = greedy(16)
        config.eos_token_id = -1
        manager = self.model.init_continuous_batching(
            config,
            ContinuousBatchingConfig(
                num_blocks=MAX_TOKENS // PAGE,
                max_batch_tokens=2048,
                auto_switch_to_flash=False,  # else it looks for flash attention, over the network
            ),
        )
        manager.start()
        self.is_new = True
        return manager

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        start = time.perf_counter()
        self.is_new = False
        names = self.manager.add_requests(
            [request.tokens for request in requests],
            max_new_tokens=max_tokens,
            record_timestamps=True,
        )
        found: dict[str, Any] = {}
        while len(found) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result
            elif result is None and not self.manager.is_running():
                raise RuntimeError("its generation loop has ended")
        answers = []
        for name in names:
            result = found[name]
            if result.error:
                raise RuntimeError(result.error)
            first = result.timestamps[0] - start
            answers.append(Answer(first, result.generated_tokens, None))
        return answers

    def forget(self) -> None:
        if self.is_new:
            return
        self.manager.stop(block=True)
        self.manager.destroy()
        self.manager = self._start()
