"""Arranges a conversation's messages in an order that its chat template accepts.

Clients send system messages amid a conversation, two user messages in a row, or a user's message
after a tool's result. Anthropic's API joins such messages; so does this, if a template refuses
their order or drops one. Joining looks back one message only, so that the text rendered before
stays the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from radixcache.runtime.tokens.tool_calls import joined

Message = dict[str, Any]

_ID = "abcdef123"  # nine alphanumerics, as Mistral's templates want it
_CALL = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": {}}}
_TRIED: dict[str, Message] = {
    "s": {"role": "system", "content": "Part s"},
    "u": {"role": "user", "content": "Part u"},
    "v": {"role": "user", "content": "Part v"},
    "a": {"role": "assistant", "content": "Part a"},
    "c": {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    "t": {"role": "tool", "content": "Part t", "tool_call_id": _ID, "name": "f"},
}


class RoleOrder(NamedTuple):
    """The orders that a template accepts.

    Attributes:
        system: a system message.
        late_system: a system message that is not the first message.
        repeated: two user messages in a row.
        after_result: a user's message after a tool's result.
    """

    system: bool = True
    late_system: bool = True
    repeated: bool = True
    after_result: bool = True

    @classmethod
    def find(cls, render: Callable[[list[Message]], str]) -> RoleOrder:
        """Find out by trying: templates raise any error, drop messages they do not expect, or move
        them to the top, after which the cache would hit nothing of the conversation."""

        def takes(roles: str) -> bool:
            try:
                text = render([_TRIED[role] for role in roles])
            except Exception:
                return False
            places = [text.find(f"Part {role}") for role in roles if role != "c"]
            return min(places) >= 0 and places == sorted(places)

        return cls(
            takes("su"),
            takes("uasv"),
            takes("uv") or not takes("u"),
            takes("uctv") or not takes("uct"),
        )

    def arrange(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        """The messages, joined where they must be; a system message may become a user's."""
        arranged: list[Message] = []
        for given in messages:
            message, last = dict(given), arranged[-1] if arranged else None
            if message["role"] == "system" and not (
                self.late_system or (self.system and (last is None or last["role"] == "system"))
            ):
                message["role"] = "user"
            if last is not None and self._joins(last, message, first=len(arranged) == 1):
                last["content"] = joined(last["content"], "\n\n", message["content"])
            else:
                arranged.append(message)
        return arranged

    def _joins(self, last: Message, new: Message, first: bool) -> bool:
        match last["role"], new["role"]:
            case "system", "system":
                return not self.late_system
            case "user", "user":
                return not self.repeated or (first and not self.system)
            case "tool", "user":
                return not self.after_result
            case "assistant", "assistant":
                return not self.repeated and not (last.keys() | new.keys()) & {"tool_calls"}
        return False
