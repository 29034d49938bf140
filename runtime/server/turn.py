"""The next message of a conversation, whichever API asks for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from radixcache.runtime.engine.outputs import CompletionOutput, Delta, RequestOutput
from radixcache.runtime.engine.sampling import SamplingParams
from radixcache.runtime.llm import Message
from radixcache.runtime.server.backend import Backend
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.generation import finish
from radixcache.runtime.server.jobs import Job, PromptDelta
from radixcache.runtime.text.history import TokenisedText
from radixcache.runtime.text.tool_calls import Call, Piece, Tool, ToolChoice


@dataclass(frozen=True)
class Turn:
    """What is asked for.

    Attributes:
        messages: as chat templates take them: `content` is a string; an assistant's `tool_calls`
            are [{"id", "type", "function": {"name", "arguments": dict}}]; role "tool" has a
            `tool_call_id`.
        params: without the grammar of tools, which `begin` adds.
        template_kwargs: more values that the chat template takes.
        continue_final: the last message goes on instead of a new one beginning.
        prefix: name of a pinned prefix that the messages go on from.
        explain: keep why prompt tokens were not cached.
    """

    messages: list[Message]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    cache_salt: str | None = None
    prefix: str | None = None
    stream: bool = False
    explain: bool = False


@dataclass(frozen=True)
class Reply:
    """One of the messages that came, as a whole; see `CompletionOutput`.

    Attributes:
        content: None if the message consists of calls or reasoning only.
    """

    index: int
    content: str | None
    reasoning: str | None
    calls: tuple[Call, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None


async def begin(backend: Backend, turn: Turn, client: Hashable) -> Answers:
    """Queue a turn. Whoever gets its answers must read them to the end, or end their `job`.

    Raises:
        ApiError: it is refused.
    """
    messages = turn.messages
    if turn.prefix is not None:
        prefix = await backend.find_prefix(turn.prefix, turn.cache_salt)
        before = backend.prefix_messages.get(prefix)
        if before is None:
            raise ApiError.invalid(
                f"the prefix {turn.prefix!r} was pinned as text: it cannot begin a conversation",
                "prefix",
            )
        messages = [*before, *messages]
    prompt = await backend.encode_chat(messages, turn.cache_salt, client)
    job = await backend.submit([prompt.tokens], turn.params, turn, client)
    return Answers(backend, turn, prompt, job)


class Answers:
    """The `n` messages that come, piece by piece or as a whole.

    Attributes:
        job: the request of the engine; its `deltas` are for `pieces`.
        prompt: what the model was given.
    """

    def __init__(self, backend: Backend, turn: Turn, prompt: TokenisedText, job: Job) -> None:
        self.turn = turn
        self.prompt = prompt
        self.job = job
        self._backend = backend

    @property
    def output(self) -> RequestOutput:
        """What the engine knows of the request: tokens and times."""
        return self.job.requests[0].output()

    def pieces(self, news: PromptDelta) -> list[Piece]:
        """What the message `news.delta.index` gained; with its end, all that was held back."""
        text = news.delta.text
        return [Piece("content", text)] if text else []

    def finish_reason(self, end: Delta | CompletionOutput) -> str | None:
        """Why a message ended: as the engine says, or "tool_calls"."""
        return end.finish_reason

    async def messages(self, request: Request) -> list[Reply]:
        """The messages once they are there, and remembered; for a turn that is not streamed."""
        outputs = await finish(self.job, request)
        self.remember(outputs)
        return [
            Reply(
                index=answer.index,
                content=answer.text,
                reasoning=None,
                calls=(),
                finish_reason=self.finish_reason(answer),
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
            )
            for answer in outputs[0].outputs
        ]

    def remember(self, outputs: Sequence[RequestOutput]) -> None:
        """Let conversations go on from these messages; at the end of a stream."""
        self._backend.remember(self.prompt, outputs[0])
