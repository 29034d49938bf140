"""The servers that the clients talk to; `python -m tests.clients.serve` for those elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from radixcache import LLM, SamplingParams
from tests.clients.evaluation import MAX_TOKENS, QUESTIONS, STOP
from tests.clients.script import answer
from tests.helpers.pooling_models import judging_model
from tests.helpers.scripted import scripted_llm
from tests.runtime.server.live import live


@contextmanager
def serve() -> Iterator[dict[str, Any]]:
    """A server of a scripted model at `url`, one of the bundled model at `bundled`, and one of a
    tiny model that embeds and scores at `pooling`; and what of the second its `LLM` itself says:
    `scores` and `texts`."""
    llm = LLM(kv_cache_memory_bytes="16MiB")
    own = {"scores": _scores(llm), "texts": _texts(llm)}
    with (
        TemporaryDirectory() as folder,
        LLM(judging_model(Path(folder)), kv_cache_memory_bytes="8MiB") as judge,
        live(scripted_llm(answer)) as scripted,
        live(llm) as bundled,
        live(judge, enable_pooling=True, served_model_name=["tiny"]) as pooling,
    ):
        urls = {"url": scripted.url, "bundled": bundled.url, "pooling": pooling.url}
        yield {**urls, **own}
        for server in (scripted, bundled, pooling):
            server.assert_idle()


def _scores(llm: LLM) -> list[list[tuple[float, bool]]]:
    """Of each question's answers the log-likelihood, and whether it is the likeliest."""
    encode = llm.tokenizer.encode  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)

    def score(question: str, choice: str) -> tuple[float, bool]:
        tokens = encode(f"{question} {choice}", special=False)
        start = len(encode(question, special=False))
        (output,) = llm.generate({"prompt_token_ids": tokens}, params)
        places = [*zip(tokens, output.prompt_logprobs or [], strict=True)][start:]
        sure = all(top is not None and top[token] == max(top.values()) for token, top in places)
        return sum(top[token] for token, top in places if top), sure

    return [[score(question, choice) for choice in choices] for question, choices in QUESTIONS]


def _texts(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=STOP)
    return [output.outputs[0].text for output in llm.generate([q for q, _ in QUESTIONS], params)]


if __name__ == "__main__":
    with serve() as served:
        print(json.dumps(served), flush=True)
        sys.stdin.read()  # until whoever started it ends
