"""`LLM` for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from radixcache.errors import InvalidRequest
from radixcache.runtime.engine.input_processor import Prompt, Prompts
from radixcache.runtime.engine.pooling_inputs import Output, Pooled, Texts, pooled_outputs
from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.llm import LLM
from radixcache.runtime.outputs import (
    EmbeddingOutput,
    RequestOutput,
    ScoringOutput,
)
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.tokenizer import Message

P = ParamSpec("P")
T = TypeVar("T")


def _on_thread(
    method: Callable[Concatenate[LLM, P], T],
) -> Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]:
    """A method of `LLM` as a coroutine that runs it on a thread."""

    @wraps(method)
    async def call(self: AsyncLLM, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.llm, *args, **kwargs)

    return call


class AsyncLLM:
    """A model with a prefix cache, for any number of tasks in any event loop.

    Each method does what `LLM`'s method of that name does, without blocking the event loop.
    Cancelling a task or closing a stream aborts its requests; an error is raised in the task whose
    requests failed. (vLLM's `AsyncLLM.generate` is `stream` here.)

    >>> async with AsyncLLM() as llm:  # doctest: +SKIP
    ...     async for output in llm.stream("..."):
    ...         print(output.outputs[0].new_text, end="")

    Args:
        model: as for `LLM`, or an `LLM`, whose engine then serves threads and tasks.
        options: `LLM`'s other arguments.

    Attributes:
        llm: the `LLM` underneath.
    """

    def __init__(self, model: LLM | str | Path | None = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise InvalidRequest(f"an LLM is given: {', '.join(options)} would change nothing")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def check_health(self) -> None:
        """Wait until the engine answers; `EngineStopped` if it has stopped."""
        await self.call(lambda: None)

    async def call(self, function: Callable[[], T]) -> T:
        """See `LLM.call`."""
        return await asyncio.wrap_future(self.llm.worker.call(function))

    close = _on_thread(LLM.close)
    explain = _on_thread(LLM.explain)
    pin_prefix = _on_thread(LLM.pin_prefix)
    unpin_prefix = _on_thread(LLM.unpin_prefix)
    reset_prefix_cache = _on_thread(LLM.reset_prefix_cache)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        process = partial(self.llm.inputs.process, special=prefix is None, cache_salt=cache_salt)
        inputs = await asyncio.to_thread(process, prompts, sampling_params)
        stream = Stream(loop=asyncio.get_running_loop())
        add = partial(self.llm.add, inputs, cache_salt, prefix)
        async with aclosing(self.llm.worker.read_async(stream, add)) as ends:
            async for _ in ends:
                pass
        return stream.outputs()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `LLM.stream`."""
        process = partial(self.llm.inputs.process, special=prefix is None, cache_salt=cache_salt)
        inputs = await asyncio.to_thread(process, [prompt], sampling_params)
        stream = Stream(every_token=True, loop=asyncio.get_running_loop())
        add = partial(self.llm.add, inputs, cache_salt, prefix)
        async with aclosing(self.llm.worker.read_async(stream, add)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """See `LLM.embed`."""
        make = partial(self.llm.pooling_inputs.embed, texts, dimensions, instruction)
        return await self._pool(make, cache_salt)

    async def score(
        self,
        query: Texts,
        documents: Texts,
        *,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """See `LLM.score`."""
        make = partial(self.llm.pooling_inputs.score, query, documents, instruction)
        return await self._pool(make, cache_salt)

    async def _pool(
        self, make: Callable[[], Pooled[Output]], cache_salt: str | None
    ) -> list[Output]:
        pooled, stream = await asyncio.to_thread(make), Stream(loop=asyncio.get_running_loop())
        add = partial(self.llm.add, pooled.inputs, cache_salt, pools=True)
        async with aclosing(self.llm.worker.read_async(stream, add)) as ends:
            async for _ in ends:
                pass
        return pooled_outputs(pooled, stream)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """See `LLM.chat`."""
        render = partial(
            self.llm.inputs.render,
            tools=tools or (),
            template_kwargs=chat_template_kwargs,
            ask=add_generation_prompt,
            continue_final=continue_final_message,
        )
        texts = await asyncio.to_thread(render, messages, cache_salt)
        outputs = await self.generate(texts, sampling_params, cache_salt=cache_salt)
        await asyncio.to_thread(self.llm.inputs.remember, texts, outputs)
        return outputs
