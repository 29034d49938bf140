"""Puts the messages of a conversation in an order that a chat template takes.

Clients tell the system's news amid a conversation, ask twice in a row, or say something behind the
result of a tool. Anthropic's API joins such messages; so does this, where a template refuses their
order or leaves one of them out. Joining looks back one message only, so that what was rendered
before stays the beginning of what is rendered next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

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
    """What a template takes.

    Attributes:
        system: a system message.
        late_system: one that is not the first message.
        repeated: two messages of a user in a row.
        after_result: a user's message behind the result of a tool.
    """

    system: bool = True
    late_system: bool = True
    repeated: bool = True
    after_result: bool = True

    @classmethod
    def find(cls, render: Callable[[list[Message]], str]) -> RoleOrder:
        """By trying: templates raise what they like, leave out what they do not expect, or tell it
        at the top, where nothing of the conversation would be found in the cache any more."""

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
        """The messages, those joined that cannot stand alone; system's may be a user's then."""
        arranged: list[Message] = []
        for given in messages:
            message, last = dict(given), arranged[-1] if arranged else None
            if message["role"] == "system" and not (
                self.late_system or (self.system and (last is None or last["role"] == "system"))
            ):
                message["role"] = "user"
            if last is not None and self._joins(last, message, first=len(arranged) == 1):
                last["content"] += f"\n\n{message['content']}"
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
