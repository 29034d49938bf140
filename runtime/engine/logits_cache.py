"""The logits at the ends of prompts, so that a prompt that is cached in full computes nothing.

KV says nothing of logits: without these, a prompt's last token is computed again each time, for its
logits alone. A few rows are enough for what asks for a prompt again, soon: further completions of
it, retries, another answer. A row is good for as long as the model is the same. It is used only
where the KV of all the prompt is cached, and goes in its turn where that is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixcache.runtime.request import PromptKey

if TYPE_CHECKING:  # the index benchmark runs the scheduler without it
    import torch

PROMPT_LOGITS_BYTES = 1 << 26
"""Of float32 logits on the model's device: 131 prompts with a vocabulary of 128,000 tokens."""


class PromptLogitsCache:
    """The logits at the ends of the prompts used last, the least recently used dropped.

    Args:
        vocab_size: of the model.
        num_bytes: of rows at most.
    """

    def __init__(self, vocab_size: int, num_bytes: int = PROMPT_LOGITS_BYTES) -> None:
        self.num_rows = num_bytes // (4 * vocab_size)
        self.num_used = 0
        """Prompts that began from a row; `clear` lets it be."""
        self._rows: dict[PromptKey, torch.Tensor] = {}

    def __contains__(self, prompt: PromptKey) -> bool:
        return prompt in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, prompt: PromptKey, logits: torch.Tensor) -> None:
        """Keep a copy of `logits` [vocab_size], float32; a row that is there is replaced."""
        row = logits.clone()
        self._rows.pop(prompt, None)
        self._rows[prompt] = row
        while len(self._rows) > self.num_rows:
            del self._rows[next(iter(self._rows))]

    def use(self, prompt: PromptKey) -> torch.Tensor:
        """The row of a prompt that is there, [vocab_size] float32; not to be changed."""
        row = self._rows.pop(prompt)
        self._rows[prompt] = row
        self.num_used += 1
        return row

    def exchange(
        self,
        logits: torch.Tensor,
        prompts: list[PromptKey | None],
        counts: list[int],
        used: list[PromptKey],
    ) -> list[torch.Tensor]:
        """Keep rows of a step, and give the kept rows of others.

        Args:
            logits: [sum(counts), vocab_size], float32.
            prompts: whose end the first of the next rows is; None keeps none.
            counts: of rows for each of `prompts`.
            used: prompts whose rows are there.

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
        self._rows = {}
