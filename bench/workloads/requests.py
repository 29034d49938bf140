"""A gateway's log as a workload: bodies of OpenAI's API, each of them one request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixcache.bench.workloads.byte_level_bpe import Encode
from radixcache.bench.workloads.loaders import ANSWER, as_json, read_message
from radixcache.bench.workloads.records import is_json, name_of, read_records, read_text
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest

if TYPE_CHECKING:
    from radixcache.runtime.tokens.tokenizer import Tokenizer

Message = dict[str, Any]
"""As chat templates take it: its content is a text."""

Rendered = tuple[list[Tokens], Tokens]
"""A prompt in parts, and the answer, empty if that is unknown."""


class Joined:
    """Without a model: tools, then message after message."""

    how = "without a chat template (--model M has one)"

    def __init__(self, encode: Encode) -> None:
        self._tokens = cache(
            lambda text: np.array(encode(text.encode(errors="replace").decode()), np.int32)
        )

    def render(
        self, prompt: str | Sequence[Message], tools: list[Any], answer: Message | None
    ) -> Rendered:
        texts = [prompt] if isinstance(prompt, str) else [*map(spoken, prompt)]
        if tools:
            texts.insert(0, as_json(tools))
        return [*map(self._tokens, texts)], self._tokens(spoken(answer) if answer else "")


class Templated:
    """As a server of the model has it: its chat template, and what was tokens before stays them."""

    how = "in the model's chat template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        from radixcache.runtime.tokens.history import TokenHistory

        self._tokenizer = tokenizer
        self._history = TokenHistory(tokenizer)

    def render(
        self, prompt: str | Sequence[Message], tools: list[Any], answer: Message | None
    ) -> Rendered:
        said = spoken(answer) if answer else ""
        if isinstance(prompt, str):
            return [np.array(self._tokenizer.encode(prompt), np.int32)], self._plain(said)
        text = self._tokenizer.render_chat(prompt, tools=tools)
        before = self._history.encode(text)
        if answer:
            whole = self._tokenizer.render_chat([*prompt, answer], tools=tools, ask=False)
            # Some templates write a past answer otherwise than the model wrote it, less thoughts.
            said = whole[len(text) :].rstrip() if whole.startswith(text) else said
            self._history.remember(before, self._plain(said).tolist())
        return [before.tokens], self._plain(said)

    def _plain(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, special=False), np.int32)


Renderer = Joined | Templated


def spoken(message: Message) -> str:
    """Its text, and its calls of tools as JSON."""
    calls = message.get("tool_calls", ())
    return message["content"] + "".join(as_json(call.get("function", call)) for call in calls)


_SETTINGS = {"model", "max_tokens", "max_completion_tokens", "temperature", "stream"}
"""What a request has beside its messages, and a conversation of a data set has not."""


@dataclass
class _Logged:
    """A request as the log has it.

    Attributes:
        prompt: messages, a text or token ids.
        answer: if it is known.
        length: how many tokens the answer has, where it is not.
        after: which request it goes on from.
    """

    where: str
    prompt: Any
    tools: list[Any]
    model: str
    answer: Message | None
    length: int
    moment: float | None
    after: int | None = None
    turn: int = 0

    @property
    def messages(self) -> list[Message]:
        return self.prompt if isinstance(self.prompt[0], dict) else []


def load_requests(path: Path, renderer: Renderer, *, limit: int | None = None) -> Workload:
    """Records that are bodies of chat completions or completions, each one request.

    A body may stand under "body" or "request", also as text, and what was answered under
    "response". Requests come in the order of the file, or of their "timestamp" if all have one. One
    whose messages go on from an earlier request and its answer waits for that, and says what the
    answer was. Where nothing says it, an answer has 128 random tokens, or `max_tokens` if less.
    Several models share nothing.
    """
    logged = [_read(where, record) for where, record in read_records(path, limit)]
    if not logged:
        raise InvalidRequest(f"{path}: no request in it")
    if all(one.moment is not None for one in logged):
        logged.sort(key=lambda one: one.moment or 0.0)
    _follow(logged)
    models = list(dict.fromkeys(one.model for one in logged))
    known = sum(one.answer is not None for one in logged)
    shape = f"bodies of requests {renderer.how}, {known:,} answers known"
    if len(models) > 1:
        shape += f", to {len(models)} models, which share nothing"
    workload, rng = Workload(name_of(path), shape), np.random.default_rng(0)
    for one in logged:
        text = one.messages or (one.prompt if isinstance(one.prompt, str) else "")
        try:
            parts, said = renderer.render(text, one.tools, one.answer)
        except InvalidRequest as error:
            raise InvalidRequest(f"{one.where}: {error}") from None
        parts = parts if text else [np.array(one.prompt, np.int32)]
        if not any(map(len, parts)):
            raise InvalidRequest(f"{one.where}: a prompt without a token")
        if len(models) > 1:
            parts = [np.array([models.index(one.model)], np.int32), *parts]
        if not len(said):
            said = rng.integers(0, 1000, one.length, dtype=np.int32)
        workload.add(parts, said, after=one.after, turn=one.turn)
    return workload


def holds_requests(path: Path) -> bool:
    """Whether the first line of a file is a request as a gateway logs it."""
    first = next((line for line in read_text(path).split("\n") if line.strip()), "")
    record = json.loads(first) if first.lstrip()[:1] == "{" and is_json(first) else None
    match body := _inner(record, "messages", "prompt"):
        case None | {"messages": [*_, {"role": "assistant"}]}:
            return False
    return body is not record or not _SETTINGS.isdisjoint(record)


def _inner(value: Any, *wanted: str) -> dict[str, Any] | None:
    """The object that has one of the keys `wanted`: a record, or what it wraps, perhaps as text."""
    while True:
        if isinstance(value, str):
            value = json.loads(value) if is_json(value) else None
        if not isinstance(value, dict):
            return None
        if not value.keys().isdisjoint(wanted):
            return value
        value = value.get("body", value.get("request"))


def _read(where: str, record: Any) -> _Logged:
    body = (isinstance(record, dict) and _inner(record, "messages", "prompt")) or {}
    match body:
        case {"system": _, "messages": _}:
            raise InvalidRequest(f'{where}: "system" beside "messages" is no body of OpenAI\'s API')
        case {"messages": [_, *_] as messages}:
            prompt: Any = [_message(where, message) for message in messages]
        case {"prompt": str(prompt)} if prompt:
            pass
        case {"prompt": [_, *_] as prompt} if all(
            type(token) is int and 0 <= token < 1 << 31 for token in prompt
        ):
            pass
        case _:
            raise InvalidRequest(
                f'{where}: no request: a body has a list of "messages", or a "prompt" of one text '
                f'or its token ids, and may stand under "body" or "request"'
            )
    bounds = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    most = next((bound for bound in bounds if bound is not None), ANSWER)
    tools, model = body.get("tools") or [], str(body.get("model"))
    if not isinstance(tools, list) or type(most) is not int or most < 0:
        raise InvalidRequest(f'{where}: "tools" are a list, and "max_tokens" a number from 0 on')
    answer, length = _answer(where, record.get("response"))
    length, moment = max(1, length or min(ANSWER, most)), _moment(record.get("timestamp"))
    return _Logged(where, prompt, tools, model, answer, length, moment)


def _answer(where: str, response: Any) -> tuple[Message | None, int]:
    """What was answered, and how many tokens that took; None and 0 if the log does not say."""
    body, answer, length = _inner(response, "choices", "usage") or {}, None, 0
    match body.get("choices"):
        case [{"message": {"role": _} as message}, *_]:
            answer = _message(where, message)
        case [{"text": str(text)}, *_]:
            answer = {"role": "assistant", "content": text}
    match body.get("usage"):
        case {"completion_tokens": int(count)} if 0 <= count <= 1 << 24:
            length = count
    return answer if answer and spoken(answer) else None, length


def _message(where: str, message: Any) -> Message:
    role, text, calls = read_message(where, message)
    more = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if calls:
        more["tool_calls"] = calls
    # Few templates know developers.
    return {"role": "system" if role == "developer" else role, "content": text, **more}


def _moment(said: Any) -> float | None:
    """Seconds since some time; None if that cannot be read."""
    try:
        return datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    except (AttributeError, ValueError):
        return said if isinstance(said, int | float) else None


def _follow(logged: list[_Logged]) -> None:
    """Find which request each goes on from, and what was answered to that."""
    ends: dict[int, int] = {}
    for index, one in enumerate(logged):
        key, answer = hash(one.model), None
        for message in one.messages:
            if message["role"] == "assistant" and key in ends:
                one.after, answer = ends[key], message
            key = hash((key, as_json(message)))
        if one.messages:
            ends[key] = index
        if one.after is not None:
            before = logged[one.after]
            one.turn = before.turn + 1
            before.answer = before.answer or answer
