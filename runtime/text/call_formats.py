"""How models write their calls: what of a text is a call, and grammars for those that must come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from radixcache.runtime.text.tool_calls import Tool, ToolChoice

THINK, THOUGHT = "<think>", "</think>"
"""Between these, models reason."""

_NAME = r'(?P<name>[^\s"<>{}\[\]]+)'
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Shape(NamedTuple):
    """A piece of a call with any space in it: all of it, and what may yet become it."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


@dataclass(frozen=True)
class CallFormat:
    """How one family of models writes calls.

    A message's calls are `open`, the calls with `between` them, and `close`.

    Attributes:
        sign: what its chat templates hold; the first format that is recognised holds.
        opener: with this, calls begin.
        call: one call; NAME and VALUE stand for its name and its arguments.
        bare: calls may also begin a message without the opener.
        tagged: the arguments are tags, not JSON.
    """

    sign: str
    opener: str
    call: str
    open: str = ""
    between: str = "\n"
    close: str = ""
    bare: bool = False
    tagged: bool = False

    @cached_property
    def marks(self) -> frozenset[str]:
        """What may be special tokens, and must be seen all the same."""
        return frozenset(re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", self.opener + self.call))

    @cached_property
    def heads(self) -> tuple[Shape, Shape, Shape]:
        """Up to the arguments: the first call, a further one, and one that opens a message."""
        head, _ = self.call.split("VALUE")
        ahead = "" if self.tagged else r"(?=\{)"
        return tuple(_shape(start + head, ahead) for start in (self.open, self.between, ""))  # type: ignore[return-value]

    @cached_property
    def tail(self) -> Shape:
        """What follows the arguments."""
        return _shape(self.call.split("VALUE")[1])

    @cached_property
    def end(self) -> Shape:
        """What follows the last call."""
        return _shape(self.close)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        spell: Callable[[str], str],
        answer: str | None = None,
        thinks: bool = False,
    ) -> str:
        """The Lark grammar of the messages that `choice` allows.

        Args:
            spell: a text as Lark; see `Tokenizer.spell`.
            answer: the Lark of what may be said instead of calling; None is any text.
            thinks: the message may begin with thoughts.
        """
        rules = {}
        for index, tool in enumerate(tools):
            head, tail = self.call.split("VALUE")
            rules[f"call_{index}"] = " ".join(
                [spell(head.replace("NAME", tool.name)), f"value_{index}", spell(tail)]
            )
            free = choice.mode == "auto" and not tool.strict
            schema = {"type": "object"} if free else {**tool.parameters}
            rules[f"value_{index}"] = _json({**schema, "type": "object"})
        rules["call"] = " | ".join(f"call_{index}" for index in range(len(tools)))
        more = f"({spell(self.between)} call)*" if choice.parallel else ""
        rules["calls"] = f"{spell(self.open)} call {more} {spell(self.close)}"
        said = "calls"
        if choice.mode != "required":
            said = "TEXT? calls?" if answer is None else "calls | answer"
            rules["answer"] = answer or "TEXT"
        rules["start"] = f"thoughts? ({said})"
        rules["thoughts"] = f"{spell(THINK)} TEXT? {spell(THOUGHT)} SPACE?" if thinks else '""'
        lines = [f"{name}: {rule}" for name, rule in rules.items()]
        return "\n".join([*lines, r"TEXT: /(.|\n)+/", r"SPACE: /\s+/"])


def _json(schema: object) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON})}"  # type: ignore[dict-item]


_OBJECT = '{"name": "NAME", "arguments": VALUE}'
_FORMATS = (
    CallFormat(
        "<function=",  # Qwen3-Coder, Qwen3.5
        "<tool_call>",
        "<tool_call>\n<function=NAME>\nVALUE</function>\n</tool_call>",
        tagged=True,
    ),
    CallFormat("<tool_call>", "<tool_call>", f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    CallFormat("[ARGS]", "[TOOL_CALLS]", "[TOOL_CALLS]NAME[ARGS]VALUE", between=""),
    CallFormat(
        "[TOOL_CALLS]", "[TOOL_CALLS]", _OBJECT, open="[TOOL_CALLS][", between=", ", close="]"
    ),
    CallFormat(
        '"parameters": ',  # Llama 3: its templates tell the model in words
        "<|python_tag|>",
        '{"name": "NAME", "parameters": VALUE}',
        between="; ",
        bare=True,
    ),
)
