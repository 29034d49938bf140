"""The tokens of one sequence that a step computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.lease import Lease
from radixcache.runtime.request import Sequence
from radixcache.runtime.spec_decode.proposer import NO_TOKENS
from radixcache.states.recurrent import SequenceStates
from radixcache.tokens import Tokens

_UNREAD = np.zeros(1, np.int32)


class Chunk(NamedTuple):
    """`num_tokens` tokens of a sequence, computed by the step; `num_computed` includes them.

    A prompt that is cached in full, with kept logits, has a chunk of no tokens.
    """

    sequence: Sequence
    num_tokens: int
    states: SequenceStates | None = None
    """The slots of a recurrent model's state."""
    draft: Tokens = NO_TOKENS
    """Drafted tokens, computed as well; `num_computed` does not include them."""
    is_unread: bool = False
    """The chunk is one token that only the device knows when it is scheduled."""

    @property
    def lease(self) -> Lease:
        """The lease of its sequence, which runs."""
        assert self.sequence.lease is not None
        return self.sequence.lease

    @property
    def tokens(self) -> Tokens:
        """[num_new] the tokens, the draft last; 0 stands for a token that is not read yet."""
        if self.is_unread:
            return _UNREAD
        end = self.sequence.num_computed
        tokens = self.sequence.tokens[end - self.num_tokens : end]
        return np.concatenate([tokens, self.draft]) if len(self.draft) else tokens

    @property
    def num_new(self) -> int:
        """Tokens that the step computes, the draft included."""
        return self.num_tokens if self.draft is NO_TOKENS else self.num_tokens + len(self.draft)

    @property
    def end(self) -> int:
        """The length of the sequence with these tokens."""
        computed = self.sequence.num_computed
        return computed if self.draft is NO_TOKENS else computed + len(self.draft)

    @property
    def is_behind(self) -> bool:
        """Whether tokens of the sequence are left for later steps."""
        return self.sequence.num_pending > 0

    @property
    def is_last(self) -> bool:
        """Whether the chunk ends the sequence, so that a token is sampled."""
        return self.is_unread or not self.is_behind

    @property
    def ends_prompt(self) -> bool:
        """Whether the first token is sampled, by the logits at the prompt's end."""
        return self.sequence.is_fresh and not self.is_unread and self.is_last

    @property
    def cost(self) -> int:
        """How much of the step's token budget the chunk takes."""
        return self.num_tokens * self.sequence.token_cost

    @property
    def scored_positions(self) -> NDArray[np.int64]:
        """Positions of the chunk whose logits score the next prompt token."""
        end, scoring = self.sequence.num_computed, self.sequence.scoring
        return np.arange(0) if scoring is None else scoring.wanted(end - self.num_tokens, end)
