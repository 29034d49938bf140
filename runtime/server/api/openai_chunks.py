"""What chats and plain completions of OpenAI's APIs share: chunks with choices."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from typing import TypeVar

from radixcache.runtime.outputs import Delta, RequestOutput
from radixcache.runtime.server.api.exchange import JSON, Exchange
from radixcache.runtime.server.api.extension import extension
from radixcache.runtime.server.jobs import Job, Prefilled, PromptDelta
from radixcache.runtime.server.protocol.openai import GenerationRequest
from radixcache.runtime.server.serving import ServingContext

R = TypeVar("R", bound=GenerationRequest)


def head_of(body: GenerationRequest, context: ServingContext, prefix: str, kind: str) -> JSON:
    """The first fields of a chat or a plain completion."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": context.check_model(body.model),
    }


class Chunks(Exchange[R]):
    """A chat or a plain completion, whose chunks have choices."""

    end_mark = "data: [DONE]\n\n"
    chunk_kind = "text_completion"

    def __init__(self, body: R, context: ServingContext, head: JSON, job: Job) -> None:
        super().__init__(body, context, head, job)
        self._usage: JSON = {"usage": None} if body.include_usage else {}
        self._completed = 0
        if body.include_progress:
            context.jobs.worker.follow(job)

    @abstractmethod
    def chunks_of(self, prompt: int, delta: Delta) -> Iterator[JSON]:
        """The chunks of a delta for the prompt with this index."""

    def chunk(self, *choices: JSON, **more: JSON) -> JSON:
        head = {**self.head, "object": self.chunk_kind}
        return {**head, "choices": choices, **self._usage, **more}

    def events(self, news: PromptDelta | Prefilled) -> Iterator[JSON]:
        if isinstance(news, PromptDelta):
            self._completed += len(news.delta.token_ids)
            options, completed = self.body.stream_options, self._completed
            if self._usage and options and options.continuous_usage_stats:
                prompt = self._num_prompt_tokens()
                counts = {"prompt_tokens": prompt, "completion_tokens": completed}
                self._usage["usage"] = {**counts, "total_tokens": prompt + completed}
            yield from self.chunks_of(*news)
        else:
            share = {"prompt_tokens": self._num_prompt_tokens(), "computed_tokens": news.tokens}
            yield self.chunk(radixcache=share)

    def _num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.job.requests)

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        """A chunk without choices, if the request asks for more than text."""
        more: JSON = {}
        if self.body.include_usage:
            more["usage"] = self.usage(outputs)
        if more or self.body.explain:
            more["radixcache"] = extension(self.context, self.job, self.body)
            yield self.chunk(**more)

    def token_name(self, token: int) -> str:
        """A token's name in logprobs: its text; its bytes, as in OpenAI's API, if they are no text;
        or its id if the request asks for that."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        data = self.context.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)

    def prompt_logprobs(self, output: RequestOutput) -> list[JSON | None] | None:
        """The log-probabilities of the prompt's tokens as vLLM has them, if they are asked for."""
        if self.body.prompt_logprobs is None:
            return None

        def describe(top: dict[int, float]) -> JSON:
            likeliest = sorted(top, key=lambda token: -top[token])[: self.body.prompt_logprobs]
            ranks = {token: rank for rank, token in enumerate(likeliest, 1)}
            return {
                str(token): {
                    "logprob": clamp(logprob),
                    "rank": ranks.get(token),
                    "decoded_token": text_of(token),
                }
                for token, logprob in top.items()
            }

        text_of = self.context.tokenizer.token_text
        return [None if top is None else describe(top) for top in output.prompt_logprobs or []]


def clamp(logprob: float) -> float:
    """A log-probability without infinity, which JSON lacks."""
    return max(logprob, -9999.0)
