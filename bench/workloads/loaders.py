"""Workloads from files: Mooncake traces, ShareGPT, OpenAI messages, plain prompts.

Every complaint names the file and the line, or the conversation, that is malformed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.bench.workloads.byte_level_bpe import Encode
from radixcache.bench.workloads.workload import Arrival, Tokens, Workload
from radixcache.errors import InvalidRequest

_ANSWER = 128
"""Tokens generated for a prompt of a file that knows no answer."""


def load_mooncake(
    path: Path, *, hash_block: int = 512, vocabulary: int = 1 << 17, limit: int | None = None
) -> Workload:
    """A trace of `{"timestamp", "input_length", "output_length", "hash_ids"}`, one per line.

    Each hash id stands for `hash_block` tokens (512 in Mooncake's own traces, 64 or less in others)
    that are the same wherever the id is the same, and random otherwise. So two prompts agree in
    whole blocks only, and what is generated agrees with nothing: the trace does not tell.
    Timestamps are milliseconds.

    Raises:
        InvalidRequest: a line is no such record.
    """
    workload = Workload(path.name, f"trace of {hash_block}-token blocks")
    for where, record in _json_lines(path, limit):
        number = len(workload.arrivals)
        match record:
            case {
                "timestamp": int() | float() as timestamp,
                "input_length": int(length),
                "output_length": int(answer),
                "hash_ids": [*ids],
            } if length > 0 and answer >= 0 and timestamp >= 0:
                pass
            case _:
                raise InvalidRequest(
                    f"{where}: not a request of a Mooncake trace: it has a timestamp, an "
                    f"input_length, an output_length and hash_ids"
                )
        if not all(type(i) is int and i >= 0 for i in ids):
            raise InvalidRequest(f"{where}: hash_ids must be numbers from 0 on")
        if len(ids) != -(-length // hash_block):
            raise InvalidRequest(
                f"{where}: {len(ids)} hash_ids for {length} tokens: not blocks of {hash_block} "
                f"(say --hash-block)"
            )
        answer = max(answer, 1)
        workload.arrivals.append(
            Arrival(
                length,
                answer,
                partial(_from_blocks, np.array(ids), hash_block, length, vocabulary),
                partial(_unique_answer, number, answer, vocabulary),
                at=timestamp / 1000,
            )
        )
    return _not_empty(workload, path)


def _from_blocks(ids: np.ndarray, block: int, length: int, vocabulary: int) -> Tokens:
    positions = ids.astype(np.uint64)[:, None] * np.uint64(block) + np.arange(
        block, dtype=np.uint64
    )
    return _scatter(positions.ravel()[:length], vocabulary)


def _unique_answer(number: int, length: int, vocabulary: int) -> Tokens:
    start = (1 << 62) + (number << 24)  # far from every block
    return _scatter(np.arange(start, start + length, dtype=np.uint64), vocabulary)


def _scatter(numbers: np.ndarray, vocabulary: int) -> Tokens:
    """Pseudo-random tokens, the same for the same numbers (Murmur3's finaliser)."""
    mixed = numbers ^ (numbers >> np.uint64(33))
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return ((mixed >> np.uint64(33)) % np.uint64(vocabulary)).astype(np.int32)


def load_sharegpt(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
    """A JSON list of `{"conversations": [{"from": "human", "value": "..."}, ...]}`.

    Every turn of "gpt" (or "assistant") is a request whose prompt is all before it. Turns come in
    rounds: first the first turns of all conversations, then the second ones.

    Raises:
        InvalidRequest: the file is no such list.
    """
    conversations = _json(str(path), read_text(path))
    if not isinstance(conversations, list):
        raise InvalidRequest(f"{path}: not a list of conversations")
    chats = []
    for number, conversation in enumerate(conversations[:limit]):
        where = f"{path}: conversation {number}"
        match conversation:
            case {"conversations": [*turns]}:
                chats.append([_turn(where, turn, "from", "value") for turn in turns])
            case _:
                raise InvalidRequest(f'{where} has no list "conversations"')
    return _chats(path, chats, encode)


def load_messages(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
    """Lines of `{"messages": [{"role": "user", "content": "..."}, ...]}`, as OpenAI's API has them.

    Requests as in `load_sharegpt`; messages that no answer follows are a prompt of their own, with
    128 random tokens for an answer.

    Raises:
        InvalidRequest: a line is no such record.
    """
    chats = []
    for where, record in _json_lines(path, limit):
        match record:
            case {"messages": [*turns]} if turns:
                chats.append([_turn(where, turn, "role", "content") for turn in turns])
            case _:
                raise InvalidRequest(f'{where}: not a chat: say {{"messages": [...]}}')
    return _chats(path, chats, encode)


def _turn(where: str, turn: Any, speaker: str, content: str) -> tuple[str, str]:
    """Who says what, under the names that a format has for the two."""
    role, text = (turn.get(speaker), turn.get(content)) if isinstance(turn, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(text, str):
        raise InvalidRequest(f'{where}: a turn needs "{speaker}" and "{content}", both text')
    return {"gpt": "assistant"}.get(role, role), text


def load_prompts(path: Path, encode: Encode, *, limit: int | None = None) -> Workload:
    """Plain prompts: one a line, each answered with 128 random tokens. Empty lines do not count.

    Raises:
        InvalidRequest: the file is empty or no text.
    """
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    return _chats(path, [[("user", line)] for line in lines[:limit]], encode)


def _chats(path: Path, chats: list[list[tuple[str, str]]], encode: Encode) -> Workload:
    """Requests of conversations, in rounds; texts are joined without a template."""
    workload = Workload(path.name, f"{len(chats)} conversations or prompts")
    rng = np.random.default_rng(0)
    pieces: list[list[tuple[list[Tokens], Tokens]]] = []
    for chat in chats:
        parts: list[Tokens] = []
        requests = []
        for role, text in chat:
            tokens = np.array(encode(text), np.int32)
            if not len(tokens):
                continue
            if role == "assistant" and parts:
                requests.append((list(parts), tokens))
            parts.append(tokens)
        if parts and not (requests and chat[-1][0] == "assistant"):
            requests.append((parts, rng.integers(0, 1000, _ANSWER, dtype=np.int32)))
        pieces.append(requests)
    last: list[int | None] = [None] * len(pieces)
    for turn in range(max(map(len, pieces), default=0)):
        for number, requests in enumerate(pieces):
            if turn < len(requests):
                prompt, answer = requests[turn]
                last[number] = workload.add(prompt, answer, after=last[number], turn=turn)
    return _not_empty(workload, path)


def _not_empty(workload: Workload, path: Path) -> Workload:
    if not workload.arrivals:
        raise InvalidRequest(f"{path}: no request in it")
    return workload


def _json_lines(path: Path, limit: int | None) -> Iterator[tuple[str, Any]]:
    """Each line's place and content."""
    lines = enumerate(read_text(path).split("\n"), 1)
    for number, line in islice(((n, line) for n, line in lines if line.strip()), limit):
        yield f"{path}:{number}", _json(f"{path}:{number}", line)


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None  # says line and column
    except (RecursionError, ValueError):
        raise InvalidRequest(f"{where}: JSON that is too deep, or has too long a number") from None


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it is called .gz.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"cannot read {path}: it is not UTF-8 text") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise InvalidRequest(f"cannot read {path}: it is no whole gzip file") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None
