"""Takes what a model writes apart as it comes: content, thoughts and calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Mapping
from typing import Any, Literal

from radixcache.runtime.tokens.tagged_arguments import read_argument, read_or_text
from radixcache.runtime.tokens.tool_calls import Call, ParsedDelta, ParsedMessage
from radixcache.runtime.tokens.tool_formats import (
    PARAMETER,
    TAG_END,
    THINK,
    THOUGHT,
    Shape,
    ToolFormat,
    properties,
    shape,
)

_Reading = Generator[None, None, Any]
"""Yields where it needs more text."""
_THINK = shape(THINK)


class MessageParser:
    """One answer.

    What is no call in the format, cut short of its name for instance, is content.

    Args:
        calls: the format of calls; None if what looks like one is content.
        reasons: the model may think first.
        thinking: the prompt ends with its thoughts begun.
        schemas: of each function's parameters: they tell text from JSON in formats that do not.
    """

    def __init__(
        self,
        calls: ToolFormat | None,
        reasons: bool = False,
        thinking: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._format = calls
        self._reasons = reasons
        self._thinking = thinking
        self._schemas = schemas or {}
        self._text = ""
        self._held = ""
        self._pieces: list[ParsedDelta] = []
        self._parsed: list[ParsedDelta] = []
        self._starts: list[int] = []
        """The character at which each call begins."""
        self._after_mark = False
        self._ended = False
        self._reading = self._read()

    def feed(self, text: str, ended: bool = False) -> list[ParsedDelta]:
        """What has come with `text`; when it has ended, with all that was held back."""
        self._text += text
        self._held += text
        self._ended = ended
        self._pieces = []
        next(self._reading, None)
        self._parsed += self._pieces
        return self._pieces

    def message(self) -> ParsedMessage:
        """All that has come; from a call on whose arguments are no JSON object, all is content."""
        content, reasoning, names, arguments = "", "", [], []
        for piece in self._parsed:
            match piece.kind:
                case "content":
                    content += piece.text
                case "reasoning":
                    reasoning += piece.text
                case "call":
                    names.append((piece.call_id, piece.text, content))
                    arguments.append("")
                case "arguments":
                    arguments[-1] += piece.text
        calls: list[Call] = []
        for (call_id, name, before), given, start in zip(
            names, arguments, self._starts, strict=True
        ):
            call = Call(call_id, name, given)
            if call.values is None:
                content = before + self._text[start:]
                break
            calls.append(call)
        return ParsedMessage(content, reasoning, tuple(calls))

    # ---------------------------------------------------------------------------------- reading

    def _read(self) -> _Reading:
        if self._thinking or (self._reasons and (yield from self._skip(_THINK))):
            self._after_mark = True
            if (yield from self._until(THOUGHT, "reasoning")):
                self._take(len(THOUGHT))
            self._after_mark = True
        calls = self._format
        while calls is None:
            self._trim()
            self._give("content", self._take(len(self._held)))
            if self._ended:
                return
            yield
        if calls.bare:
            yield from self._calls(calls, calls.heads[2])
        while (yield from self._until(calls.opener, "content")):
            if not (yield from self._calls(calls, calls.heads[0])):
                self._give("content", self._take(len(calls.opener)))

    def _calls(self, calls: ToolFormat, head: Shape) -> _Reading:
        """Calls one after the other; whether there was one."""
        first = head
        while found := (yield from self._match(head)):
            self._starts.append(len(self._text) - len(self._held))
            self._take(found.end())
            self._give("call", found["name"])
            yield from self._parameters(found["name"]) if calls.tagged else self._object()
            yield from self._skip(calls.tail)
            head = calls.heads[1]
        if head is first:
            return False
        yield from self._skip(calls.end)
        self._after_mark = True
        return True

    def _object(self) -> _Reading:
        """JSON up to where its brackets close."""
        depth, quoted, escaped = 0, False, False
        while True:
            for end, character in enumerate(self._held, start=1):
                if escaped:
                    escaped = False
                elif quoted:
                    quoted, escaped = character != '"', character == "\\"
                else:
                    quoted = character == '"'
                    depth += (character in "{[") - (character in "]}")
                if not depth:
                    self._give("arguments", self._take(end))
                    return
            self._give("arguments", self._take(len(self._held)))
            if self._ended:
                return
            yield

    def _parameters(self, function: str) -> _Reading:
        """Tagged arguments, as JSON."""
        schema = self._schemas.get(function, {})
        known = properties(schema)
        before = "{"
        while found := (yield from self._match(PARAMETER)):
            self._take(found.end())
            seen = 0
            while (at := self._held.find(TAG_END, seen)) < 0 and not self._ended:
                seen = max(0, len(self._held) - len(TAG_END))
                yield
            if at < 0:
                return
            said, name = self._take(at).removeprefix("\n").removesuffix("\n"), found["name"]
            self._take(len(TAG_END))
            value = (
                read_argument(said, known[name], schema) if name in known else read_or_text(said)
            )
            text = json.dumps({name: value}, ensure_ascii=False)
            self._give("arguments", before + text[1:-1])
            before = ", "
        self._give("arguments", "{}" if before == "{" else "}")

    # ------------------------------------------------------------------------------------ steps

    def _until(self, mark: str, kind: Literal["content", "reasoning"]) -> _Reading:
        """Give all that comes before `mark`, less the space around it; whether it has come."""
        while True:
            self._trim()
            at = self._held.find(mark)
            if at >= 0:
                self._give(kind, self._take(at).rstrip())
                return True
            if self._ended:
                self._give(kind, self._take(len(self._held)))
                return False
            sure = len(self._held) - _overlap(self._held, mark)
            self._give(kind, self._take(len(self._held[:sure].rstrip())))
            yield

    def _trim(self) -> None:
        """Drop the space behind a mark."""
        if self._after_mark:
            self._held = self._held.lstrip()
            self._after_mark = not self._held

    def _match(self, wanted: Shape) -> _Reading:
        """The match of what comes next; None if it is something else."""
        while True:
            self._trim()
            found = wanted.whole.match(self._held)
            if found or self._ended or not wanted.begun.fullmatch(self._held):
                return found
            yield

    def _skip(self, wanted: Shape) -> _Reading:
        found = yield from self._match(wanted)
        self._take(found.end() if found else 0)
        return found is not None

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _give(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        if not text:
            return
        if kind in ("content", "reasoning"):
            self._pieces.append(ParsedDelta(kind, text))
            return
        call_id = ""
        if kind == "call":
            name = uuid.uuid4().hex
            call_id = name[:9] if self._format and self._format.short_ids else f"call_{name[:24]}"
        self._pieces.append(ParsedDelta(kind, text, len(self._starts) - 1, call_id))


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
