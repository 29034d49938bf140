"""`LLM` for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from radixcache.errors import EngineStopped, InvalidRequest
from radixcache.runtime.engine.explain import Explanation
from radixcache.runtime.engine.named_prefixes import NamedPrefix
from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.engine.request import Request
from radixcache.runtime.engine.worker import News
from radixcache.runtime.llm import LLM, Finals, Outputs, Prompt, Prompts
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.tokenizer import Message

T = TypeVar("T")


class AsyncLLM:
    """A model with a prefix cache, for any number of tasks in any event loop.

    Every method does what `LLM`'s of that name does, and the event loop goes on in the meantime.
    A task that is cancelled, and a stream that is left, abort their requests; an error comes to the
    task whose requests it concerns. (vLLM's `AsyncLLM.generate` is `stream` here.)

    >>> async with AsyncLLM() as llm:  # doctest: +SKIP
    ...     async for output in llm.stream("..."):
    ...         print(output.outputs[0].new_text, end="")

    Args:
        model: as `LLM`'s, or an `LLM`, whose engine then serves threads and tasks together.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the engine's thread; who waits for an answer, or asks later, gets `EngineStopped`."""
        await asyncio.to_thread(self.llm.close)

    async def check_health(self) -> None:
        """Return once the engine has answered; `EngineStopped` if it never will."""
        await self.call(lambda: None)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        tokenise = partial(self.llm._inputs, prompts, sampling_params, special=prefix is None)
        inputs = await asyncio.to_thread(tokenise)
        job = Finals()
        async with aclosing(
            self._run(job, partial(self.llm._add, inputs, cache_salt, prefix))
        ) as ends:
            async for _ in ends:
                pass
        return job.outputs()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `LLM.stream`."""
        tokenise = partial(self.llm._inputs, [prompt], sampling_params, special=prefix is None)
        inputs = await asyncio.to_thread(tokenise)
        add = partial(self.llm._add, inputs, cache_salt, prefix)
        async with aclosing(self._run(Outputs(), add)) as outputs:
            async for output in outputs:
                yield output

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
            self.llm._render,
            tools=tools or (),
            template_kwargs=chat_template_kwargs,
            ask=add_generation_prompt,
            continue_final=continue_final_message,
        )
        texts = await asyncio.to_thread(render, messages, cache_salt)
        prompts: list[Prompt] = [{"prompt_token_ids": text.tokens} for text in texts]
        outputs = await self.generate(prompts, sampling_params, cache_salt=cache_salt)
        await asyncio.to_thread(self.llm._remember, texts, outputs)
        return outputs

    async def explain(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Explanation:
        """See `LLM.explain`."""
        explain = partial(
            self.llm.explain, prompt, prefix=prefix, cache_salt=cache_salt, tools=tools
        )
        return await asyncio.to_thread(explain)

    async def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        *,
        lifetime: float | None = None,
        cache_salt: str | None = None,
    ) -> NamedPrefix:
        """See `LLM.pin_prefix`."""
        pin = partial(self.llm.pin_prefix, name, prompt, lifetime=lifetime, cache_salt=cache_salt)
        return await asyncio.to_thread(pin)

    async def unpin_prefix(self, name: str, *, cache_salt: str | None = None) -> None:
        """See `LLM.unpin_prefix`."""
        await self.call(lambda: self.llm.prefixes.unpin(name, cache_salt))

    async def reset_prefix_cache(self) -> None:
        """See `LLM.reset_prefix_cache`."""
        await asyncio.to_thread(self.llm.reset_prefix_cache)

    async def call(self, function: Callable[[], T]) -> T:
        """See `LLM.call`."""
        return await asyncio.wrap_future(self.llm.worker.call(function))

    async def _run(
        self, job: Outputs | Finals, add: Callable[[], list[Request]]
    ) -> AsyncGenerator[Any, None]:
        """Submit a job; the iterator gives what it reports, and aborts it if closed early."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[list[News]] = asyncio.Queue()

        def tell(news: list[News]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(heard.put_nowait, news)

        try:
            await asyncio.wrap_future(self.llm.worker.submit(job, add, tell))
            while True:
                for news in await heard.get():
                    for item in news.items:
                        yield item
                    if news.error is not None:
                        raise news.error
                    if news.finished:
                        return
        finally:
            aborted = asyncio.wrap_future(self.llm.worker.abort(job))
            with suppress(EngineStopped):
                await asyncio.shield(aborted)  # whoever is cancelled twice aborts nevertheless
