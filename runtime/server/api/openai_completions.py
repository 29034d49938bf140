"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from radixcache.runtime.outputs import CompletionOutput, Delta, RequestOutput
from radixcache.runtime.server.api.exchange import JSON, STREAM_RESPONSE, find_prefix, submit
from radixcache.runtime.server.api.extension import extension
from radixcache.runtime.server.api.openai_chunks import Chunks, clamp, head_of
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import Job
from radixcache.runtime.server.protocol.openai import CompletionRequest
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.runtime.tokens.detokenizer import TextOffsets
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.tokens import TokensLike, as_tokens

router = APIRouter(route_class=BodyRoute)

Logprobs = Sequence[dict[int, float] | None]


@router.post("/v1/completions", responses={**STREAM_RESPONSE})
async def completions(body: CompletionRequest, request: Request, context: ContextDep) -> Any:
    """Complete one prompt or several."""
    head = head_of(body, context, "cmpl", "text_completion")
    params = body.sampling_params(context.completion_defaults)
    client = client_of(request, body.cache_salt)
    context.jobs.check_room(len(body.prompts) * params.n, client)
    prompts = await encode_prompts(body, context, request)
    echoes = await _echoes(body, context, client)
    job = await submit(context, prompts, params, client, body.cache_salt, bool(body.stream))
    return await _Completion(body, context, head, params.n, job, echoes).answer(request)


async def encode_prompts(
    body: CompletionRequest, context: ServingContext, request: Request
) -> list[TokensLike]:
    """The token ids of the prompts, each after those of the named prefix, if any."""
    client = client_of(request, body.cache_salt)
    prefix = body.prefix and await find_prefix(context, body.prefix, body.cache_salt)
    special = not prefix and body.add_special_tokens is not False
    tokens: list[TokensLike] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            if tokens and await request.is_disconnected():
                raise ApiError(499, "the client has hung up")
            encode = partial(Tokenizer.encode, text=prompt, special=special)
            tokens.append(await context.tokenizing.run(encode, client))
        else:
            tokens.append(prompt)
    if not prefix:
        return tokens
    return [np.concatenate((prefix.tokens, as_tokens(own))) for own in tokens]


async def _echoes(body: CompletionRequest, context: ServingContext, client: Hashable) -> list[str]:
    if not body.echo:
        return []

    def decode(tokenizer: Tokenizer) -> list[str]:
        return [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompts]

    return await context.tokenizing.run(decode, client)


class _Completion(Chunks[CompletionRequest]):
    """The choices are the completions of each prompt in turn."""

    def __init__(
        self,
        body: CompletionRequest,
        context: ServingContext,
        head: JSON,
        n: int,
        job: Job,
        echoes: list[str],
    ) -> None:
        super().__init__(body, context, head, job)
        self._n = n
        self._echoes = echoes
        self._offsets: dict[int, TextOffsets] = {}
        """Finds where tokens begin in each choice's text, for log-probabilities."""
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> JSON:
        choices = [
            {
                "prompt_logprobs": self.prompt_logprobs(output),
                "token_ids": None,
                "prompt_token_ids": None,
                **self._choice(number, completion),
            }
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        more = {
            "usage": self.usage(outputs),
            "radixcache": extension(self.context, self.job, self.body),
        }
        return {**self.head, "choices": choices, **more}

    def chunks_of(self, prompt: int, delta: Delta) -> Iterator[JSON]:
        choice = self._choice(prompt, delta)
        logprobs, ids = choice["logprobs"], choice.get("token_ids")
        if choice["text"] or delta.finish_reason or (logprobs and logprobs["tokens"]) or ids:
            yield self.chunk(choice)

    def _places(self, start: int) -> TextOffsets:
        """Finds where tokens begin in a text that follows `start` characters."""
        shown = self.body.skip_special_tokens is False
        return TextOffsets(self.context.tokenizer, start, shown)

    def _choice(self, prompt: int, gained: Delta | CompletionOutput) -> JSON:
        """The choice with what a completion gained; it begins with the echo."""
        index = prompt * self._n + gained.index
        text, tokens = gained.text, gained.token_ids
        logprobs: Logprobs | None = gained.logprobs
        ids: JSON = {"token_ids": tokens} if self.body.return_token_ids else {}
        starts: list[int] = []
        if index not in self._begun:
            self._begun.add(index)
            request = self.job.requests[prompt]  # the prompt is final by now
            before = request.prompt_token_ids.tolist()
            if ids:
                ids["prompt_token_ids"] = before
            if self._echoes:
                text = self._echoes[prompt] + text
                if logprobs is not None:
                    starts = [*map(self._places(0).add, before)]
                    tokens = before + tokens
                    logprobs = [*(request.prompt_logprobs or []), *logprobs]
        shown = self._logprobs(tokens, logprobs)
        if shown is not None:
            if index not in self._offsets:
                echo = self._echoes[prompt] if self._echoes else ""
                self._offsets[index] = self._places(len(echo))
            shown["text_offset"] = [*starts, *map(self._offsets[index].add, tokens[len(starts) :])]
        return {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": gained.finish_reason,
            "stop_reason": gained.stop_reason,
            **ids,
        }

    def _logprobs(self, tokens: list[int], logprobs: Logprobs | None) -> JSON | None:
        if logprobs is None:
            return None
        name, tops = self.token_name, [*zip(tokens, logprobs, strict=True)]
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [top and clamp(top[token]) for token, top in tops],
            "top_logprobs": [
                top and {name(t): clamp(p) for t, p in top.items()} for top in logprobs
            ],
        }
