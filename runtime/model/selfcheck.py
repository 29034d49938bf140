"""Texts in pages of a model, run in chunks: what the checks at load compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.states.recurrent import SequenceStates


class PagedTexts:
    """Sequences at random places of a pool; each has two state slots, which it uses in turn.

    Args:
        tokens: of each sequence.
    """

    def __init__(self, model: PagedModel, tokens: Sequence[Sequence[int]], page_size: int) -> None:
        self.model, self.page_size = model, page_size
        self.tokens = [np.asarray(one) for one in tokens]
        ends = np.cumsum([-(-len(one) // page_size) for one in tokens])
        order = np.random.default_rng(0).permutation(ends[-1]).astype(np.int32)
        self.tables = np.split(order, ends[:-1])
        self.pool = model.allocate(len(order), page_size, 2 * len(tokens))
        self.done = [0] * len(tokens)
        self.slot = [2 * number for number in range(len(tokens))]
        """Of each sequence, the one with its state."""

    def run(
        self,
        counts: dict[int, int],
        rows: NDArray[np.integer] | None = None,
        keeps: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        """Compute the next tokens of some sequences, so many or as many as there are.

        Args:
            rows: which of them give logits; None for all.
            keeps: (n, sequence) of the first: after n of these tokens, its state is that
                sequence's, too.

        Returns:
            [R, vocab_size] logits.
        """
        numbers, states, chunks, lens = [*counts], list[SequenceStates](), [], []
        for number, count in counts.items():
            start = self.done[number]
            chunks.append(self.tokens[number][start : start + count])
            lens.append(start + len(chunks[-1]))
            read = self.slot[number] if start else -1
            self.slot[number] ^= 1
            kept = tuple((n, self.slot[other]) for n, other in keeps) if not states else ()
            states.append(SequenceStates(read, self.slot[number], kept))
            self.done[number] = lens[-1]
        batch = PagedBatch.of(
            [self.tables[number] for number in numbers], [*map(len, chunks)], lens, self.page_size
        )
        tokens = np.concatenate(chunks)
        rows = np.arange(len(tokens)) if rows is None else rows
        of_step = states if self.model.state_shapes else ()
        return self.model.forward(tokens, batch, rows, self.pool, of_step)
