"""The recorded chats that every engine is sent: turns, retries, edits, the time of day, salts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixcache.bench.workloads.generators import generate

VOCAB = 2000
"""Tokens are below this; the bundled model has more."""


class Chat(NamedTuple):
    tokens: list[int]
    salt: str | None


def chats(count: int, seed: int) -> list[Chat]:
    """Make `count` requests: whole conversations at each turn, with the recorded answers."""
    rng = np.random.default_rng(seed)
    spec = f"chat:conversations={-(-count // 8)},turns=8,user=25,answer=35,systems=3,system=90"
    requests: list[Chat] = []
    for number, arrival in enumerate(generate(spec, seed, VOCAB).arrivals[:count]):
        tokens = arrival.prompt()
        kind = number % 12
        if kind == 3:  # the same again, as a retry
            tokens = np.asarray(requests[-1].tokens, np.int32)
        elif kind == 6:  # the time of day in the system prompt
            tokens[5:8] = rng.integers(0, VOCAB, 3)
        elif kind == 9:  # a message is edited
            at = len(tokens) // 2
            tokens = np.concatenate((tokens[:at], tokens[at + 4 :]))
        salt = {4: "a", 5: "a", 10: "b"}.get(kind)
        requests.append(Chat(tokens.tolist(), salt))
    return requests
