"""Workloads from texts: ShareGPT, OpenAI messages, plain prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.bench.workloads.byte_level_bpe import Encode
from radixcache.bench.workloads.records import is_json, name_of, parse, read_records, read_text
from radixcache.bench.workloads.workload import Tokens, Workload
from radixcache.errors import InvalidRequest

ANSWER = 128
"""Tokens generated for a prompt of a file that knows no answer."""


def load_sharegpt(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
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
                chats.append([_turn(where, turn) for turn in turns])
            case _:
                raise InvalidRequest(f'{where} has no list "conversations"')
    return _chats(path, chats, encode)


def load_messages(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
    """Records of `{"messages": [{"role": "user", "content": "..."}, ...]}`, as OpenAI's API has
    them, or one conversation whose records are its messages.

    Content is text, null, or a list of parts, of which those that have text count. Tool calls are
    part of what an assistant says, and "tools" of what the model is told first, both as JSON.
    Requests as in `load_sharegpt`; messages that no answer follows are a prompt of their own, with
    128 random tokens for an answer.
    """
    records = list(read_records(path, limit))
    if all(isinstance(record, dict) and "role" in record for _, record in records):
        return _chats(path, [[_message(*record) for record in records]], encode)
    chats = []
    for where, record in records:
        match record:
            case {"messages": [*turns]} if turns:
                tools = record.get("tools")
                told = [("system", as_json(tools))] if tools else []
                chats.append([*told, *(_message(where, turn) for turn in turns)])
            case _:
                raise InvalidRequest(f'{where}: not a chat: say {{"messages": [...]}}')
    return _chats(path, chats, encode)


def _message(where: str, message: Any) -> tuple[str, str]:
    """Who says what in a message of OpenAI's API, calls of tools included."""
    role, text, calls = read_message(where, message)
    return role, text + "".join(as_json(call.get("function", call)) for call in calls)


def read_message(where: str, message: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """The role, the text and the tool calls of a message of OpenAI's API; or InvalidRequest."""
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
    return role, text, calls


def _part(where: str, part: Any) -> str:
    match part:
        case str(text) | {"text": str(text)}:
            return text
        case {"type": str()}:
            return ""  # an image or the like: its tokens are the model's own
    raise InvalidRequest(f'{where}: a part of a content has a "type", and "text" if it is text')


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _turn(where: str, turn: Any) -> tuple[str, str]:
    match turn:
        case {"from": str(role), "value": str(text)}:
            return {"gpt": "assistant"}.get(role, role), text
    raise InvalidRequest(f'{where}: a turn needs "from" and "value", both text')


def load_prompts(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
    """Plain prompts: one a line, each answered with 128 random tokens. Empty lines do not count.

    A JSON list of texts is one of prompts, too.
    """
    text = read_text(path)
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if is_json(text) or (lines and (is_json(lines[0]) or lines[0].strip() in ("[", "{", "[{"))):
        lines = [prompt for _, prompt in read_records(path)]
        if not all(isinstance(prompt, str) for prompt in lines):
            raise InvalidRequest(
                f"{path}: JSON, not a prompt a line: say --format messages, sharegpt or the like"
            )
    return _chats(path, [[("user", line)] for line in lines[:limit]], encode)


def _chats(path: Path, chats: list[list[tuple[str, str]]], encode: Encode) -> Workload:
    """Requests of conversations, in rounds; texts are joined without a template."""
    workload = Workload(name_of(path), f"{len(chats)} conversations or prompts")
    rng = np.random.default_rng(0)
    pieces: list[list[tuple[list[Tokens], Tokens]]] = []
    for chat in chats:
        parts: list[Tokens] = []
        requests = []
        for role, text in chat:
            tokens = np.array(encode(text.encode(errors="replace").decode()), np.int32)
            if not len(tokens):
                continue
            if role == "assistant" and parts:
                requests.append((list(parts), tokens))
            parts.append(tokens)
        if parts and not (requests and chat[-1][0] == "assistant"):
            requests.append((parts, rng.integers(0, 1000, ANSWER, dtype=np.int32)))
        pieces.append(requests)
    last: list[int | None] = [None] * len(pieces)
    for turn in range(max(map(len, pieces), default=0)):
        for number, requests in enumerate(pieces):
            if turn < len(requests):
                prompt, answer = requests[turn]
                last[number] = workload.add(prompt, answer, after=last[number], turn=turn)
    if not workload.arrivals:
        raise InvalidRequest(f"{path}: no request in it")
    return workload
