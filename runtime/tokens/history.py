"""Token-stable history: a text that was tokenised or generated before keeps its tokens."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.tokens import Tokens

_OVERLAP = 32  # most generated tokens that are tokenised again with the text after them
_CHARACTER = 4  # most tokens of one character: UTF-8 has at most four bytes
_RELATIVES = 8  # most texts that are compared; the best is nearly always the first

_OBJECTS = 1024  # bytes, about, that a text takes besides its characters and tokens

_Key = tuple[bool, str, str]


@dataclass(frozen=True, eq=False)
class TokenisedText:
    """A text and the tokens that stand for it.

    Attributes:
        tokens: [n] int32.
        cuts: [d, 2] the character and the token at which each delimiter begins; see
            `Tokenizer.delimiters`.
        num_generated: tokens at the end that a model generated.
        images: those of a prompt, with their places in it; kept texts have none.
        cache_salt: only texts with the same salt reuse these tokens.
    """

    text: str
    tokens: Tokens
    cuts: NDArray[np.int64]
    num_generated: int = 0
    cache_salt: str | None = None
    images: tuple[Any, ...] = ()

    @cached_property  # Python may add to a string's size later
    def num_bytes(self) -> int:
        """Bytes of memory."""
        texts = sys.getsizeof(self.text) + sys.getsizeof(self.cache_salt)
        return texts + self.tokens.nbytes + self.cuts.nbytes + _OBJECTS

    @property
    def _key(self) -> _Key:
        return _key(self.text, self.cache_salt)


class _Splice(NamedTuple):
    """The first `num_kept` tokens of `base`, then `ids`, which begin at the characters `starts`."""

    base: TokenisedText
    num_kept: int
    ids: list[int]
    starts: list[int]


class TokenHistory:
    """Tokenises texts so that they keep the tokens of the earlier texts that they continue.

    Each turn of a conversation is sent with the whole text before it. Tokenising all of it costs
    more each time; and as a model does not always split text as its tokenizer does, an answer can
    come back as other tokens than were generated, so that the KV cache misses from there on. Texts
    and answers are therefore remembered, and a text that begins with one is tokenised from there:

    - After the tokenizer's own tokens, the result is exactly `Tokenizer.encode`'s. They are reused
      up to a delimiter, where tokenisation starts afresh.
    - Generated tokens are reused if they decode to the text, or to what its plain tokens decode to
      (some tokenizers add spaces). If a delimiter follows, the rest is exact. If not (the template
      ends a turn with plain text, or trims the answer; a stop string cut it), the answer's last
      tokens are tokenised again with the text after them, and kept up to the last point where a
      token begins both ways.
    - All other text is tokenised as if there were no history, from the last common delimiter on.

    The least recently used texts are forgotten first. For any number of threads, which may
    tokenise at the same time.

    >>> prompt = history.encode(rendered)  # doctest: +SKIP
    >>> (output,) = llm.generate([prompt])  # doctest: +SKIP
    >>> history.remember(prompt, output.outputs[0].token_ids)  # doctest: +SKIP

    Args:
        max_bytes: limit on texts and tokens; a character of English takes about two.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = 64 << 20) -> None:
        self.tokenizer = tokenizer
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = Lock()
        self._delimiters = tuple(tokenizer.delimiters.values())
        self._delimiter_ids = np.array(list(tokenizer.delimiters), np.int32)
        self._texts: OrderedDict[_Key, TokenisedText] = OrderedDict()  # by last use
        self._sorted: SortedList[_Key] = SortedList()

    def encode(self, text: str, cache_salt: str | None = None) -> TokenisedText:
        """Tokenise a text, without adding special tokens, and remember it.

        O(log n) to find the longest shared beginning among n texts, O(new text) to tokenise.
        """
        if not self._delimiters:
            ids = self.tokenizer.encode(text, special=False)
            return TokenisedText(text, np.array(ids, np.int32), _no_cuts(), 0, cache_salt)
        base, num_kept, ids, starts = self._splice(text, cache_salt)
        with self._lock:
            if base._key in self._texts:
                self._texts.move_to_end(base._key)
        if base.text == text:
            return base
        new = np.array(ids, np.int32)
        at = np.flatnonzero(np.isin(new, self._delimiter_ids)).tolist()
        at = [i for i in at if text.startswith(self._delimiters, starts[i])]  # not for an <unk>
        new_cuts = np.array([(starts[i], num_kept + i) for i in at], np.int64).reshape(-1, 2)
        tokenised = TokenisedText(
            text,
            np.concatenate([base.tokens[:num_kept], new]),
            np.concatenate([base.cuts[base.cuts[:, 1] < num_kept], new_cuts]),
            cache_salt=cache_salt,
        )
        left_at_its_end = 0 in at and num_kept == len(base.tokens)
        with self._lock:
            if text.startswith(base.text) and (left_at_its_end or not base.num_generated):
                self._forget(base)  # a text that continues it continues this one as well
            self._store(tokenised)
        return tokenised

    def remember(self, prompt: TokenisedText, generated: Sequence[int]) -> str:
        """Let later texts reuse the tokens generated from a prompt. O(generated).

        Returns:
            The answer's text in such texts, without the end of the turn; "" if it is uncertain.
        """
        if not self._delimiters:
            return ""
        ids = self._without_end(generated)
        answer = self._read(prompt, ids)
        if not answer:
            return ""
        remembered = TokenisedText(
            prompt.text + answer,
            np.concatenate([prompt.tokens, np.array(ids, np.int32)]),
            prompt.cuts,
            len(ids),
            prompt.cache_salt,
        )
        with self._lock:
            self._forget(prompt)
            self._store(remembered)
        return answer

    def texts(self) -> list[TokenisedText]:
        """The remembered texts without a salt, the least recently used first."""
        with self._lock:
            return [text for text in self._texts.values() if text.cache_salt is None]

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._texts.clear()
            self._sorted.clear()
            self.num_bytes = 0

    def add(self, text: TokenisedText) -> None:
        """Remember a text and its tokens as they are."""
        with self._lock:
            self._store(text)

    def text_of(self, generated: Sequence[int]) -> str:
        """An answer's text with special tokens, without the end of the turn."""
        return self._decode(self._without_end(generated))

    def _without_end(self, generated: Sequence[int]) -> list[int]:
        ids = list(generated)
        end = self.tokenizer.delimiters.get(ids[-1]) if ids else None
        if end is not None and end not in self.tokenizer.marks:
            ids.pop()  # the template writes the end of a turn itself, perhaps differently
        return ids

    def _read(self, prompt: TokenisedText, ids: list[int]) -> str:
        """The text of `ids` after a prompt; "" if in doubt."""
        tail, known = self._aligned(prompt.tokens, _CHARACTER)
        whole = self._decode([*tail, *ids])
        if not known or not whole.startswith(known):
            return ""
        text = whole[len(known) :]
        alone = self._decode(ids)
        if text != alone and len(prompt.cuts):
            # Tokenizers that put a space before each piece of text decode it as one. The client saw
            # the text without it, and may send it so.
            chars, token = prompt.cuts[-1].tolist()
            plain = self.tokenizer.encode(prompt.text[chars:] + alone, special=False)
            if self._decode(plain) == self._decode([*prompt.tokens[token:].tolist(), *ids]):
                return alone
        return text

    # ------------------------------------------------------------------------------- looking up

    def _splice(self, text: str, cache_salt: str | None) -> _Splice:
        """Where the text departs from remembered ones, and its tokens from there on."""
        base, chars, num_kept = TokenisedText("", np.empty(0, np.int32), _no_cuts()), 0, 0
        answers = []
        with self._lock:
            relatives = [*self._relatives(text, cache_salt)]
        for other, shared in relatives:
            other_chars, other_kept = self._last_cut(other, text, shared)
            if other_chars > chars:
                base, chars, num_kept = other, other_chars, other_kept
            if other.num_generated:
                answers.append((shared, other))
        for shared, other in answers:
            if shared > chars:
                splice = self._overlap(other, text, shared)
                if splice is not None:
                    return splice
        ids, offsets = self.tokenizer.encode_with_offsets(text[chars:])
        return _Splice(base, num_kept, ids, [chars + start for start, _ in offsets])

    def _relatives(self, text: str, cache_salt: str | None) -> Iterator[tuple[TokenisedText, int]]:
        """Remembered texts, and how many characters they share with `text`.

        In sorted order, a text's neighbours share most with it. A text that it begins with may be
        further up, right before what it shares with the neighbour.
        """
        key = _key(text, cache_salt)
        place = self._sorted.bisect_left(key)
        if place < len(self._sorted):
            other = self._texts[self._sorted[place]]
            if other.cache_salt == cache_salt:
                yield other, common_prefix(text, other.text)
        for _ in range(_RELATIVES):
            if not place:
                return
            other = self._texts[self._sorted[place - 1]]
            if other.cache_salt != cache_salt:
                return
            shared = common_prefix(text, other.text)
            yield other, shared
            if shared == len(other.text):
                return
            place = self._sorted.bisect_right(_key(text[:shared], cache_salt))

    def _last_cut(self, other: TokenisedText, text: str, shared: int) -> tuple[int, int]:
        """The last (character, token) up to which both texts are equal, and have a delimiter."""
        end = len(other.text)
        if shared == end and (shared == len(text) or text.startswith(self._delimiters, end)):
            return end, len(other.tokens)
        known = np.searchsorted(other.cuts[:, 0], shared, side="right")
        for chars, token in other.cuts[:known][::-1].tolist():
            if text.startswith(self._delimiters, chars):  # false for the last one at most
                return chars, token
        return 0, 0

    def _overlap(self, other: TokenisedText, text: str, shared: int) -> _Splice | None:
        """Depart from an answer without a delimiter, near its end; None if that fails."""
        size = min(_OVERLAP, other.num_generated)
        tail, known = self._aligned(other.tokens, size)
        start = len(other.text) - len(known)
        if not known or not other.text.endswith(known) or start >= shared:
            return None
        ids, offsets = self.tokenizer.encode_with_offsets(text[start:])
        plain = self._decode(ids)
        for dropped in range(size):
            kept = tail[: len(tail) - dropped]
            read = self._decode(kept)
            if start + len(read) > shared or not known.startswith(read):
                continue
            first = bisect_left(offsets, (len(read),))
            if self._decode([*kept, *ids[first:]]) == plain:
                starts = [start + chars for chars, _ in offsets[first:]]
                return _Splice(other, len(other.tokens) - dropped, ids[first:], starts)
        return None

    def _aligned(self, tokens: Tokens, size: int) -> tuple[list[int], str]:
        """The last `size` tokens, or a few more to begin with a whole character, and their text."""
        for more in range(_CHARACTER):
            tail = tokens[-size - more :].tolist()
            text = self._decode(tail)
            if not text.startswith("\ufffd"):
                return tail, text
        return [], ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, special=True)

    # --------------------------------------------------------------------------------- forgetting

    def _store(self, text: TokenisedText) -> None:
        self._forget(text)
        self._texts[text._key] = text
        self._sorted.add(text._key)
        self.num_bytes += text.num_bytes
        while self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._texts.values())))

    def _forget(self, text: TokenisedText) -> None:
        old = self._texts.pop(text._key, None)
        if old is not None:
            self._sorted.remove(text._key)
            self.num_bytes -= old.num_bytes


def _key(text: str, cache_salt: str | None) -> _Key:
    """Sorts by salt, then by text."""
    return cache_salt is not None, cache_salt or "", text


def _no_cuts() -> NDArray[np.int64]:
    return np.empty((0, 2), np.int64)


def common_prefix(one: str, other: str) -> int:
    """Characters of the common prefix of two texts. O(length).

    By bisection: comparing strings is much faster than comparing characters.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
