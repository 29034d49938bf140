"""Drafts the next tokens from earlier texts, without a second model.

Two sources. The tree's own continuation, where the whole sequence was computed before and went on,
as when an answer is regenerated: the explainer's memory has it, which outlives eviction. And a
suffix index over all texts of the namespace, as in SuffixDecoding (Oliaro et al., 2024), for
quotations from a prompt and phrases of many answers. Nothing is drafted across namespaces: the
speed of an answer would reveal other users' texts.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

import numpy as np

from radixcache.runtime.request import Sequence
from radixcache.runtime.spec_decode.draft_length import SOURCES, DraftLength, Source
from radixcache.runtime.spec_decode.suffix_index import MAX_MATCH, Segment, SuffixIndex
from radixcache.tokens import Tokens

MAX_DRAFT = 32
"""Tokens drafted for a sequence in one step at most."""

INDEXED_TOKENS = 1 << 20
"""Tokens remembered of the texts without a cache salt, 10 bytes each."""

SALTED_TOKENS = 1 << 16
"""Tokens per cache salt, of `MAX_SALTS` salts; then the least recently used is forgotten."""

MAX_SALTS = 64

PROBE_EVERY = 100
"""A token is drafted only to learn from it once in so many sequences of steps."""

LOOK_UP_SHARE = 0.01
"""Look-ups' share of a step's time: for a small model in a large batch it would be a tenth."""

MOST_DELAY = 0.5
"""Drafts may make a step longer by this share for a sequence that has none."""

NO_TOKENS: Tokens = np.empty(0, np.int32)

Continue = Callable[[Tokens, Hashable, int], list[Tokens]]
"""The continuations of a whole text in a namespace, up to so many tokens each."""


class _State:
    """The state of one sequence; if a call is cut off, its drafts are worse at worst."""

    __slots__ = (
        "is_idle",
        "match",
        "num_followed",
        "num_indexed",
        "path_start",
        "paths",
        "segment",
        "source",
    )

    def __init__(self) -> None:
        self.num_indexed: int | None = None
        """Leading tokens in the suffix index; None before any is computed."""
        self.segment: Segment | None = None
        self.paths: list[Tokens] | None = None
        """The continuations of the first `path_start` tokens that the sequence still follows."""
        self.path_start = self.num_followed = 0
        self.source: Source = "suffix"
        """The last draft's source, and the length of the `match` behind it."""
        self.match = 0
        self.is_idle = False
        """The last look-up found nothing worth drafting."""


class DraftProposer:
    """Drafts for the sequences of one engine, on its thread.

    Args:
        continue_text: finds the continuations of a whole text.
        end_tokens: the model's end tokens: a draft stops before them.
        vocab_size: a draft stops before other ids, which stand for images.

    Attributes:
        num_drafts, num_draft_tokens, num_accepted_tokens: by source, since the engine was made.
    """

    def __init__(
        self, continue_text: Continue, end_tokens: list[int], vocab_size: int = 2**31
    ) -> None:
        self._vocab_size = vocab_size
        self._continue, self._end_tokens = continue_text, frozenset(end_tokens)
        self.length = DraftLength()
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()
        self.num_drafts: Counter[Source] = Counter()
        self.num_draft_tokens: Counter[Source] = Counter(dict.fromkeys(SOURCES, 0))
        self.num_accepted_tokens: Counter[Source] = Counter(dict.fromkeys(SOURCES, 0))
        self._unprobed = self._turn = 0
        self._cost = 1e-5
        """Seconds that a look-up takes."""
        self.clear()

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = _State()
        return state

    def clear(self) -> None:
        """Forget all texts."""
        self._indices: OrderedDict[Hashable, SuffixIndex] = OrderedDict()

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Index a sequence's first tokens, which are computed or about to be. O(new tokens).

        A few tokens are indexed later, with the next ones or when a look-up needs them.
        """
        state, lease = self._state(sequence), sequence.lease
        if state.num_indexed is None:  # cached tokens were indexed when they were computed
            state.num_indexed = lease.num_tokens if lease is not None else 0
        waits = sequence.num_computed < num_tokens < state.num_indexed + 512
        if num_tokens > state.num_indexed and not waits:
            index = self._index(sequence.request.namespace)
            text = sequence.tokens[:num_tokens]
            state.segment = index.add(text, state.num_indexed, state.segment)
            state.num_indexed = num_tokens

    def _index(self, namespace: Hashable) -> SuffixIndex:
        index = self._indices.get(namespace)
        if index is None:
            size = INDEXED_TOKENS if namespace is None else SALTED_TOKENS
            index = self._indices[namespace] = SuffixIndex(size)
            salted = [one for one in self._indices if one is not None]
            if len(salted) > MAX_SALTS:
                del self._indices[salted[0]]
        self._indices.move_to_end(namespace)
        return index

    def propose(self, sequences: list[Sequence], room: int) -> dict[Sequence, Tokens]:
        """Draft at most `room` tokens in all for the sequences of a step that get a token.

        Tokens are drafted where they pay, the likeliest first, and a few more to learn from them.
        Some 10 us a sequence of any length, but O(tokens) for its first draft.
        """
        began, num_sequences = time.perf_counter(), len(sequences)
        threshold, fixed = self.length.costs(len(sequences))
        self._unprobed += len(sequences)
        least_gain = fixed + self._cost * len(sequences) / self.length.step_seconds  # in tokens
        sequences = self._choose_sequences(sequences)
        found: list[list[int]] = []
        offers: list[tuple[float, int]] = []
        for at, sequence in enumerate(sequences):
            found.append(draft := self._look_up(sequence, MAX_DRAFT))
            state = self._state(sequence)
            chances = self._chances(sequence, len(draft), threshold)
            state.is_idle = sum(chances) - threshold * len(chances) <= least_gain
            if not state.is_idle:
                offers += [(chance, at) for chance in chances]
        if len({at for _, at in offers}) < num_sequences:  # a row takes threshold / num_sequences
            room = min(room, int(MOST_DELAY * num_sequences / threshold))  # of a step
        if len(offers) > room:
            offers = sorted(offers, reverse=True)[:room]
        counts = [0] * len(found)
        for _, at in offers:
            counts[at] += 1
        if self._unprobed >= PROBE_EVERY and len(offers) < room:
            for at in [at for at, draft in enumerate(found) if draft and not counts[at]][:1]:
                counts[at], self._unprobed = 1, 0
        drafts = {
            sequence: self._allowed(sequence, draft[:count])
            for sequence, draft, count in zip(sequences, found, counts, strict=True)
            if count
        }
        self._cost += 0.1 * ((time.perf_counter() - began) / len(sequences) - self._cost)
        return drafts

    @staticmethod
    def _allowed(sequence: Sequence, draft: list[int]) -> Tokens:
        """The part of a draft that the sequence's grammar allows."""
        tokens = np.array(draft, np.int32)
        if sequence.grammar is not None:
            tokens = tokens[: sequence.grammar.count_allowed(sequence.generated, tokens)]
        return tokens

    def _choose_sequences(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences to look up in this step: those whose last look-up found something, and as
        many of the others, in turns, as there is time for."""
        for sequence in sequences:
            if self._state(sequence).paths is None:
                self._find_paths(sequence)
        number = max(1, int(LOOK_UP_SHARE * min(self.length.step_seconds / self._cost, 1e9)))
        if number >= len(sequences):
            return sequences
        idle = [sequence for sequence in sequences if self._state(sequence).is_idle]
        busy = [sequence for sequence in sequences if not self._state(sequence).is_idle]
        number = min(len(idle), max(1, number - len(busy)))
        self._turn += number
        start = self._turn % max(1, len(idle))
        return busy + (idle[start:] + idle[:start])[:number]

    def expects(self, sequences: list[Sequence]) -> bool:
        """Whether drafts would gain more than launching a step before the tokens are read."""
        threshold, fixed = self.length.costs(len(sequences))
        gain = -fixed
        for sequence in sequences:
            draft = self._look_up(sequence, MAX_DRAFT)[1:]  # its first token is being computed
            chances = self._chances(sequence, len(draft), threshold)
            gain += sum(chances) - threshold * len(chances)
        return gain > len(sequences) / 2

    def _chances(self, sequence: Sequence, count: int, least: float) -> list[float]:
        state = self._state(sequence)
        kind = state.source, sequence.request.params.temperature > 0
        return self.length.chances(kind, state.match, count, least)

    def _find_paths(self, sequence: Sequence) -> None:
        state, room = self._state(sequence), sequence.max_tokens - sequence.num_generated
        state.paths = self._continue(sequence.tokens, sequence.request.namespace, room)
        state.path_start = len(sequence)
        state.is_idle = not state.paths

    def _look_up(self, sequence: Sequence, count: int) -> list[int]:
        """The likely next tokens, at most as many as the sequence may generate before its last."""
        request, length, state = sequence.request, len(sequence), self._state(sequence)
        count = min(count, sequence.max_tokens - sequence.num_generated - 1)
        if count < 1 or sequence.scoring is not None:
            return []
        if state.paths is None:
            self._find_paths(sequence)
        assert state.paths is not None
        draft, known = list[int](), length - state.path_start
        if state.paths:
            start, state.num_followed = state.num_followed, known
            followed = sequence.tokens[state.path_start + start :]
            state.paths = [
                path for path in state.paths if np.array_equal(path[start:known], followed)
            ]
            draft = state.paths[0][known : known + count].tolist() if state.paths else []
        state.source, state.match = "tree", known
        if not draft:
            self.remember(sequence, length)
            tail = sequence.tokens[-MAX_MATCH:].tolist()
            state.source = "suffix"
            state.match, draft = self._index(request.namespace).find(tail, count)
        return self._before_end(sequence, draft)

    def _before_end(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """The draft up to a token that ends the text: the row before it samples that itself."""
        params = sequence.request.params
        ends = frozenset() if params.ignore_eos else self._end_tokens
        if params.stop_token_ids:
            ends = ends.union(params.stop_token_ids)
        if ends.isdisjoint(draft) and max(draft, default=0) < self._vocab_size:
            return draft
        last = (i for i, t in enumerate(draft) if t in ends or t >= self._vocab_size)
        return draft[: next(last)]

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a sequence's last draft were computed and accepted."""
        state, params = self._state(sequence), sequence.request.params
        kind = state.source, params.temperature > 0
        self.length.learn(kind, state.match, accepted, accepted < drafted)
        self.num_drafts[state.source] += 1
        self.num_draft_tokens[state.source] += drafted
        self.num_accepted_tokens[state.source] += accepted
        sequence.num_drafted[state.source] += drafted
        sequence.num_accepted[state.source] += accepted
