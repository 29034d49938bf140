"""Keeps answers in the requested form, by llguidance.

A grammar is compiled once, by the first thread that needs it. Each sequence follows it with a
matcher of its own, which yields the tokens that may come next and the forced ones: the next step
computes all forced tokens at once instead of one a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock, Semaphore, Thread, stack_size
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import Busy, InvalidRequest
from radixcache.kernels.upload import send
from radixcache.runtime.model.host.system_memory import give_back
from radixcache.runtime.sampling.grammar_compiler import (
    DEEP_STACK,
    MAX_COMPILERS,
    Vocabulary,
    compile_grammar,
    first_part,
    try_compile,
)
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.tokens import Tokens

if TYPE_CHECKING:  # imported when the first structure is requested
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS = 256
"""Grammars kept, those that do not compile included; the least recently used are dropped."""

MAX_KEPT_BYTES = 64 << 20
"""Bytes of all kept grammars."""

PATIENCE = 10.0
"""Seconds that a thread waits for a free compiler."""

MAX_FORCED_TOKENS = 256
"""Tokens forced on a sequence in one step at most."""

T = TypeVar("T")

_Decode = Callable[[list[int]], str]

_STACK_SIZE = Lock()
"""The size of a thread's stack is one setting for the whole process."""


class GrammarError(Exception):
    """A matcher refused a token or met a limit: the sequence cannot go on."""


class _State(NamedTuple):
    matcher: LLMatcher
    read: int
    """Generated tokens that are searched."""
    begun: bool


class LineBreaks:
    """JSON may break its lines anywhere but behind a comma or a colon.

    A model that is used to broken lines and may not begin one after a bracket closes it, and its
    list is empty. Behind a comma nothing but the next item can come, and a space does.

    Args:
        texts: of all tokens, by their ids.
        width: of a mask, in bits.
    """

    def __init__(self, texts: Sequence[bytes], width: int) -> None:
        self._separators = {i for i, text in enumerate(texts) if text.endswith((b",", b":"))}
        leading = {i for i, text in enumerate(texts) if text.startswith(b"\n")}
        inner = {i for i, text in enumerate(texts) if b",\n" in text or b":\n" in text}
        self._forbidden = inner, leading | inner
        self._allowed = []
        for tokens in self._forbidden:
            allowed = np.ones(width, np.bool_)
            allowed[[*tokens]] = False
            self._allowed.append(np.packbits(allowed, bitorder="little").view(np.int32))

    def mask(self, before: int, bits: NDArray[np.int32]) -> None:
        """Take them out of the `bits` of what may come behind the token `before`."""
        bits &= self._allowed[before in self._separators]

    def first(self, before: int, tokens: Sequence[int]) -> int:
        """The place of the first that must not be; `len(tokens)` if none is."""
        pairs = enumerate(zip([before, *tokens], tokens, strict=False))
        wrong = (i for i, (a, b) in pairs if b in self._forbidden[a in self._separators])
        return next(wrong, len(tokens))


class Grammar:
    """Where a sequence is in its grammar.

    That is a function of its tokens alone: a call that is cut off leaves nothing behind, and the
    next one reads the tokens anew.

    Args:
        compiled: the matcher before the first token; it is copied.
        after: the text behind which the grammar begins.
        decode: token ids to text, special tokens included.
        breaks: where lines may break; None is wherever `compiled` lets them.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        after: str | None,
        decode: _Decode,
        breaks: LineBreaks | None = None,
    ) -> None:
        self._compiled, self._after, self._decode = compiled, after, decode
        self._breaks = breaks
        self._state: _State | None = None

    def follow(self, generated: Tokens) -> LLMatcher | None:
        """The matcher behind the tokens `generated`; None if the grammar has not begun.

        Raises:
            GrammarError: they are not of the grammar, or it is too complex.
        """
        state = self._state
        if state is not None and state.read == len(generated):
            return state.matcher if state.begun else None
        self._state = None
        if state is None:
            state = _State(self._compiled.deep_copy(), 0, self._after is None)
        matcher, read, begun = state
        while read < len(generated) and not begun:
            read += 1
            begun = self._is_behind(generated[:read])
        new = generated[read:].tolist()
        if new and (matcher.try_consume_tokens(new) < len(new) or matcher.is_error()):
            self._check(matcher)
            reason = first_part(matcher.get_error()) or f"one of the tokens {new} is not of it"
            reason = reason.replace("NoExtensionBias", "nothing that goes on from here has an end")
            raise GrammarError(f"the structure cannot be followed: {reason}")
        self._state = _State(matcher, len(generated), begun)
        return matcher if begun else None

    def _check(self, matcher: LLMatcher) -> None:
        """Raise what cut off the tokenizer, which a matcher calls; it then lets the answer end."""
        if matcher.is_error() and "PyErr" in (reason := first_part(matcher.get_error())):
            self._state = None
            raise KeyboardInterrupt if "KeyboardInterrupt" in reason else MemoryError(reason)

    def _is_behind(self, generated: Tokens) -> bool:
        """Whether the last token completes `after`."""
        assert self._after is not None
        last = generated[-len(self._after.encode()) :].tolist()  # each is one byte at least
        return self._after in self._decode(last)

    def is_complete(self, generated: Tokens) -> bool:
        """Whether no token can follow `generated`, or it ends with a captured part that repeats the
        one before: small models would go on for ever. Raises as `follow` does."""
        matcher = self.follow(generated)
        if matcher is None or matcher.is_stopped():
            return matcher is not None
        *_, before, last = None, None, *matcher.get_captures()
        if last is None or last != before:
            return False
        # A part is captured once the rest of it is forced; the last token may begin the next one.
        tail = self._decode(generated[-len(last[1]) - 9 :].tolist())
        return tail.rstrip(" \n,").endswith(last[1].decode())

    def may_end(self, generated: Tokens) -> bool:
        """Whether the answer may end after `generated`."""
        matcher = self.follow(generated)
        return matcher is not None and matcher.is_accepting()

    def count_allowed(self, generated: Tokens, draft: Tokens) -> int:
        """How many tokens of `draft` may follow `generated`; before the grammar begins, those up to
        its beginning."""
        matcher = self.follow(generated)
        if matcher is not None:
            tokens: list[int] = draft[: matcher.validate_tokens(draft.tolist())].tolist()
            self._check(matcher)
            before = int(generated[-1]) if len(generated) else -1
            return self._breaks.first(before, tokens) if self._breaks else len(tokens)
        text = np.concatenate([generated, draft])
        ends = range(len(generated) + 1, len(text) + 1)
        return next(
            (end - len(generated) - 1 for end in ends if self._is_behind(text[:end])), len(draft)
        )

    def fill_masks(self, generated: Tokens, draft: Tokens, bits: NDArray[np.int32]) -> bool:
        """Fill `bits` [1 + len(draft), ceil(vocab / 32)]: what may come after `generated`, and
        after each token of `draft`, all of which are allowed; False if the grammar has not begun.
        """
        matcher, width = self.follow(generated), 4 * bits.shape[1]
        if matcher is None:
            return False
        if len(draft):  # rolling back over an end breaks a matcher
            matcher = matcher.deep_copy()
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, width)
        for place, token in enumerate(draft.tolist(), start=1):
            matcher.consume_token(token)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data + place * width, width)
        self._check(matcher)
        if self._breaks is not None:
            before = int(generated[-1]) if len(generated) else -1
            for row, token in zip(bits, [before, *draft.tolist()], strict=True):
                self._breaks.mask(token, row)
        return True

    def forced(self, generated: Tokens) -> list[int]:
        """The tokens forced to follow `generated`, up to a choice or a limit."""
        matcher = self.follow(generated)
        if matcher is None:
            return []
        forced = matcher.compute_ff_tokens()[:MAX_FORCED_TOKENS]
        self._check(matcher)
        return forced


def mask(
    logits: torch.Tensor,
    rows: Sequence[int],
    bits: NDArray[np.int32],
    forbidden: Sequence[Collection[int]],
) -> torch.Tensor:
    """A copy of `logits` [R, vocab] with minus infinity for what must not come.

    A GPU still computes the logits while the masks are made.

    Args:
        rows: the rows with a grammar.
        bits: for each of them, the mask of `Grammar.fill_masks`.
        forbidden: for each of them, further forbidden tokens.
    """
    vocab = logits.shape[1]
    refused = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
    for place, tokens in enumerate(forbidden):
        if tokens:
            refused[place, [*tokens]] = 1
    refusals = send(refused.view(np.bool_), logits.device)
    if len(rows) == len(logits):
        return logits.masked_fill(refusals, -torch.inf)
    where = send(rows, logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill_(refusals, -torch.inf))


class CompiledGrammar:
    """A compiled grammar: the matcher before the first token, to be copied."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self.matcher = matcher
        self.num_bytes = num_bytes


class GrammarBackend:
    """Compiles structures for one model; for any number of threads.

    Args:
        tokenizer: the model's; only those of the tokenizers library can compile grammars.
        vocab_size: width of the logits.
        end_tokens: the model's end tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = [*end_tokens]
        self._vocabulary: tuple[Vocabulary, LLTokenizer, LineBreaks] | None = None
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar | str] = OrderedDict()
        """The error of each grammar that does not compile, so that it is tried once."""
        self._in_use: WeakValueDictionary[tuple[str, str], CompiledGrammar] = WeakValueDictionary()
        self._making, self._reading = Lock(), Lock()
        self._compilers = Semaphore(MAX_COMPILERS)

    def grammar(self, structured: StructuredOutputsParams) -> Grammar:
        """A grammar for one sequence, compiled if it is not yet."""
        grammar = self.compile(structured)
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        decode = partial(tokenizer.decode, special=True)
        _, _, breaks = self.read_vocabulary()
        is_json = structured.kind in ("json", "json_object")
        return Grammar(grammar.matcher, structured.after, decode, breaks if is_json else None)

    def find(self, structured: StructuredOutputsParams) -> CompiledGrammar | None:
        """The compiled grammar, if there is one already.

        Raises:
            InvalidRequest: it is known not to compile.
        """
        key = structured.kind, structured.value
        with self._making:
            found = self._compiled.get(key) or self._in_use.get(key)
            if key in self._compiled:
                self._compiled.move_to_end(key)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def compile(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        """The compiled grammar of a structure; while a caller holds it, `find` returns it at once.

        Raises:
            InvalidRequest: it does not compile, and why; or the model's tokenizer cannot say what
                texts its tokens are.
            Busy: other grammars are compiled.
        """
        if (found := self.find(structured)) is not None:
            return found
        vocabulary, tokens, _ = self.read_vocabulary()
        if not self._compilers.acquire(timeout=PATIENCE):
            raise Busy("other structures take long to compile: try again")
        try:
            if (found := self.find(structured)) is not None:  # another thread's
                return found
            kind, text = structured.kind, structured.value
            try:
                size = try_compile(vocabulary, kind, text)
                compiling = partial(compile_grammar, kind, text, tokens, vocabulary.added)
                grammar = CompiledGrammar(_in_deep_stack(compiling), size)
            except InvalidRequest as error:
                self._keep(structured, str(error))
                raise
            self._keep(structured, grammar)
            return self.find(structured) or grammar  # it may be another thread's
        finally:
            self._compilers.release()

    def _keep(self, structured: StructuredOutputsParams, result: CompiledGrammar | str) -> None:
        key = structured.kind, structured.value
        with self._making:
            if isinstance(result, CompiledGrammar):
                result = self._in_use.setdefault(key, result)
            self._compiled[key] = result
            sizes = [len(k[1]) + getattr(g, "num_bytes", 0) for k, g in self._compiled.items()]
            total = sum(sizes)
            while len(self._compiled) > MAX_GRAMMARS or total > MAX_KEPT_BYTES:
                total -= sizes.pop(0)
                self._compiled.popitem(last=False)

    def read_vocabulary(self) -> tuple[Vocabulary, LLTokenizer, LineBreaks]:
        """The model's tokens, read once: llguidance keeps all Python threads waiting, a second for
        262,144 tokens.

        Raises:
            InvalidRequest: the tokenizer cannot say what texts its tokens are.
        """
        with self._reading:
            if self._vocabulary is None:
                if (tokenizer := self._tokenizer) is None:
                    raise InvalidRequest("structured output needs a tokenizer: this model has none")
                texts, special = tokenizer.vocabulary(self._vocab_size)
                ends = self._end_tokens or [tokenizer.eos]
                vocabulary = Vocabulary(
                    texts, special, ends, tokenizer.added, tokenizer.encode_within
                )
                breaks = LineBreaks(texts, -(-self._vocab_size // 32) * 32)
                try:
                    self._vocabulary = vocabulary, vocabulary.read(), breaks
                except (KeyboardInterrupt, MemoryError):
                    raise
                except BaseException as error:  # it panics at tokens of thousands of bytes
                    reason = first_part(str(error))
                    raise InvalidRequest(
                        f"structured output cannot read the tokenizer: {reason}"
                    ) from None
                give_back()
            return self._vocabulary


def _in_deep_stack(function: Callable[[], T]) -> T:
    """Run `function` on a thread with a large stack."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _STACK_SIZE:
        before = stack_size(DEEP_STACK)
        try:
            Thread(target=run, name="compiler", daemon=True).start()
        finally:
            stack_size(before)
    return future.result()
