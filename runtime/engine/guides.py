"""Keeps answers in the form that was asked for, by llguidance.

A grammar is compiled once, by whichever thread asks first. Each sequence follows it with a matcher
of its own, which says what tokens may come next, and which must: those are given to the next step
all at once instead of one a step.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import Lock, Semaphore, Thread, stack_size
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from radixcache.base import Tokens
from radixcache.errors import InvalidRequest
from radixcache.kernels.upload import send
from radixcache.runtime.engine.structured import Structured
from radixcache.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # nobody imports it before somebody asks for a structure
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 256
"""Compiled ones that are kept, the least recently used dropped."""

MAX_TEXT = 1 << 16
"""Characters of a schema or a grammar."""

COMPILE_SECONDS = 10.0
"""For which a request waits; intersections of patterns may take exponential time."""

MAX_COMPILERS = 2
"""Threads that compile at the same time."""

COMPILER_STACK = 1 << 29
"""Bytes of address space: the library recurses once for each rule, and overflows 8 MiB at 1,500."""

MAX_LEXER_STATES = 25_000
"""Of each matcher; a state takes one or two kilobytes."""

_Decode = Callable[[list[int]], str]


class GuideBroken(Exception):
    """A matcher has refused a token, or has met a limit: the sequence cannot go on."""


class _State(NamedTuple):
    matcher: LLMatcher
    read: int
    """Generated tokens that are looked at."""
    begun: bool


class Guide:
    """Where a sequence is in its grammar.

    That is a function of its tokens alone: a call that is cut off leaves nothing behind, and the
    next one reads the tokens anew.

    Args:
        compiled: the matcher before the first token; it is copied.
        after: the text behind which the grammar begins.
        decode: token ids to text, special tokens included.
    """

    def __init__(self, compiled: LLMatcher, after: str | None, decode: _Decode) -> None:
        self._compiled, self._after, self._decode = compiled, after, decode
        self._state: _State | None = None

    def follow(self, said: Tokens) -> LLMatcher | None:
        """The matcher behind the generated tokens `said`; None if the grammar has not begun.

        Raises:
            GuideBroken: they are not of the grammar, or it is too complex.
        """
        state = self._state
        if state is not None and state.read == len(said):
            return state.matcher if state.begun else None
        self._state = None
        if state is None:
            state = _State(self._compiled.deep_copy(), 0, self._after is None)
        matcher, read, begun = state
        while read < len(said) and not begun:
            read += 1
            begun = self._is_behind(said[:read])
        new = said[read:].tolist()
        if new and (matcher.try_consume_tokens(new) < len(new) or matcher.is_error()):
            reason = _reason(matcher.get_error()) or f"one of the tokens {new} is not of it"
            raise GuideBroken(f"the structure cannot be followed: {reason}")
        self._state = _State(matcher, len(said), begun)
        return matcher if begun else None

    def _is_behind(self, said: Tokens) -> bool:
        """Whether the last token has brought the end of `after`."""
        assert self._after is not None
        last = said[-len(self._after.encode()) :].tolist()  # each is one byte at least
        return self._after in self._decode(last)

    def is_complete(self, said: Tokens) -> bool:
        """Whether nothing can come after `said`; raises what `follow` does."""
        matcher = self.follow(said)
        return matcher is not None and matcher.is_stopped()

    def may_end(self, said: Tokens) -> bool:
        """Whether `said` is in the form already."""
        matcher = self.follow(said)
        return matcher is not None and matcher.is_accepting()

    def forced(self, said: Tokens) -> list[int]:
        """The tokens that must come after `said`, as far as there is no choice."""
        matcher = self.follow(said)
        return [] if matcher is None else matcher.compute_ff_tokens()


def mask(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, LLMatcher]],
    forbidden: Sequence[Collection[int]],
) -> torch.Tensor:
    """A copy of `logits` [R, vocab] with minus infinity for what must not come.

    On a GPU the masks are made while it still computes the logits.

    Args:
        rows: those that are guided, and their matchers.
        forbidden: for each of them, tokens that must not come either.
    """
    vocab = logits.shape[1]
    width = -(-vocab // 32)
    bits = np.empty((len(rows), width), np.int32)
    for place, (_, matcher) in enumerate(rows):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data + 4 * width * place, 4 * width)
    refused = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
    for place, tokens in enumerate(forbidden):
        if tokens:
            refused[place, [*tokens]] = 1
    refusals = send(refused.view(np.bool_), logits.device)
    if len(rows) == len(logits):
        return logits.masked_fill(refusals, -torch.inf)
    where = send([row for row, _ in rows], logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill_(refusals, -torch.inf))


class Guides:
    """Compiles structures for one model; for any number of threads.

    Args:
        tokenizer: of the model; without one of the tokenizers library nothing can be compiled.
        vocab_size: width of the logits.
        end_tokens: the model's own.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = [*end_tokens]
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._making = Lock()
        self._compilers = Semaphore(MAX_COMPILERS)

    def guide(self, structured: Structured) -> Guide:
        """A guide for one sequence; compiles what is not compiled yet."""
        compiled = self.compile(structured)
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        return Guide(compiled, structured.after, lambda ids: tokenizer.decode(ids, special=True))

    def compile(self, structured: Structured) -> LLMatcher:
        """The matcher before the first token, to be copied.

        Raises:
            InvalidRequest: it does not compile, and why; or the model's tokenizer cannot say what
                texts its tokens are.
        """
        key = structured.kind, structured.value
        with self._making:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
            vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
        if len(structured.value) > MAX_TEXT:
            raise InvalidRequest(
                f"{structured.kind} of {len(structured.value)} characters: {MAX_TEXT} at most"
            )
        matcher = self._compile_aside(structured, vocabulary)
        with self._making:
            matcher = self._compiled.setdefault(key, matcher)  # or another thread's
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _compile_aside(self, structured: Structured, vocabulary: LLTokenizer) -> LLMatcher:
        """`_compile` on a thread with a large stack, which goes on alone if it takes too long."""
        future: Future[LLMatcher] = Future()
        added = self._tokenizer.added if self._tokenizer else {}

        def run() -> None:
            try:
                future.set_result(_compile(structured, vocabulary, added))
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._compilers.release()

        if not self._compilers.acquire(timeout=COMPILE_SECONDS):
            raise InvalidRequest("other structures take too long to compile: try again later")
        with self._making:
            before = stack_size(COMPILER_STACK)
            try:
                Thread(target=run, name="compiler", daemon=True).start()
            except BaseException:
                self._compilers.release()
                raise
            finally:
                stack_size(before)
        if wait([future], COMPILE_SECONDS).not_done:
            raise InvalidRequest(
                f"{structured.kind} takes more than {COMPILE_SECONDS:g} seconds to compile"
            )
        return future.result()

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        serialised = self._tokenizer and self._tokenizer.serialised
        if not serialised:
            raise InvalidRequest(
                "structured output needs a tokenizer of the tokenizers library, "
                f"and this model has {'another' if self._tokenizer else 'none'}"
            )
        try:
            return LLTokenizer(serialised, self._vocab_size, self._end_tokens or None)
        except ValueError as error:
            reason = _reason(str(error))
            raise InvalidRequest(f"structured output cannot read the tokenizer: {reason}") from None


def _compile(
    structured: Structured, vocabulary: LLTokenizer, added: Mapping[int, str]
) -> LLMatcher:
    """The matcher before the first token; `added` are the texts of added tokens."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    kind, text = structured.kind, structured.value
    try:
        if kind == "json" or kind == "json_object":
            grammar = LLMatcher.grammar_from_json_schema(
                text if kind == "json" else '{"type": "object"}',
                defaults={"whitespace_flexible": False},  # else it may go on for ever
                overrides={"lenient": False},  # what it does not know it must refuse
            )
        else:
            grammar = grammar_from(kind, text)
        spellings = _spellings(text)
        special = (one for i, one in added.items() if vocabulary.is_special_token(i))
        if any(one in spelling for one in special for spelling in spellings):
            grammar = _unforced(grammar)
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        reason = matcher.get_error()
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise InvalidRequest(f"{kind} does not compile: {_reason(reason)}")
    return matcher


def _spellings(text: str) -> tuple[str, str]:
    """A grammar as it is, and without the escapes that JSON, Lark and patterns have."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
    return text, plain.replace("\\", "")


def _unforced(grammar: str) -> str:
    """The same grammar, whose texts any tokens may spell.

    The library forces the tokenizer's own tokens, which for the text of a special token is that
    token, and then does not take it for text.
    """
    if grammar.startswith("{"):
        (parts,) = json.loads(grammar)["grammars"]
        schema = parts["json_schema"]
        grammar = parts["lark_grammar"] or f"start: %json {json.dumps(schema)}"
    return '%llguidance {"no_forcing": true}\n' + grammar


def _reason(text: str) -> str:
    """Of what the library says the first part, without the state of its parser."""
    return " ".join(text.partition("<state>")[0].split())[:300]
