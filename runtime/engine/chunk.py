"""What a step computes of one sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.base import Tokens
from radixcache.runtime.request import Sequence
from radixcache.runtime.spec_decode.proposer import NO_TOKENS
from radixcache.states import SequenceStates

_UNREAD = np.zeros(1, np.int32)


class Chunk(NamedTuple):
    """`num_tokens` tokens of a sequence, computed by the step; `num_computed` includes them.

    Of a prompt that is cached in full, and whose logits are kept, they are none.
    """

    sequence: Sequence
    num_tokens: int
    states: SequenceStates | None = None
    """Of a recurrent model."""
    draft: Tokens = NO_TOKENS
    """What may come next: computed as well, of which `num_computed` knows nothing."""
    is_unread: bool = False
    """It is one token, which only the device knows as the chunk is scheduled."""

    @property
    def tokens(self) -> Tokens:
        """[num_new] the tokens themselves, the draft at the end; 0 for one that is not read yet."""
        if self.is_unread:
            return _UNREAD
        end = self.sequence.num_computed
        tokens = self.sequence.tokens[end - self.num_tokens : end]
        return np.concatenate([tokens, self.draft]) if len(self.draft) else tokens

    @property
    def num_new(self) -> int:
        """How many tokens the step computes."""
        return self.num_tokens if self.draft is NO_TOKENS else self.num_tokens + len(self.draft)

    @property
    def end(self) -> int:
        """How long the sequence is with them."""
        computed = self.sequence.num_computed
        return computed if self.draft is NO_TOKENS else computed + len(self.draft)

    @property
    def is_behind(self) -> bool:
        """Whether the sequence has more tokens than are computed with the chunk."""
        return self.sequence.num_computed < len(self.sequence)

    @property
    def is_last(self) -> bool:
        """Whether the chunk has the sequence's last token, so that a token is sampled."""
        return self.is_unread or not self.is_behind

    @property
    def ends_prompt(self) -> bool:
        """Whether the first token is sampled: by the logits at the end of the prompt."""
        return not self.is_unread and self.is_last and self.sequence.is_fresh

    @property
    def cost(self) -> int:
        """What the chunk takes of the step's token budget."""
        return self.num_tokens * self.sequence.token_cost

    @property
    def scored_positions(self) -> NDArray[np.int64]:
        """Positions of the chunk whose logits score the prompt token that comes next."""
        end, scoring = self.sequence.num_computed, self.sequence.scoring
        return np.arange(0) if scoring is None else scoring.wanted(end - self.num_tokens, end)
