"""A conversation in which each turn computes only its new tokens."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from threading import Lock, get_ident
from typing import Any

import numpy as np

from radixcache.errors import EngineStopped, InvalidRequest
from radixcache.runtime.engine.input_processor import check_params
from radixcache.runtime.explanation import Explanation
from radixcache.runtime.llm import LLM
from radixcache.runtime.multimodal.prompt_images import keys_of
from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import check_tools
from radixcache.tokens import Tokens, as_tokens


class Chat:
    """A multi-turn conversation with a model.

    A turn's prompt is the token ids of the last prompt and answer, and the new text, which alone is
    tokenised (see `TokenHistory`). Generated text that would tokenise differently a second time
    therefore never costs a hit: all but the new text and the last sampled token is cached.

    Turns come one after the other: a thread that asks during another's turn waits for its end.

    >>> chat = Chat(llm, system="...")  # doctest: +SKIP
    >>> chat.ask("How old is Ada Byron?").outputs[0].text  # doctest: +SKIP

    Args:
        system: text of a system message.
        tools: functions that the model may call, in OpenAI's format. An answer's calls are in
            ``messages[-1].get("tool_calls")``; `ask` takes messages with their results.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        cache_salt: str | None = None,
    ) -> None:
        if not isinstance(llm, LLM):
            raise InvalidRequest(f"a Chat is with an LLM: Chat(LLM()), not {type(llm).__name__}")
        if not isinstance(system, str | None):
            kind = type(system).__name__
            raise InvalidRequest(f"system is a text, not {kind}: give messages to ask, or LLM.chat")
        check_tools(tools)
        self.llm = llm
        self.cache_salt = cache_salt
        self.tools = tools
        self._turn = Lock()
        self._asking: int | None = None
        """The thread whose turn it is."""
        self._tokens: Tokens | None = None
        """The last prompt and answer."""
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def fork(self) -> Chat:
        """A copy that goes on by itself, and shares the cached tokens so far.

        Fork before a question that may be edited later: another question to the copy computes only
        the tokens after the questions' common prefix.
        """
        twin = copy(self)
        twin._turn, twin._asking = Lock(), None
        self._tokens = twin._tokens = None  # neither uses them alone
        twin.messages = [*self.messages]
        return twin

    def close(self) -> None:
        """End the conversation: what it alone uses of the cache is evicted before all else. It may
        go on nevertheless, with what is still there."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            with suppress(EngineStopped):  # with it went the cache
                self.llm.call(lambda: self.llm.engine.end_conversation(tokens, self.cache_salt))

    def ask(
        self, text: str | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Say a text, parts of texts and images, or messages; the answer becomes part of the
        conversation."""
        *_, output = self.stream(text, sampling_params)
        return output

    def explain(self, text: str | Sequence[Message]) -> Explanation:
        """Why the prompt of `ask` would not be cached in full; see `LLM.explain`."""
        messages = [*self.messages, *_as_messages(text)]
        return self.llm.explain(messages, cache_salt=self.cache_salt, tools=self.tools)

    def stream(
        self, text: str | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Say `text` or messages, yielding the answer's state after every token.

        A turn that is not read to its end leaves the conversation unchanged.

        Raises:
            InvalidRequest: this thread has not read the previous turn to its end.
        """
        params = self.llm.default_params if sampling_params is None else sampling_params
        check_params(params)
        if params.n != 1:
            raise InvalidRequest("a conversation goes on with one answer: n must be 1")
        if self._asking == get_ident():
            raise InvalidRequest(
                "the turn before is not over: read its stream to the end, close it, or fork()"
            )
        with self._turn:
            self._asking = get_ident()
            try:
                yield from self._stream(text, params)
            finally:
                self._asking = None

    def _stream(
        self, text: str | Sequence[Message], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        messages = [*self.messages, *_as_messages(text)]
        prompt = self.llm.turns.encode(messages, self.cache_salt, tools=self.tools)
        output = None
        for output in self.llm.stream(prompt, params, cache_salt=self.cache_salt):
            yield output
        assert output is not None
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            return
        message: Message = {"role": "assistant", "content": answer.text}
        if self.tools:
            message = self.llm.read_message(output, self.tools, cache_salt=self.cache_salt)
        self.messages = [*messages, message]
        self.llm.turns.remember(prompt, answer.token_ids)
        keys = keys_of(prompt.tokens, prompt.images)
        self._tokens = np.concatenate([keys, as_tokens(answer.token_ids)])


def _as_messages(text: str | Sequence[Message]) -> Sequence[Message]:
    is_content = isinstance(text, str) or (
        isinstance(text, Sequence) and bool(text) and isinstance(text[0], Mapping)
        and "type" in text[0] and "role" not in text[0]
    )  # fmt: skip
    messages: Any = [{"role": "user", "content": text}] if is_content else text
    if not isinstance(messages, Sequence):
        raise InvalidRequest(f"say a text or a list of messages, not {type(text).__name__}")
    return messages
