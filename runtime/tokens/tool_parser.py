"""Parses an answer as it comes into content, thoughts and calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Mapping
from typing import Any, Literal

from radixcache.runtime.tokens.mended_json import MendedJson
from radixcache.runtime.tokens.tagged_arguments import read_argument, read_or_text
from radixcache.runtime.tokens.tool_calls import (
    Call,
    ParsedDelta,
    ParsedMessage,
    called_by,
    read_object,
)
from radixcache.runtime.tokens.tool_formats import (
    PARAMETER,
    TAG_END,
    THINK,
    THOUGHT,
    Shape,
    ToolFormat,
    is_name,
    properties,
    shape,
)

_Reading = Generator[None, None, Any]
"""Yields when it needs more text."""
_THINK = shape(THINK)
_UNUSUAL_HEAD = 32
"""Characters after which an unusual object shows whether it may be a call."""
_UNUSUAL = re.compile(
    r'\{\s{0,8}"(?:(?:arguments|parameters|type|function|id)"|'
    r'name"\s{0,8}:\s{0,8}"[^"]{0,256}(?:"|\Z))'
)
"""The beginning of an object that may be a call, tried after `_UNUSUAL_HEAD` characters."""
_READ_AGAIN = 1 << 19
"""Characters of objects that turn out to be no calls, after which only plain calls are found."""


class MessageParser:
    """Parses one answer.

    Text that is no call in the format, such as one cut off within its name, is content.

    Args:
        calls: the format of calls; None if calls are content.
        reasons: the model may think first.
        thinking: the prompt's end has opened thoughts.
        schemas: each function's parameters, which tell text from JSON in tagged arguments.
        repeats: calls may repeat the one before; else such a call is held back and dropped.
    """

    def __init__(
        self,
        calls: ToolFormat | None,
        reasons: bool = False,
        thinking: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        repeats: bool = True,
    ) -> None:
        self._format = calls
        self._reasons = reasons
        self._thinking = thinking
        self._schemas = schemas or {}
        self._held = ""
        self._space = ""
        """Space before a mark, which is content if the mark begins no call."""
        self._pieces: list[ParsedDelta] = []
        self._parsed: list[ParsedDelta] = []
        self._num_calls = 0
        self._repeats = repeats
        self._call_text = self._call_before = ""
        self._unsure: list[ParsedDelta] = []
        """Pieces of a call that may repeat the one before."""
        self._after_mark = False
        self._left_to_reread = _READ_AGAIN
        self._ended = self._cut = False
        self._reading = self._read()

    def feed(self, text: str, ended: bool = False, cut: bool = False) -> list[ParsedDelta]:
        """The pieces that come with `text`; once it has `ended`, also those held back.

        An answer that was `cut` off is not completed.
        """
        self._held += text
        self._ended, self._cut = ended, cut
        self._pieces = []
        next(self._reading, None)
        if ended and self._call_text != self._call_before:
            self._pieces += self._unsure
        self._parsed += self._pieces
        return self._pieces

    def message(self) -> ParsedMessage:
        """The message of all pieces so far."""
        content, reasoning, calls = "", "", list[Call]()
        for piece in self._parsed:
            match piece.kind:
                case "content":
                    content += piece.text
                case "reasoning":
                    reasoning += piece.text
                case "call":
                    calls.append(Call(piece.call_id, piece.text, ""))
                case "arguments":
                    calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + piece.text)
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
            self._emit("content", self._take(len(self._held)))
            if self._ended:
                return
            yield
        if calls.bare:
            yield from self._calls(calls, 2)
        while (yield from self._until(calls.opener, "content")):
            if not (yield from self._calls(calls, 0)):
                self._emit("content", self._space + self._take(len(calls.opener)))

    def _calls(self, calls: ToolFormat, head: int) -> _Reading:
        """Parse calls in a row, the first after `calls.heads[head]`; returns whether there was one.

        Once a call's arguments begin, they are passed on, so it stays a call whatever they are.
        """
        before = self._num_calls
        while True:
            if found := (yield from self._match(calls.heads[head])):
                self._take(found.end())
                self._call(found["name"])
                yield from self._parameters(found["name"]) if calls.tagged else self._object(calls)
            elif not (yield from self._unusual_call(calls, head)):
                break
            for part in calls.tail:
                yield from self._skip(part)
            head = 1
        if self._num_calls == before:
            return False
        yield from self._skip(calls.end)
        self._after_mark = True
        return True

    def _call(self, name: str) -> None:
        self._num_calls += 1
        self._emit("call", name)

    def _object(self, calls: ToolFormat) -> _Reading:
        """Parse arguments in JSON, until their brackets close."""
        mended = MendedJson(calls.mark)
        while True:
            text, taken = mended.feed(self._held, self._ended and not self._cut)
            self._take(taken)
            self._emit("arguments", text)
            if mended.done or self._ended:
                return
            yield

    def _unusual_call(self, calls: ToolFormat, head: int) -> _Reading:
        """Parse a call whose object has unusual keys or order, and emit it when it is complete."""
        if not calls.begins or self._left_to_reread < 0:
            return False
        if not (found := (yield from self._match(calls.begins[head]))):
            return False
        mended, text, at = MendedJson(calls.mark), "", found.end()
        while True:
            piece, taken = mended.feed(self._held[at:], self._ended and not self._cut)
            text, at = text + piece, at + taken
            if len(text) > _UNUSUAL_HEAD and not _UNUSUAL.match(text):
                return False
            if mended.done or self._ended:
                break
            yield
        name, arguments = called_by(read_object(text) or {})
        known = name in self._schemas if calls.bare and head == 2 else is_name(name)
        if not known or arguments is None:
            self._left_to_reread -= len(text)
            return False
        self._take(at)
        self._call(name)
        self._emit("arguments", json.dumps(arguments, ensure_ascii=False))
        return True

    def _parameters(self, function: str) -> _Reading:
        """Parse tagged arguments into JSON."""
        schema = self._schemas.get(function, {})
        known = properties(schema)
        before = "{"
        while found := (yield from self._match(PARAMETER)):
            self._take(found.end())
            seen = 0
            while (at := self._held.find(TAG_END, seen)) < 0 and not self._ended:
                seen = max(0, len(self._held) - len(TAG_END))
                yield
            if at < 0 and self._cut:
                said = self._take(len(self._held)).removeprefix("\n")
                text = json.dumps({found["name"]: said}, ensure_ascii=False)
                self._emit("arguments", before + text[1:-2])
                return
            if at < 0:  # the argument ends with the call, or with the text
                ends = (self._held.find(mark) for mark in ("</function>", "</tool_call>"))
                at = min((end for end in ends if end >= 0), default=len(self._held))
                self._held = self._held[:at] + TAG_END + self._held[at:]
            said, name = self._take(at).removeprefix("\n").removesuffix("\n"), found["name"]
            self._take(len(TAG_END))
            value = (
                read_argument(said, known[name], schema) if name in known else read_or_text(said)
            )
            text = json.dumps({name: value}, ensure_ascii=False)
            self._emit("arguments", before + text[1:-1])
            before = ", "
        self._emit("arguments", "{}" if before == "{" else "}")

    # ------------------------------------------------------------------------------------ steps

    def _until(self, mark: str, kind: Literal["content", "reasoning"]) -> _Reading:
        """Emit the text before `mark`, without space around it; returns whether the mark came."""
        while True:
            self._trim()
            at = self._held.find(mark)
            if at >= 0:
                before = self._take(at)
                self._emit(kind, before.rstrip())
                self._space = before[len(before.rstrip()) :]
                return True
            if self._ended:
                self._emit(kind, self._take(len(self._held)))
                return False
            sure = len(self._held) - _overlap(self._held, mark)
            self._emit(kind, self._take(len(self._held[:sure].rstrip())))
            yield

    def _trim(self) -> None:
        """Drop the space behind a mark."""
        if self._after_mark:
            self._held = self._held.lstrip()
            self._after_mark = not self._held

    def _match(self, wanted: Shape) -> _Reading:
        """The match of the text that comes next, or None."""
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

    def _emit(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        if not text:
            return
        if kind in ("content", "reasoning"):
            if not self._unsure:  # else it follows a call that is dropped
                self._pieces.append(ParsedDelta(kind, text))
            return
        call_id = ""
        if kind == "call":
            name = uuid.uuid4().hex
            call_id = name[:9] if self._format and self._format.short_ids else f"call_{name[:24]}"
            self._call_before, self._call_text, self._unsure = self._call_text, "", []
        self._unsure.append(ParsedDelta(kind, text, self._num_calls - 1, call_id))
        if not self._repeats:
            self._call_text += text
            if self._call_before.startswith(self._call_text):
                return
        self._pieces += self._unsure
        self._unsure = []


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
