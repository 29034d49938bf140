"""Applies penalties, biases and forbidden tokens to logits before a token is chosen.

Each row is changed by itself, so that a request's tokens do not depend on the batch. A table on the
device counts the tokens of each sequence; each step adds the new ones.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.upload import send
from radixcache.runtime.engine.rows import Row
from radixcache.runtime.request import Sequence
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.tokens import Tokens


class LogitsProcessors:
    """Applies the logits processors of an engine's requests."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all counts: a step was undone, or no request needs them."""
        self._counted: dict[Sequence, int] = {}
        """The number of tokens that each row of the table counts."""
        self._table: torch.Tensor | None = None

    def edit(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
        """The logits to choose from: `logits` itself if no request changes any, else a copy.

        Args:
            logits: [R, vocab] float32.
            rows: those of a sequence follow each other.
        """
        asking = {at: own for at, row in enumerate(rows) if (own := row.sequence.request.penalties)}
        if not asking:
            if self._counted:
                self.forget()
            return logits
        places, penalties = send([*asking], logits.device), [*asking.values()]
        part, some = logits[places], [rows[at] for at in asking]
        _allow(part, [one.allowed for one in penalties])
        counts = [r.position - len(r.sequence.request.prompt_token_ids) for r in some]
        counted = zip(penalties, some, counts, strict=True)
        _add(part, [one.biases(row.generated, count) for one, row, count in counted])
        if any(one.penalises for one in penalties):
            sequences = [row.sequence for row in some if not len(row.draft)]
            table = self._count(sequences, part)
            if len(sequences) < len(some):
                table = _with_drafts(table, some)
            part = _penalise(part, table, [one.params for one in penalties])
        return logits.index_copy(0, places, part)

    def _count(self, sequences: list[Sequence], like: torch.Tensor) -> torch.Tensor:
        """[S, vocab] int32: twice how often each token was generated; odd if the prompt has it."""
        device, vocab = like.device, like.shape[1]
        row = {s: i for i, (s, n) in enumerate(self._counted.items()) if n < s.num_computed}
        table = self._table
        if table is None or [*row] != sequences or len(row) < len(self._counted):
            kept = {s: table[i] for s, i in row.items()} if table is not None else {}
            table = torch.stack(
                [kept[s] if s in kept else send(_on_host(s, vocab), device) for s in sequences]
            )
        since = [self._counted[s] if s in row else s.num_computed for s in sequences]
        new = [s.tokens[n : s.num_computed] for s, n in zip(sequences, since, strict=True)]
        _count_more(table, new)
        self._table, self._counted = table, {s: s.num_computed for s in sequences}
        return table


def _with_drafts(table: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Return the table with a row for each of `rows`, which counts the row's draft, too."""
    owners = np.cumsum([not len(row.draft) for row in rows]) - 1
    table = table[send(owners, table.device)]
    _count_more(table, [row.draft for row in rows])
    return table


def _count_more(table: torch.Tensor, tokens: list[Tokens]) -> None:
    """Count, in place, generated tokens of each row."""
    if any(len(some) for some in tokens):
        at = _places(tokens, table.device)
        table.index_put_(at, torch.full_like(at[0], 2, dtype=table.dtype), accumulate=True)


def _on_host(sequence: Sequence, vocab: int) -> NDArray[np.int32]:
    """A row of `_count`."""
    prompt = sequence.request.input_token_ids
    generated = sequence.tokens[len(prompt) : sequence.num_computed]
    counts = 2 * np.bincount(generated, minlength=vocab).astype(np.int32)
    counts[prompt] |= 1
    return counts


def _allow(part: torch.Tensor, ids: list[NDArray[np.int64]]) -> None:
    """Forbid, in place, all but the allowed tokens in rows that list some."""
    named = [row for row, some in enumerate(ids) if len(some)]
    if named:
        at = _places(ids, part.device)
        kept = part[at]
        part.index_fill_(0, send(named, part.device), -torch.inf).index_put_(at, kept)


def _add(part: torch.Tensor, biases: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
    """Add each row's biases in place."""
    values = np.concatenate([values for _, values in biases])
    if len(values):
        at = _places([ids for ids, _ in biases], part.device)
        part.index_put_(at, send(values, part.device), accumulate=True)


def _places(
    ids: list[NDArray[np.int64]] | list[Tokens], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of the logits of these token ids, by row."""
    rows = np.repeat(range(len(ids)), [len(some) for some in ids])
    rows, columns = send(np.stack((rows, np.concatenate(ids).astype(np.int64))), device)
    return rows, columns


def _penalise(
    logits: torch.Tensor, counts: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    """[R, vocab] logits by what `counts` of `_count` says of each token."""

    def column(values: list[float]) -> torch.Tensor:
        return send(values, logits.device, logits.dtype)[:, None]

    repetition = column([min(max(p.repetition_penalty, 1e-30), 1e30) for p in params])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    output_counts = counts >> 1
    return (
        torch.where(counts > 0, repeated, logits)
        - column([p.frequency_penalty for p in params]) * output_counts
        - column([p.presence_penalty for p in params]) * (output_counts > 0)
    )
