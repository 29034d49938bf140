"""Makes the edits that requests want in the logits, before a token is chosen.

Each row is changed for itself, so that a request's tokens do not depend on its company. What a
sequence has said is counted in a table on the device, to which each step adds the token of the step
before: that one may not be known on the host yet.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.upload import send
from radixcache.runtime.engine.edits import Edits
from radixcache.runtime.engine.request import Sequence
from radixcache.runtime.engine.sampling import SamplingParams

NOTHING_LEFT = (
    "no token is left to go on with: what was asked for (allowed_token_ids, bad_words, "
    "logit_bias, min_tokens, a structure) forbids every one"
)
"""Why a sequence fails."""


class Editor:
    """Makes the edits of an engine's requests."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Count anew: a step was undone, or nobody asks any more."""
        self._counted: dict[Sequence, int] = {}
        """How many tokens each row of the table stands for."""
        self._table: torch.Tensor | None = None

    def edit(
        self, sequences: list[Sequence], logits: torch.Tensor, latest: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits to choose from: `logits` itself if nobody asks for edits, else a copy.

        Args:
            logits: [R, vocab] float32.
            latest: [R] each sequence's last token, on the device; None if the host knows them.
        """
        rows = [row for row, sequence in enumerate(sequences) if sequence.request.edits]
        if not rows:
            if self._counted:
                self.forget()
            return logits
        where = send(rows, logits.device)
        part, asking = logits[where], [sequences[row] for row in rows]
        _allow(part, asking)
        _add_biases(part, asking)
        penalised = [row for row, s in enumerate(asking) if _edits(s).penalises]
        if penalised:
            some = send(penalised, logits.device)
            last = None if latest is None else latest[where[some]]
            counts = self._count([asking[row] for row in penalised], last, part)
            penalised_part = _penalise(
                part[some], counts, [_edits(asking[row]).params for row in penalised]
            )
            part.index_copy_(0, some, penalised_part)
        return logits.index_copy(0, where, part)

    def _count(
        self, sequences: list[Sequence], latest: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """[R, vocab] int32: twice how often each token was generated; odd if the prompt has it."""
        device, vocab = like.device, like.shape[1]
        row = {s: i for i, (s, n) in enumerate(self._counted.items()) if n + 1 == s.num_computed}
        table = self._table
        if table is None or [*row] != sequences or len(row) < len(self._counted):
            table = torch.stack(
                [
                    send(_count_on_host(s, vocab), device)
                    if table is None or s not in row
                    else table[row[s]]
                    for s in sequences
                ]
            )
        if latest is None:
            latest = send([s.tokens.item(s.num_computed - 1) for s in sequences], device)
        more = send([2 * (s in row) for s in sequences], device, torch.int32)
        table.index_put_((torch.arange(len(table), device=device), latest), more, accumulate=True)
        self._table, self._counted = table, {s: s.num_computed for s in sequences}
        return table


def _edits(sequence: Sequence) -> Edits:
    assert sequence.request.edits is not None
    return sequence.request.edits


def _count_on_host(sequence: Sequence, vocab: int) -> NDArray[np.int32]:
    prompt = sequence.request.prompt_token_ids
    said = sequence.tokens[len(prompt) : sequence.num_computed]
    counts = 2 * np.bincount(said, minlength=vocab).astype(np.int32)
    counts[prompt] |= 1
    return counts


def _allow(part: torch.Tensor, sequences: list[Sequence]) -> None:
    """Forbid, in place, all but the allowed tokens of rows that name some."""
    allowed = {row: ids for row, s in enumerate(sequences) if len(ids := _edits(s).allowed)}
    if allowed:
        at = _places(allowed, part.device)
        kept = part[at]
        part.index_fill_(0, send([*allowed], part.device), -torch.inf).index_put_(at, kept)


def _add_biases(part: torch.Tensor, sequences: list[Sequence]) -> None:
    """Add each row's biases in place; what is forbidden now has that of minus infinity."""
    biased: dict[int, NDArray[np.int64]] = {}
    values = []
    for row, sequence in enumerate(sequences):
        edits, start = _edits(sequence), len(sequence.request.prompt_token_ids)
        end = sequence.num_computed
        forbidden = edits.forbidden(sequence.tokens[start:end], end - start)
        ids, biases = edits.bias
        if len(ids) or forbidden:
            biased[row] = np.append(ids, np.array(forbidden, np.int64))
            values += [biases, np.full(len(forbidden), -np.inf, np.float32)]
    if biased:
        bias = send(np.concatenate(values), part.device, part.dtype)
        part.index_put_(_places(biased, part.device), bias, accumulate=True)


def _places(
    ids: dict[int, NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of token ids by row, the rows and columns in the logits."""
    rows = np.repeat([*ids], [len(some) for some in ids.values()])
    rows, columns = send(np.stack((rows, np.concatenate([*ids.values()]))), device)
    return rows, columns


def _penalise(
    logits: torch.Tensor, counts: torch.Tensor, params: list[SamplingParams]
) -> torch.Tensor:
    """[R, vocab] logits by what `counts` of `_count` says of each token."""

    def column(values: list[float]) -> torch.Tensor:
        return send(values, logits.device, logits.dtype)[:, None]

    repetition = column([min(max(p.repetition_penalty, 1e-30), 1e30) for p in params])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    said = counts >> 1
    return (
        torch.where(counts > 0, repeated, logits)
        - column([p.frequency_penalty for p in params]) * said
        - column([p.presence_penalty for p in params]) * (said > 0)
    )
