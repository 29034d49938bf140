"""What clients asked before: to go on from it, and to say what has changed since."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from radixcache.base import Tokens
from radixcache.nodes import common_length
from radixcache.runtime.llm import Message
from radixcache.runtime.server.generation import JSON
from radixcache.runtime.server.turn import Turn

Change = Literal["tools", "system", "settings", "messages"]


@dataclass(frozen=True, eq=False)
class Past:
    """A turn that is over.

    Attributes:
        prompt: [n] its tokens.
        conversation: its messages, without instructions that were for this turn only, and the
            answer.
        response: what the client was given, if it may ask for it again.
    """

    turn: Turn
    prompt: Tokens
    conversation: list[Message] = field(default_factory=list)
    response: JSON | None = None

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes. O(text)."""
        texts = [self.turn.messages, self.conversation, self.response, [*_tools(self.turn)]]
        return self.prompt.nbytes + len(json.dumps(texts))


class Pasts:
    """The last turns, by salt and id: nobody finds those of another salt.

    If there are too many, the oldest of the salt that has most is forgotten first.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.max_bytes = max_bytes
        self._pasts: defaultdict[str | None, OrderedDict[str, tuple[Past, int]]]
        self._pasts = defaultdict(OrderedDict)
        self._num_bytes: Counter[str | None] = Counter()

    def keep(self, name: str, past: Past) -> None:
        """Remember a turn under an id that cannot be guessed."""
        salt, size = past.turn.cache_salt, past.num_bytes
        self._pasts[salt][name] = past, size
        self._num_bytes[salt] += size
        while self._num_bytes.total() > self.max_bytes:
            ((most, _),) = self._num_bytes.most_common(1)
            self.drop(next(iter(self._pasts[most])), most)

    def find(self, name: str, salt: str | None) -> Past | None:
        """The salt's turn with this id, if it is remembered."""
        past, _ = self._pasts.get(salt, {}).get(name, (None, 0))
        return past

    def drop(self, name: str, salt: str | None) -> None:
        """Forget a turn that `find` finds."""
        _, size = self._pasts[salt].pop(name)
        self._num_bytes[salt] -= size
        if not self._pasts[salt]:
            del self._pasts[salt], self._num_bytes[salt]


@dataclass(frozen=True)
class Comparison:
    """How a prompt relates to an earlier one.

    Attributes:
        is_hit: all that both have in common was cached, and nothing that the client changed cost
            anything.
        change: what the client changed first; None if it only went on.
        num_known: tokens of the earlier prompt.
        num_reused: leading tokens of the prompt that are the earlier one's, or were cached.
    """

    is_hit: bool
    change: Change | None
    num_known: int
    num_reused: int

    @classmethod
    def of(cls, past: Past, turn: Turn, prompt: Tokens, cached: int) -> Comparison:
        """Compare a turn, `cached` tokens of whose prompt were cached."""
        shared, change = common_length(past.prompt, prompt), _change(past.turn, turn)
        due = shared if change is None else min(len(past.prompt), len(prompt))
        # The last token is computed for its logits.
        is_hit = cached >= due - 1
        return cls(is_hit, change, len(past.prompt), max(shared, cached))


def _change(old: Turn, new: Turn) -> Change | None:
    if [*_tools(old)] != [*_tools(new)]:
        return "tools"
    if old.template_kwargs != new.template_kwargs:
        return "settings"
    before, now = _split(old.messages), _split(new.messages)
    if before[0] != now[0]:
        return "system"
    return None if now[1][: len(before[1])] == before[1] else "messages"


def _split(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """System messages at the top, and the others."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return messages[:count], messages[count:]


def _tools(turn: Turn) -> Iterable[Any]:
    return (tool.as_template() for tool in turn.tools)
