"""Log-probabilities of prompt tokens, remembered by prefix.

Cached KV does not give logits: to score a prompt, its hit must be computed again. vLLM ignores its
cache for such requests, SGLang computes the hit again. Here the scores are remembered, too: a
prompt is computed from the end of its hit or of its scored prefix, whichever comes first. Cached
tokens before that point cost nothing. Those after it are computed in place, in the lease's own
pages: the same tokens after the same prefix write the same KV, up to rounding.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.upload import send
from radixcache.lease import Lease
from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.runtime.sampling.params import MAX_PROMPT_LOGPROBS
from radixcache.tokens import Tokens

Scores = NDArray[np.void]
"""[T, 1 + k] of `SCORE`: the token itself, then the k likeliest in its place, likeliest first."""

SCORE = np.dtype([("token", np.int32), ("logprob", np.float32)])

REMEMBERED_TOKENS = 1 << 16
"""Scored tokens that an engine remembers: 168 bytes each, so 11 MB at most."""

LOGITS_BYTES = 1 << 28
"""Bytes of float32 logits that a step may compute for prompts: 524 rows of 128,000 tokens."""

_SLICE_BYTES = 1 << 25  # of float32 logits that are reduced at a time


class ScoredPrompts:
    """Remembers the scores of prompts by prefix; the least recently used are dropped first.

    `RadixCache` is the prefix tree: its pages of one token are the rows of an array.

    Args:
        vocab_size: the model's; a bound on the likeliest tokens.
        num_tokens: tokens to remember at most; of a longer prompt, so many leading ones.
    """

    def __init__(self, vocab_size: int, num_tokens: int = REMEMBERED_TOKENS) -> None:
        self.width = 1 + min(MAX_PROMPT_LOGPROBS, vocab_size)
        self.tree = RadixCache(PagePool(num_tokens, page_size=1))
        self._rows: Scores = np.empty((num_tokens, self.width), SCORE)

    def find(self, tokens: Tokens, namespace: Hashable) -> Scores:
        """The scores of the longest known prefix of `tokens`."""
        lease = self._acquire(tokens, namespace, include_last=True)
        scores = self._rows[lease.page_table]
        self.tree.release(lease)
        return scores

    def store(self, tokens: Tokens, namespace: Hashable, scores: Scores) -> None:
        """Remember the `scores` of all `tokens`."""
        tokens = tokens[: len(self._rows)]
        lease = self._acquire(tokens, namespace)
        known = lease.num_tokens
        self.tree.reserve(lease, len(tokens))
        self._rows[lease.page_table[known:]] = scores[known : len(tokens)]
        self.tree.publish(lease, tokens[known:], written=True)
        self.tree.release(lease)

    def _acquire(self, tokens: Tokens, namespace: Hashable, include_last: bool = False) -> Lease:
        if not self.tree.idle:  # a call was cut off
            self.tree.recover()
        return self.tree.acquire(tokens, namespace, include_last=include_last)


class PromptLogprobs:
    """Collects the log-probabilities of one prompt's tokens, from the front.

    Args:
        prompt: [T] token ids, T at least 1.
        namespace: the request's; scores are shared only within it.
        known: the prompts scored before, to read and to extend.
        token_cost: how much of a step's token budget one prompt token takes.
    """

    def __init__(
        self, prompt: Tokens, namespace: Hashable, known: ScoredPrompts, token_cost: int = 1
    ) -> None:
        self.token_cost = token_cost
        self._prompt = prompt
        self._namespace = namespace
        self._known = known
        self._scores: Scores = np.zeros((len(prompt), known.width), SCORE)
        self._num_scored = 1  # the first token has no score

    @property
    def is_complete(self) -> bool:
        """Whether every token has its score."""
        return self._num_scored == len(self._prompt)

    def recall(self) -> int:
        """Take over known scores; returns how many leading tokens need not be computed. O(T).

        The last token with a score is computed again if its logits score a next one.
        """
        found = self._known.find(self._prompt, self._namespace)
        start = self._num_scored
        if len(found) > start:
            self._scores[start : len(found)] = found[start:]
            self._num_scored = len(found)
        return self._num_scored if self.is_complete else self._num_scored - 1

    def wanted(self, start: int, end: int) -> NDArray[np.int64]:
        """The positions in [start, end) whose logits score a token that has no score yet."""
        return np.arange(max(start, self._num_scored - 1), min(end, len(self._prompt) - 1))

    def add(self, logits: torch.Tensor) -> None:
        """Score the next tokens.

        Args:
            logits: [R, vocab_size] float32, of the positions before those tokens. R may be 0.
        """
        start, end = self._num_scored, self._num_scored + len(logits)
        if start < end:
            self._scores[start:end] = _score(logits, self._prompt[start:end], self._known.width)
            self._num_scored = end
            self._known.store(self._prompt[:end], self._namespace, self._scores[:end])

    def report(self, count: int) -> list[dict[int, float] | None]:
        """Return each token's log-probability, and those of the `count` likeliest in its place.

        The first has none.
        """
        scores = self._scores[1:, : 1 + count]
        rows = zip(scores["token"].tolist(), scores["logprob"].tolist(), strict=True)
        return [None, *(dict(zip(*row, strict=True)) for row in rows)]


def token_cost(vocab_size: int, budget: int) -> int:
    """How much of a step's `budget` of tokens a prompt token with logits takes.

    The logits of a whole step then take `LOGITS_BYTES` at most, or are a single row.
    """
    rows = max(1, LOGITS_BYTES // (4 * vocab_size))
    return -(-budget // rows)


@torch.inference_mode()
def _score(logits: torch.Tensor, tokens: Tokens, width: int) -> Scores:
    """[R, width] scores of `tokens` [R] by `logits` [R, vocab_size], reduced in slices."""
    scores: Scores = np.empty((len(tokens), width), SCORE)
    step = max(1, _SLICE_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(tokens), step):
        part = logits[start : start + step]
        own = send(tokens[start : start + step], logits.device, torch.int64)
        ids = torch.cat((own[:, None], part.topk(width - 1).indices), dim=1)
        logprobs = part.gather(1, ids) - part.logsumexp(-1, keepdim=True)
        scores["token"][start : start + step] = ids.cpu().numpy()
        scores["logprob"][start : start + step] = logprobs.cpu().numpy()
    return scores
