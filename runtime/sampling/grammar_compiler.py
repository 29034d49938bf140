"""Compiles a grammar in a process of its own before this one does.

What a JSON schema or a pattern costs to compile cannot be seen: an intersection of patterns may
take exponential time and memory, and the library cannot be stopped. So it is tried in a process
with limits on both, which ends when it reaches one; what ends well there is compiled once more
here, where it takes as much again and no more.

Imports no torch: a process is ready in a tenth of a second and the time to read the vocabulary,
which has no limit.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from math import ceil
from typing import IO, TYPE_CHECKING, Any

from radixcache.errors import InvalidRequest
from radixcache.runtime.sampling.forced_length import MAX_FORCED_BYTES, forced_length
from radixcache.runtime.tokens.schema_defaults import ANY_OBJECT, SPACES, complete

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILERS = 2
"""Grammars that compile at the same time."""

COMPILE_SECONDS = 5
"""Processor time that a grammar may take to compile."""

WALL_SECONDS = 4 * COMPILE_SECONDS
"""Limit by the clock: other work may need the processors, too."""

COMPILE_BYTES = 128 << 20
"""Memory that it may take."""

NICENESS = 10
"""Nice value of the process while it compiles: decoding goes first."""

DEEP_STACK = 1 << 29
"""Bytes of address space: the library recurses once for each rule, and overflows 8 MiB at 1,500."""

MAX_LEXER_STATES = 25_000
"""States of each matcher; one takes one or two kilobytes."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as a grammar needs them.

    Attributes:
        tokens: the bytes of each.
        special: which of them are no text.
        end_tokens: the model's own, one at least.
        added: the texts of added tokens.
        encode: text to token ids; None where nothing is generated.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    end_tokens: Sequence[int]
    added: Mapping[int, str]
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)

    def read(self) -> LLTokenizer:
        """Make llguidance's tokenizer of it, by an object in the form of its `TokenizerWrapper`."""
        from llguidance import LLTokenizer

        encode = self.encode or (lambda _: [])

        class Tokens:
            is_tokenizer_wrapper = True
            tokens, special_token_ids = self.tokens, self.special
            eos_token_id, bos_token_id = self.end_tokens[0], None

            def __call__(self, text: str) -> list[int]:
                return encode(text)

        return LLTokenizer(Tokens(), None, [*self.end_tokens])  # type: ignore[arg-type]


def compile_grammar(
    kind: str, text: str, tokens: LLTokenizer, added: Mapping[int, str]
) -> LLMatcher:
    """The matcher before the first token, for a `StructuredOutputsParams` of this kind and value.

    Raises:
        InvalidRequest: it does not compile, and why.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    try:
        if kind == "json":
            with suppress(ValueError, RecursionError):  # the library says why
                text = json.dumps(complete(json.loads(text)))
        if kind == "json" or kind == "json_object":
            grammar = LLMatcher.grammar_from_json_schema(
                text if kind == "json" else json.dumps(ANY_OBJECT),
                defaults=SPACES,
                overrides={"lenient": False},  # what it does not know it must refuse
            )
        else:
            grammar = grammar_from(kind, text)  # type: ignore[arg-type]
        spellings = _spellings(text)
        special = (one for i, one in added.items() if tokens.is_special_token(i))
        spells_special = any(one in spelling for one in special for spelling in spellings)
        if spells_special or forced_length(kind, text) > MAX_FORCED_BYTES:
            grammar = _unforced(grammar)
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        reason = matcher.get_error()
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise InvalidRequest(f"{kind} does not compile: {first_part(_named(reason))}")
    return matcher


def _named(reason: str) -> str:
    """An error at a line of a grammar without its neighbours, and with the name of its rule."""
    found = re.match(r"at (\d+)\(\d+\): (.*?)\n *\d+ \| ", reason, re.DOTALL)
    rule = found and re.search(rf"^ *{found[1]} \| (\w+).*:", reason, re.MULTILINE)
    return f"{rule[1]}: {found[2]}" if found and rule else reason


def _spellings(text: str) -> tuple[str, str]:
    """A grammar as it is, and without the escapes that JSON, Lark and patterns have."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
    return text, plain.replace("\\", "")


def _unforced(grammar: str) -> str:
    """A grammar whose texts any tokens may spell, one at a time.

    The library forces the tokenizer's own tokens, which for the text of a special token is that
    token, and then does not take it for text; and it forces all that must come in one call.
    """
    if grammar.startswith("{"):
        (parts,) = json.loads(grammar)["grammars"]
        schema = parts["json_schema"]
        grammar = parts["lark_grammar"] or f"start: %json {json.dumps(schema)}"
    return '%llguidance {"no_forcing": true}\n' + grammar


def first_part(text: str) -> str:
    """The first part of the library's error, without the state of its parser."""
    return " ".join(text.partition("<state>")[0].split())[:300]


# In this process.


class _Process:
    """One that compiles, for one vocabulary at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.vocabulary: Vocabulary | None = None

    def try_compile(self, vocabulary: Vocabulary, kind: str, text: str) -> dict[str, Any]:
        """The compiler's answer; empty if it reached a limit of time, memory or its stack."""
        if self.vocabulary != vocabulary:
            parts = vocabulary.tokens, vocabulary.special, vocabulary.end_tokens, vocabulary.added
            self._send({"vocabulary": parts})
            if not self._receive(None):  # of 262,144 tokens: seconds, more on a busy machine
                return {}
            self.vocabulary = vocabulary
        limits = {"seconds": COMPILE_SECONDS, "bytes": COMPILE_BYTES}
        self._send({"kind": kind, "text": text, **limits})
        return self._receive(WALL_SECONDS)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def _receive(self, seconds: int | None) -> dict[str, Any]:
        """The next answer; nothing if the process ends or `seconds` pass before it comes."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        answers = poll.poll(None if seconds is None else 1000 * seconds)
        line = self._process.stdout.readline() if answers else b""
        found: dict[str, Any] = json.loads(line or "{}")
        return found

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


_idle: list[_Process] = []
"""Idle processes of all models here; a thread that uses one takes it out."""
_taking = threading.Lock()


def try_compile(vocabulary: Vocabulary, kind: str, text: str) -> int:
    """Compile in another process; returns about how many bytes the grammar takes.

    Raises:
        InvalidRequest: it does not compile, or not within the limits.
    """
    with _taking:
        fitting = [process for process in _idle if process.vocabulary == vocabulary]
        process = (fitting or _idle)[-1] if _idle else None
        if process is not None:
            _idle.remove(process)
    if process is not None and process.has_ended:  # the system may have been short of memory
        process.end()
        process = None
    process, result = process or _Process(), {}
    try:
        result = process.try_compile(vocabulary, kind, text)
    finally:
        with _taking:
            keep = bool(result) and len(_idle) < MAX_COMPILERS
            if keep:
                _idle.append(process)
        if not keep:
            process.end()
    if not result:
        raise InvalidRequest(
            f"{kind} is too complex: it takes more than {COMPILE_SECONDS} seconds or "
            f"{COMPILE_BYTES >> 20} MiB to compile"
        )
    if result["error"] is not None:
        raise InvalidRequest(result["error"])
    size: int = result["bytes"]
    return size


@atexit.register
def _end_idle() -> None:
    with _taking:
        processes, _idle[:] = [*_idle], []
    for process in processes:
        process.end()


if hasattr(os, "register_at_fork"):  # they answer the process that began them
    os.register_at_fork(after_in_child=_idle.clear)


# In the other one.


def _serve(requests: BufferedReader, answers: IO[bytes]) -> None:
    vocabulary, tokens = None, None
    while requests.peek(1):
        message = pickle.load(requests)
        if "vocabulary" in message:
            vocabulary = Vocabulary(*message["vocabulary"])
            tokens = vocabulary.read()
            with suppress(OSError):
                os.nice(max(0, NICENESS - os.nice(0)))
            _answer(answers, {"read": True})
            continue
        assert tokens is not None and vocabulary is not None
        before = _resident()
        _limit_from_here(message["seconds"], message["bytes"])
        answer: dict[str, Any] = {"error": None, "bytes": 0}
        try:
            matcher = compile_grammar(message["kind"], message["text"], tokens, vocabulary.added)
            answer["bytes"] = max(0, _resident() - before)
            del matcher
        except InvalidRequest as error:
            answer["error"] = str(error)
        _answer(answers, answer)


def _answer(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _limit_from_here(seconds: int, size: int) -> None:
    """Let the system end this process when it has taken too much more."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds += ceil(usage.ru_utime + usage.ru_stime)
    with suppress(ValueError, OSError):  # not on this system: the other process has a clock
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + size, most))


def _mapped() -> int:
    """Bytes of address space in use."""
    return _pages_of(0) * os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    """Bytes of memory in use; 0 where the system does not say."""
    return _pages_of(1) * os.sysconf("SC_PAGE_SIZE") if os.path.exists("/proc/self/statm") else 0


def _pages_of(column: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column])


def main() -> None:
    """Answer on standard output what comes on standard input, until that ends."""
    threading.stack_size(DEEP_STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
