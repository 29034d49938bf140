"""Keeps the logits at the ends of prompts, so that a prompt cached in full computes nothing.

KV does not give logits: without these, a prompt's last token is computed again each time, only for
its logits. A few rows are enough for requests that repeat a prompt soon: further completions,
retries, another answer. A row is valid as long as the model is the same, and used only while the KV
of the whole prompt is cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixcache.runtime.request import PromptKey

if TYPE_CHECKING:  # the index benchmark runs the scheduler without it
    import torch

PROMPT_LOGITS_BYTES = 1 << 26
"""Bytes of float32 logits on the model's device: 131 prompts with 128,000 tokens to choose from."""


class PromptLogitsCache:
    """Keeps logits, least recently used dropped first, in one array: single rows between a step's
    short-lived ones would fragment the heap.

    Args:
        vocab_size: the model's.
        num_bytes: the memory of all rows at most.
    """

    def __init__(self, vocab_size: int, num_bytes: int = PROMPT_LOGITS_BYTES) -> None:
        self.num_rows = num_bytes // (4 * vocab_size)
        self.num_used = 0
        """Prompts that began from a row; `clear` does not reset it."""
        self._rows: dict[PromptKey, int] = {}
        self._next = 0
        """The first row that was never given out; one that is cut off on its way is not used."""
        self._array: torch.Tensor | None = None
        """[num_rows, vocab_size]; memory is committed row by row as they are written."""

    def __contains__(self, prompt: PromptKey) -> bool:
        return prompt in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, prompt: PromptKey, logits: torch.Tensor) -> None:
        """Keep a copy of `logits` [vocab_size], float32, in place of the prompt's earlier row."""
        if self._array is None:
            self._array = logits.new_empty(self.num_rows, len(logits))
        prompt.digest()  # which lets the prompt go
        row = self._rows.pop(prompt, None)
        if row is None and self._next < self.num_rows:
            row, self._next = self._next, self._next + 1
        elif row is None:
            row = self._rows.pop(next(iter(self._rows)))
        self._array[row] = logits
        self._rows[prompt] = row

    def use(self, prompt: PromptKey) -> torch.Tensor:
        """A copy of the row of a prompt that has one, [vocab_size] float32."""
        assert self._array is not None
        row = self._rows[prompt] = self._rows.pop(prompt)
        self.num_used += 1
        return self._array[row].clone()

    def exchange(
        self,
        logits: torch.Tensor,
        prompts: list[PromptKey | None],
        counts: list[int],
        used: list[PromptKey],
    ) -> list[torch.Tensor]:
        """Keep rows of a step, and return the kept rows of other prompts.

        Args:
            logits: [sum(counts), vocab_size], float32.
            prompts: the prompt that ends at the first of its rows; None keeps none.
            counts: the number of rows of each of `prompts`.
            used: prompts that have a row.

        Returns:
            The rows of `used`, [1, vocab_size] each.
        """
        rows = [self.use(prompt)[None] for prompt in used]
        start = 0
        for prompt, count in zip(prompts, counts, strict=True):
            if prompt is not None:
                self.keep(prompt, logits[start])
            start += count
        return rows

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self._next = {}, 0


class PooledRows:
    """Keeps the rows of whole texts, least recently used dropped first: they are what a text's
    vector and score are made of, so that the same text needs no KV again. O(1) each.

    Args:
        num_bytes: of all rows at most; those of 16,000 texts in a model of 1,024 numbers a row.
    """

    def __init__(self, num_bytes: int = PROMPT_LOGITS_BYTES) -> None:
        self._room = num_bytes
        self._rows: dict[PromptKey, NDArray[np.float32]] = {}

    def __contains__(self, prompt: PromptKey) -> bool:
        return prompt in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, prompt: PromptKey, row: NDArray[np.float32]) -> None:
        """Keep a prompt's row, [hidden_size]; nobody may change it. All rows are of one size."""
        prompt.digest()  # which lets the prompt go
        self._rows.pop(prompt, None)
        self._rows[prompt] = row
        while len(self._rows) * row.nbytes > self._room:
            del self._rows[next(iter(self._rows))]

    def use(self, prompt: PromptKey) -> NDArray[np.float32]:
        """The row of a prompt that has one."""
        row = self._rows[prompt] = self._rows.pop(prompt)
        return row

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
