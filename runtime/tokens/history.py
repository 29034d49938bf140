"""Token-stable history: text that was tokens before stays those tokens."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from radixcache.base import Tokens
from radixcache.runtime.tokens.tokenizer import Tokenizer

_OVERLAP = 32  # generated tokens, at most, that are tokenised again to see how text goes on
_CHARACTER = 4  # tokens, at most, that share a character: UTF-8 has no longer ones
_RELATIVES = 8  # texts, at most, that are looked at; the best is nearly always the first

_OBJECTS = 1024  # bytes, about, that a text takes besides

_Key = tuple[bool, str, str]


@dataclass(frozen=True, eq=False)
class TokenisedText:
    """A text and the tokens that stand for it.

    Attributes:
        tokens: [n] int32.
        cuts: [d, 2] the character and the token at which each of its delimiters begins; see
            `Tokenizer.delimiters`.
        num_generated: how many tokens at the end a model chose, not the tokenizer.
        cache_salt: texts with other salts never get tokens from this one.
    """

    text: str
    tokens: Tokens
    cuts: NDArray[np.int64]
    num_generated: int = 0
    cache_salt: str | None = None

    @cached_property  # Python may add to a string's size later
    def num_bytes(self) -> int:
        """The memory it takes."""
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
    """Tokenises texts that go on from earlier ones with the tokens that those had.

    Every turn of a conversation comes as the whole text of it. To tokenise all of that costs more
    each time; and since a model does not always spell as its tokenizer would, an answer can come
    back as other tokens than were generated, and the KV cache misses from there on. So what was
    tokenised or generated is remembered, and a text that begins with it is tokenised from there:

    - Behind tokens that are all the tokenizer's own, the result is exactly `Tokenizer.encode`'s.
      They are reused up to a delimiter, where tokenisation starts afresh.
    - Generated tokens are reused if they decode to the text, or to what its plain tokens decode to
      (some tokenizers add spaces). If a delimiter follows, the rest is exact. If not (the template
      ends a turn with plain text, or trims the answer; a stop string cut it), the answer's last
      tokens are tokenised again together with what follows, and kept up to the last point where
      both ways begin a token.
    - Everything else is tokenised as if there were no history, from the last common delimiter on.

    What was used least recently is forgotten first. For any number of threads, all of which may
    tokenise at the same time.

    >>> prompt = history.encode(rendered)  # doctest: +SKIP
    >>> (output,) = llm.generate({"prompt_token_ids": prompt.tokens})  # doctest: +SKIP
    >>> history.remember(prompt, output.outputs[0].token_ids)  # doctest: +SKIP

    Args:
        max_bytes: of texts and tokens; a character of English takes about two.
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
        """The tokens of a text, which is remembered; only its own special tokens are in them.

        O(log n) to find the longest beginning among n texts, O(new text) to tokenise.
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
                self._forget(base)  # what goes on from it goes on from this one as well
            self._store(tokenised)
        return tokenised

    def remember(self, prompt: TokenisedText, generated: Sequence[int]) -> str:
        """Reuse what was generated from a prompt, in texts that go on with it. O(generated).

        Returns:
            The text that it is in them, less the end of the turn; "" if that is not certain.
        """
        if not self._delimiters:
            return ""
        ids = self._less_end(generated)
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
        """All that is remembered of texts without a salt, the least recently used first."""
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
        """What an answer is, special tokens included, less the end of the turn."""
        return self._decode(self._less_end(generated))

    def _less_end(self, generated: Sequence[int]) -> list[int]:
        ids = list(generated)
        end = self.tokenizer.delimiters.get(ids[-1]) if ids else None
        if end is not None and end not in self.tokenizer.marks:
            ids.pop()  # the template writes the end of a turn itself, perhaps another one
        return ids

    def _read(self, prompt: TokenisedText, ids: list[int]) -> str:
        """The text that `ids` stand for behind a prompt; "" if in doubt."""
        tail, known = self._aligned(prompt.tokens, _CHARACTER)
        whole = self._decode([*tail, *ids])
        if not known or not whole.startswith(known):
            return ""
        text = whole[len(known) :]
        alone = self._decode(ids)
        if text != alone and len(prompt.cuts):
            # Tokenizers that put a space before each piece of text read it back as one. The text
            # that the reader saw is without it, and so is the next prompt, maybe.
            chars, token = prompt.cuts[-1].tolist()
            plain = self.tokenizer.encode(prompt.text[chars:] + alone, special=False)
            if self._decode(plain) == self._decode([*prompt.tokens[token:].tolist(), *ids]):
                return alone
        return text

    # ------------------------------------------------------------------------------- looking up

    def _splice(self, text: str, cache_salt: str | None) -> _Splice:
        """Where the text leaves what is remembered, and the tokens from there on."""
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

        In sorted order, the neighbours of a text share most with it. One that it begins with may
        stand further up, but right before what it shares with the neighbour.
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
        """The last (character, token) at which both texts, alike so far, have a delimiter."""
        end = len(other.text)
        if shared == end and (shared == len(text) or text.startswith(self._delimiters, end)):
            return end, len(other.tokens)
        known = np.searchsorted(other.cuts[:, 0], shared, side="right")
        for chars, token in other.cuts[:known][::-1].tolist():
            if text.startswith(self._delimiters, chars):  # false for the last one at most
                return chars, token
        return 0, 0

    def _overlap(self, other: TokenisedText, text: str, shared: int) -> _Splice | None:
        """Leave an answer where no delimiter stands, near its end or nowhere."""
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
        """The last `size` tokens, or a few more so as to begin with a whole character; as text."""
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
    """Characters that two texts begin with alike. O(length).

    By bisection, because comparing strings is much faster than comparing characters.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
