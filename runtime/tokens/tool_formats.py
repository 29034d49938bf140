"""How models write calls: patterns that find calls, and grammars that force them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from radixcache.errors import InvalidRequest
from radixcache.runtime.tokens.schema_defaults import SPACES, complete
from radixcache.runtime.tokens.tagged_arguments import alternatives
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice, read_json

THINK, THOUGHT = "<think>", "</think>"
"""Models reason between these."""

_ANY_NAME = r'[^\s"<>{}\[\]]{1,256}'
_NAME = rf"(?P<name>{_ANY_NAME})"
_GAP = r"\s{0,64}"
"""Bounded, like names, since it is matched anew with each token."""


class Shape(NamedTuple):
    """Patterns of a piece of a call with any spaces: the whole piece, and a beginning of it."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


def shape(text: str, ahead: str = "") -> Shape:
    """The shape of `text`, in which NAME is any name; `ahead` is a pattern of the text after it."""
    whole, begun, after = ahead, "", ""
    for unit in reversed(re.findall(r"NAME|\S", text)):
        gap = "" if unit.isalpha() and after.isalpha() else _GAP
        pattern = _NAME if unit == "NAME" else re.escape(unit)
        whole = pattern + (gap if after else "") + whole
        begun = f"(?:{pattern}{gap}{begun})?"
        after = unit
    return Shape(re.compile(_GAP + whole), re.compile(_GAP + begun))


PARAMETER, TAG_END = shape("<parameter=NAME>"), "</parameter>"
"""Before and after a tagged argument."""


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls.

    A message's calls are `open`, the calls with `between` them, and `close`.

    Attributes:
        signs: texts that its chat templates all contain.
        opener: the text that begins calls.
        call: one call; NAME and VALUE stand for its name and its arguments.
        bare: a call may also begin a message without the opener, as its only call.
        tagged: the arguments are tags, not JSON.
        short_ids: the template requires call ids of 9 letters and digits.
    """

    signs: tuple[str, ...]
    opener: str
    call: str
    open: str = ""
    between: str = "\n"
    close: str = ""
    bare: bool = False
    tagged: bool = False
    short_ids: bool = False

    @cached_property
    def marks(self) -> frozenset[str]:
        """Texts that may be special tokens, and must be decoded nevertheless."""
        return frozenset(re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", self.opener + self.call))

    @cached_property
    def heads(self) -> tuple[Shape, Shape, Shape]:
        """Shapes before the arguments of the first call, a further one, and a message's opening."""
        head, _ = self.call.split("VALUE")
        ahead = "" if self.tagged else _GAP + r"(?=\{)"
        return (
            shape((self.opener if self.bare else self.open) + head, ahead),
            shape(self.between + head, ahead),
            shape(head, ahead),
        )

    @cached_property
    def begins(self) -> tuple[Shape, ...]:
        """Shapes before the object of each of `heads`; none if calls are no objects."""
        before, brace, _ = self.call.partition('{"name"')
        if not brace:
            return ()
        texts = (self.opener if self.bare else self.open) + before, self.between + before, before
        return tuple(shape(text, _GAP + r"(?=\{)") for text in texts)

    @cached_property
    def tail(self) -> tuple[Shape, ...]:
        """Shapes after the arguments, each of which may be missing."""
        return tuple(map(shape, re.findall(r"<[^<>]+>|\S", self.call.split("VALUE")[1])))

    @cached_property
    def mark(self) -> str:
        """The tag that ends a call; "" if there is none."""
        return next(iter(re.findall("</[^<>]+>$", self.call)), "")

    @cached_property
    def end(self) -> Shape:
        """Shape after the last call."""
        return shape(self.close)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        spell: Callable[[str], str],
        answer: str | None = None,
        thinks: bool = False,
        loose: Collection[str] = (),
    ) -> str:
        """The Lark grammar of the messages that `choice` allows; rule `value_N` is the arguments of
        the N-th of `tools`.

        The arguments of a tool that is not strict follow its schema as far as a grammar can.

        Args:
            spell: converts a text to Lark; see `Tokenizer.spell`.
            answer: the Lark of answers without a call; None is any text.
            thinks: the message may begin with thoughts.
            loose: the names of tools that are given any object.

        Raises:
            InvalidRequest: a tool's parameters are no object, or a strict tool's cannot be written
                in this format.
        """
        head, tail = self.call.split("VALUE")
        rules, opened = {}, []
        for index, tool in enumerate(tools):
            before = head.replace("NAME", tool.name)
            rest = f"value_{index} {spell(tail)}"
            rules[f"call_{index}"] = f"{spell(before)} {rest}"
            opened.append(f"{spell((self.open + before).removeprefix(self.opener))} {rest}")
            free = tool.name in loose or (choice.mode == "auto" and not tool.strict)
            rules[f"value_{index}"] = self._arguments(tool, free)
        more = f"({spell(self.between)} call)*" if choice.parallel and not self.bare else ""
        # Where calls must come, all are captured: one that repeats the one before is the end.
        kept = '[capture="__LIST_APPEND:call"]' if choice.mode == "required" and more else ""
        rules[f"call{kept}"] = " | ".join(f"call_{index}" for index in range(len(tools)))
        opening = "" if self.bare else spell(self.open)
        rules["calls"] = f"{opening} call {more} {spell(self.close)}"
        start = "calls"
        first, but = r"[^{\s]" if self.bare else r"(.|\n)", ""
        if choice.mode == "auto" and answer is None:
            start = "ANSWER? | calls" if self.bare else "ANSWER? calls?"
            if not self.bare and not _is_token(spell(self.opener)):
                # The opener is plain text: content ends where it first comes, and a call begins.
                rules[f"opened[suffix={_quote(self.opener)}]"] = r"/(.|\n)*/"
                start = f"ANSWER? | opened ({' | '.join(opened)}) {more} {spell(self.close)}"
                but = rf" & ~/(.|\n)*{re.escape(self.opener)}(.|\n)*/"
        elif choice.mode == "auto":
            start = "calls | answer"
        rules["start"] = f"({start})"
        if thinks and _is_token(spell(THINK)):
            rules["start"] = f"({spell(THINK)} TEXT? {spell(THOUGHT)} SPACE?)? ({start})"
        rules["answer"] = answer or "ANSWER"
        rules["any_argument"] = rf'"<parameter=" /{_ANY_NAME}/ ">\n" tagged_text "\n"'
        rules[f"tagged_text[suffix={_quote(TAG_END)}]"] = r"/(.|\n)*/"
        rules |= {"ANSWER": rf"/{first}(.|\n)*/{but}", "TEXT": r"/(.|\n)+/", "SPACE": r"/\s{1,9}/"}
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())

    def _arguments(self, tool: Tool, free: bool) -> str:
        """The Lark of a tool's arguments, of any arguments if `free`."""
        if not self.tagged:
            return _json({"type": "object"}) if free else _json(_object_schema(tool), tool.strict)
        try:
            return "any_argument*" if free else _tagged(_object_schema(tool), tool.strict)
        except _Unwritable as error:
            if tool.strict:
                raise InvalidRequest(f"the tool {tool.name!r}: {error}") from None
            return "any_argument*"


class _Unwritable(ValueError):
    """An argument cannot be written in tags."""


def is_name(text: str) -> bool:
    """Whether a text may be a function's name."""
    return re.fullmatch(_ANY_NAME, text) is not None


def _is_token(lark: str) -> bool:
    return lark.startswith("<[") and " " not in lark


def _object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"the parameters of {tool.name} must be of type object, not {kind!r}")
    return {**tool.parameters, "type": "object"}


def _tagged(schema: Mapping[str, Any], strict: bool) -> str:
    """The Lark of tagged arguments, in the schema's order; strings follow lists of values only."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, parts = schema.get("required"), []
    end = "\n" + TAG_END
    for name, argument in properties(schema).items():
        said = []
        for one in alternatives(argument, schema):
            said += [_quote((v if isinstance(v, str) else json.dumps(v)) + end) for v in one.values]
            if one.kinds and "string" not in one.kinds:
                said.append(f"{_json({**one.schema, **shared}, strict)} {_quote(end)}")
            if "string" in one.kinds:
                said.append("tagged_text")
            if any(TAG_END in v for v in one.values if isinstance(v, str)):
                said = []
                break
        value = "tagged_text" if "tagged_text" in said else " | ".join(said)
        if not value:
            raise _Unwritable(f"no text can be the argument {name!r}")
        if not re.fullmatch(_NAME, name):
            raise _Unwritable(f"this model cannot write an argument of the name {name!r}")
        optional = "" if isinstance(required, list) and name in required else "?"
        parts.append(
            f"({_quote(f'<parameter={name}>' + chr(10))} ({value}) {_quote(chr(10))}){optional}"
        )
    return " ".join(parts) or '""'


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of each argument."""
    arguments = schema.get("properties")
    return arguments if isinstance(arguments, dict) else {}


def as_rule(kind: str, value: str) -> str | None:
    """The Lark of a `StructuredOutputsParams` kind and value; None for a grammar."""
    match kind:
        case "json_object" | "json":
            try:
                schema = read_json(value or '{"type": "object"}')
            except ValueError as error:
                raise InvalidRequest(f"the schema is no JSON: {error}") from None
            return _json(schema if isinstance(schema, dict) else {})
        case "regex":
            escaped = {"/": r"\/", "\n": r"\n"}
            return "/" + re.sub(r"\\.|[/\n]", lambda m: escaped.get(m[0], m[0]), value) + "/"
        case "choice":
            return " | ".join(map(_quote, json.loads(value)))
    return None


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: dict[str, Any], strict: bool = True) -> str:
    """The Lark of a schema; if not `strict`, without what the library does not support."""
    options = SPACES if strict else {**SPACES, "lenient": True, "coerce_one_of": True}
    return f"%json {json.dumps({**complete(schema), 'x-guidance': options})}"


_OBJECT = '{"name": "NAME", "arguments": VALUE}'
_HERMES = ToolFormat(  # Hermes, Qwen2.5, Qwen3
    ("<tool_call>", '"arguments": '), "<tool_call>", f"<tool_call>\n{_OBJECT}\n</tool_call>"
)
_FORMATS = (
    ToolFormat(  # Qwen3-Coder, Qwen3.5
        ("<tool_call>", "<parameter="),
        "<tool_call>",
        "<tool_call>\n<function=NAME>\nVALUE</function>\n</tool_call>",
        tagged=True,
    ),
    _HERMES,
    ToolFormat(  # Mistral from its tokenizer's version 11 on
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        "[TOOL_CALLS]NAME[ARGS]VALUE",
        between="",
        short_ids=True,
    ),
    ToolFormat(  # Mistral before
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        _OBJECT,
        open="[TOOL_CALLS][",
        between=", ",
        close="]",
        short_ids=True,
    ),
    ToolFormat(  # Llama 3, whose templates describe it in words
        ('{"name": function name, "parameters": ',),
        "<|python_tag|>",
        '{"name": "NAME", "parameters": VALUE}',
        between="; ",
        bare=True,
    ),
)


def knows_tools(template: str) -> bool:
    """Whether a chat template mentions tools."""
    return re.search("tool|function", template, re.IGNORECASE) is not None


def find_format(template: str) -> ToolFormat | None:
    """The format of a chat template; that of `generic_tools` if it has no tools."""
    if template and not knows_tools(template):
        return _HERMES
    if "[CALL_ID]" in template:  # some of Mistral's have an id between name and arguments
        return None
    return next((known for known in _FORMATS if all(s in template for s in known.signs)), None)
