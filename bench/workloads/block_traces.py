"""Traces of block hashes: which blocks of tokens two prompts share, and nothing of what they say.

Each hash id stands for a block of tokens that are the same wherever the id is the same, and random
otherwise. So two prompts agree in whole blocks only; what no id covers, and what is generated,
agrees with nothing: a trace does not tell.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from radixcache.bench.workloads.records import name_of, read_records
from radixcache.bench.workloads.workload import Arrival, Tokens, Workload
from radixcache.errors import InvalidRequest

_LATEST = 1e15
"""Milliseconds or seconds; sums of later times are no longer exact."""

_MOST = 1 << 24
"""Tokens of a prompt, an answer or a block; more is no trace of a model that there is."""


def load_trace(
    path: Path,
    *,
    hash_block: int | None = None,
    vocabulary: int = 1 << 17,
    limit: int | None = None,
) -> Workload:
    """A trace of requests, each with the hash ids of its whole prompt, or of sessions of them.

    Kinds of records:

    - `{"timestamp", "input_length", "output_length", "hash_ids"}`, as Mooncake's traces have it:
      blocks of 512 tokens, milliseconds. With a "session_id" it comes after the last one with that
      id, perhaps with a "delay" instead of a "timestamp" (as AIPerf and Dynamo write);
    - one request with "chat_id" and "parent_chat_id" (Qwen-Bailian's traces: blocks of 16 tokens,
      "timestamp" in seconds);
    - one session whose "requests" have "t" in seconds, "in", "out" and "hash_ids" (agents' traces
      of kv-cache-tester: "block_size" tokens; ids that are "local" mean nothing to other sessions).
      The requests of a "subagent" among them are a session that its next request waits for.

    Args:
        hash_block: tokens of a block, instead of what the trace says or its kind implies.
    """
    trace = _Trace(path, hash_block, vocabulary)
    for number, (where, record) in enumerate(read_records(path, limit)):
        name: int | str | None = None
        parent, block, scale = None, 512, 1000
        match record:
            case {"requests": [*requests]}:
                scope = number if record.get("hash_id_scope") == "local" else None
                trace.start(where, record, 64, scope)
                _add_session(trace, where, requests, None)
                continue
            case {"chat_id": int() | str() as name, "output_length": _}:
                parent = record.get("parent_chat_id")
                block, scale = 16, 1
            case {"session_id": int() | str() as name, "output_length": _}:
                parent = name
            case {"timestamp": _, "output_length": _, "hash_ids": _}:
                pass
            case _:
                raise InvalidRequest(
                    f"{where}: not a request of a trace: it has a timestamp, an input_length, an "
                    f'output_length and hash_ids, perhaps a "session_id" or "chat_id"; or '
                    f'"requests"'
                )
        trace.start(where, record, block)
        after = trace.last.get(parent) if isinstance(parent, int | str) else None
        at, begin = record.get("timestamp"), 0.0
        if at is None and name is not None:
            at = record.get("delay", 0)
            begin = trace.workload.arrivals[after].at if after is not None else 0.0
        sizes = record.get("input_length"), record["output_length"]
        ids, when = record.get("hash_ids"), {"at": at, "begin": begin, "scale": scale}
        trace.last[name] = trace.add(where, *sizes, ids, **when, after=after)
    return trace.finished()


def _add_session(trace: _Trace, where: str, requests: list[Any], after: int | None) -> int | None:
    """Add requests of which each waits for the one before; returns the last.

    Sub-agents that follow each other begin together, after the request before them.
    """
    last = after
    for request in requests:
        match request:
            case {"type": "subagent", "requests": [*inner]}:
                last = _add_session(trace, where, inner, after) or last
            case {"in": length, "out": answer}:
                ids, at = request.get("hash_ids"), request.get("t", 0)
                after = last = trace.add(where, length, answer, ids, at=at, after=last)
            case _:
                raise InvalidRequest(
                    f'{where}: a request of a session needs "in" and "out", or is a subagent'
                )
    return last


class _Trace:
    def __init__(self, path: Path, hash_block: int | None, vocabulary: int) -> None:
        self.workload = Workload(name_of(path), "")
        self.last: dict[Any, int] = {}
        """The last request of each session or chat."""
        self._path, self._hash_block, self._vocabulary = path, hash_block, vocabulary
        self._block, self._scope = 0, None  # type: int, int | None
        self._numbers: dict[tuple[int | None, int], int] = {}
        """The number of each block, in order of appearance, by scope and id."""

    def start(self, where: str, record: Any, block: int, scope: int | None = None) -> None:
        """A record begins, whose kind has blocks of so many tokens."""
        self._scope = scope
        self._block = self._hash_block or record.get("block_size", block)
        if type(self._block) is not int or not 0 < self._block <= _MOST:
            raise InvalidRequest(f"{where}: no number of tokens in a block: {self._block!r:.40}")

    def add(
        self, where: str, length: Any, answer: Any, ids: Any, *,
        at: Any, begin: float = 0.0, scale: int = 1, after: int | None = None,
    ) -> int:  # fmt: skip
        """Append a request as a file has it; returns its index.

        Args:
            ids: None if the trace does not know what the prompt shares.
            at: when it comes, `scale` to a second, from `begin` on.
        """
        index = len(self.workload.arrivals)
        if type(at) not in (int, float) or not 0 <= at <= _LATEST:
            raise InvalidRequest(
                f"{where}: a time must be a number from 0 to {_LATEST:g}, not {at!r:.40}"
            )
        for name, tokens, least in (("prompt", length, 1), ("answer", answer, 0)):
            if type(tokens) is not int or not least <= tokens <= _MOST:
                raise InvalidRequest(f"{where}: no number of tokens in its {name}: {tokens!r:.40}")
        covered = [] if ids is None else self._blocks(where, length, ids)
        answer = max(answer, 1)
        make = partial(_prompt, np.array(covered, np.uint64), self._block, length, index)
        self.workload.arrivals.append(
            Arrival(
                length,
                answer,
                partial(make, self._vocabulary),
                partial(_unique, index, answer, self._vocabulary),
                after=after,
                turn=0 if after is None else self.workload.arrivals[after].turn + 1,
                at=begin + at / scale,
            )
        )
        return index

    def _blocks(self, where: str, length: int, ids: Any) -> list[int]:
        """The numbers of a prompt's blocks; a last block that is not full may have no id."""
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise InvalidRequest(f"{where}: hash_ids must be numbers from 0 on")
        if len(ids) not in (-(-length // self._block), length // self._block):
            raise InvalidRequest(
                f"{where}: {len(ids)} hash_ids for {length} tokens: not blocks of {self._block} "
                f"(say --hash-block)"
            )
        return [self._numbers.setdefault((self._scope, i), len(self._numbers)) for i in ids]

    def finished(self) -> Workload:
        """The workload. Raises InvalidRequest if there is no request in it."""
        arrivals = self.workload.arrivals
        if not arrivals:
            raise InvalidRequest(f"{self._path}: no request in it")
        sessions = sum(arrival.after is None for arrival in arrivals)
        shared = f" in {sessions:,} sessions" if sessions < len(arrivals) else ""
        self.workload.shape = f"trace of {self._block}-token blocks{shared}"
        return self.workload


def _prompt(blocks: np.ndarray, block: int, length: int, index: int, vocabulary: int) -> Tokens:
    numbers = blocks[:, None] * np.uint64(block) + np.arange(block, dtype=np.uint64)
    covered = _scatter(numbers.ravel()[:length], vocabulary)
    return np.append(covered, _unique(index, length - len(covered), vocabulary, 1 << 61))


def _unique(index: int, length: int, vocabulary: int, begin: int = 1 << 62) -> Tokens:
    """Tokens of request `index` alone."""
    start = begin + (index << 24)  # far from every block
    return _scatter(np.arange(start, start + length, dtype=np.uint64), vocabulary)


def _scatter(numbers: np.ndarray, vocabulary: int) -> Tokens:
    """Pseudo-random tokens, the same for the same numbers (Murmur3's finaliser)."""
    mixed = numbers ^ (numbers >> np.uint64(33))
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return ((mixed >> np.uint64(33)) % np.uint64(vocabulary)).astype(np.int32)
