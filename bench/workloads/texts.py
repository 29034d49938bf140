"""Reads files of texts: conversations, prompts, and a gateway's log of OpenAI request bodies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from radixcache.bench.workloads.records import is_json, parse, read_records, read_text
from radixcache.errors import InvalidRequest

ANSWER = 128
"""Tokens generated for a prompt without an answer in the file."""

Message = dict[str, Any]
"""A message as chat templates take it: its content is a text."""

_SETTINGS = {"model", "max_tokens", "max_completion_tokens", "temperature", "stream"}
"""Keys of a request that a conversation of a data set does not have."""


@dataclass
class Asked:
    """A request as a file has it.

    Attributes:
        prompt: messages, a text or token ids.
        answer: if it is known.
        length: how many tokens the answer has, where it is not.
        moment: when it came, if the file says.
        after: which request it goes on from.
    """

    where: str
    prompt: Any
    answer: Message | None = None
    length: int = ANSWER
    tools: list[Any] = field(default_factory=list)
    model: str = ""
    moment: float | None = None
    after: int | None = None
    turn: int = 0

    @property
    def messages(self) -> list[Message]:
        return self.prompt if isinstance(self.prompt[0], dict) else []


def spoken(message: Message) -> str:
    """Its text, and its calls of tools as JSON."""
    calls = message.get("tool_calls", ())
    return message["content"] + "".join(as_json(call.get("function", call)) for call in calls)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _message(where: str, message: Any) -> Message:
    """A message of OpenAI's API; content is text, null, or parts, of which those that have text
    count."""
    match message:
        case {"role": str(role), "content": str(text)}:
            pass
        case {"role": str(role), "content": [*parts]}:
            text = "".join(_part(where, part) for part in parts)
        case {"role": str(role), "content": None} | {"role": str(role), "tool_calls": [_, *_]}:
            text = ""
        case _:
            raise InvalidRequest(
                f'{where}: a turn needs "role", text, and "content": text, a list of parts or null'
            )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f'{where}: "tool_calls" must be a list of calls')
    more = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if calls:
        more["tool_calls"] = calls
    # Few templates know developers.
    return {"role": "system" if role == "developer" else role, "content": text, **more}


def _part(where: str, part: Any) -> str:
    match part:
        case str(text) | {"text": str(text)}:
            return text
        case {"type": str()}:
            return ""  # an image or the like: its tokens are the model's own
    raise InvalidRequest(f'{where}: a part of a content has a "type", and "text" if it is text')


# Conversations and prompts.


def read_sharegpt(path: Path, limit: int | None) -> list[Asked]:
    """A JSON list of `{"conversations": [{"from": "human", "value": "..."}, ...]}`.

    Every turn of "gpt" (or "assistant") is a request whose prompt is all before it. Turns come in
    rounds: first the first turns of all conversations, then the second ones.
    """
    conversations = parse(str(path), read_text(path))
    if not isinstance(conversations, list):
        raise InvalidRequest(f"{path}: not a list of conversations")
    chats = []
    for number, conversation in enumerate(conversations[:limit]):
        where = f"{path}: conversation {number}"
        match conversation:
            case {"conversations": [*turns]}:
                chats.append(Asked(where, [_turn(where, turn) for turn in turns]))
            case _:
                raise InvalidRequest(f'{where} has no list "conversations"')
    return _in_rounds(chats)


def _turn(where: str, turn: Any) -> Message:
    match turn:
        case {"from": str(role), "value": str(text)}:
            return {"role": {"gpt": "assistant"}.get(role, role), "content": text}
    raise InvalidRequest(f'{where}: a turn needs "from" and "value", both text')


def read_messages(path: Path, limit: int | None) -> list[Asked]:
    """Records of `{"messages": [{"role": "user", "content": "..."}, ...]}`, as OpenAI's API has
    them, perhaps with "tools", or one conversation whose records are its messages.

    Requests as in `read_sharegpt`; messages that no answer follows are a prompt of their own.
    """
    records = list(read_records(path, limit))
    if records and all(isinstance(record, dict) and "role" in record for _, record in records):
        return _in_rounds([Asked(str(path), [_message(*record) for record in records])])
    chats = []
    for where, record in records:
        match record:
            case {"messages": [*turns]} if turns:
                messages = [_message(where, turn) for turn in turns]
                chats.append(Asked(where, messages, tools=record.get("tools") or []))
            case _:
                raise InvalidRequest(f'{where}: not a chat: say {{"messages": [...]}}')
    return _in_rounds(chats)


def read_prompts(path: Path, limit: int | None) -> list[Asked]:
    """Plain prompts, one a line, or a JSON list of them. Empty lines do not count."""
    text = read_text(path)
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if is_json(text) or (lines and (is_json(lines[0]) or lines[0].strip() in ("[", "{", "[{"))):
        lines = [prompt for _, prompt in read_records(path)]
        if not all(isinstance(prompt, str) for prompt in lines):
            raise InvalidRequest(
                f"{path}: JSON, not a prompt a line: say --format messages, sharegpt or the like"
            )
    return [Asked(str(path), line) for line in lines[:limit] if line]


def _in_rounds(chats: list[Asked]) -> list[Asked]:
    """The requests of whole conversations: each answer in them ends one."""
    rounds: dict[int, list[tuple[int, Asked]]] = {}
    for number, chat in enumerate(chats):
        messages = [message for message in chat.prompt if spoken(message)]
        ends = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
        if messages and ends[-1:] != [len(messages) - 1]:
            ends.append(len(messages))
        for turn, end in enumerate(ends):
            answer = messages[end] if end < len(messages) else None
            one = Asked(chat.where, messages[:end], answer, tools=chat.tools, turn=turn)
            rounds.setdefault(turn, []).append((number, one))
    found: list[Asked] = []
    last: dict[int, int] = {}
    for number, one in (pair for turn in sorted(rounds) for pair in rounds[turn]):
        one.after, last[number] = last.get(number), len(found)
        found.append(one)
    return found


# A log.


def read_requests(path: Path, limit: int | None) -> list[Asked]:
    """Records that are bodies of chat completions or completions, each one request.

    A body may stand under "body" or "request", also as text, and what was answered under
    "response". Requests come in the order of the file, or of their "timestamp" if all have one. One
    whose messages go on from an earlier request and its answer waits for that, and says what the
    answer was. Where nothing says it, an answer has 128 random tokens, or `max_tokens` if less.
    """
    found = [_request(where, record) for where, record in read_records(path, limit)]
    if all(one.moment is not None for one in found):
        found.sort(key=lambda one: one.moment or 0.0)
    _follow(found)
    return found


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


def _request(where: str, record: Any) -> Asked:
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
    return Asked(where, prompt, answer, length, tools, model, moment)


def _answer(where: str, response: Any) -> tuple[Message | None, int]:
    """The answer, and its number of tokens; None and 0 if the log does not have them."""
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


def _moment(value: Any) -> float | None:
    """Seconds since some time; None if that cannot be read."""
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    except (AttributeError, ValueError):
        return value if isinstance(value, int | float) else None


def _follow(logged: list[Asked]) -> None:
    """Find the earlier request that each continues, and the answer to it."""
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
