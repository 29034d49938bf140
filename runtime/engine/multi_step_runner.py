"""Multi-step scheduling: several steps of sequences that only decode in one call of the model.

On a CPU the Python between two steps takes a tenth of a small model's step, for the weights wipe
the caches. The tokens of a call come together, so a call is short, and ends when another thread
wants something of the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from ctypes import c_int32
from math import inf

import numpy as np

from radixcache.kernels.draw import MultiStep
from radixcache.kernels.upload import Fetch
from radixcache.runtime.engine.model_runner import ModelRunner
from radixcache.runtime.engine.rows import Row
from radixcache.runtime.engine.sampler import PendingStep, Sampler
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.tokens import Tokens

CALL_SECONDS = 0.02
"""The aim for the steps of a call."""

MAX_STEPS = 8


class MultiStepRunner:
    """Schedules, runs and samples the steps of a call, for one engine.

    Attributes:
        interrupt: while it is not 0, no step follows the first one; another thread may set it.
        step_seconds: what the last step that only decoded took; a larger batch is measured anew.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, sampler: Sampler, ends: Collection[int]
    ) -> None:
        """`ends` are the tokens that end a text."""
        self._runner, self._scheduler, self._sampler = runner, scheduler, sampler
        self._ends = ends
        self.interrupt, self.step_seconds = c_int32(0), inf
        self._num_measured = 0
        """Sequences of the step that was measured."""
        self._most = MAX_STEPS
        """Steps of the next call at most: steps that an interrupt prevents are prepared in vain."""

    def note(self, num_rows: int, num_steps: int, seconds: float) -> None:
        """Measure steps that only decoded so many tokens."""
        self.step_seconds, self._num_measured = seconds / num_steps, num_rows // num_steps

    def run(self) -> tuple[PendingStep, int] | None:
        """The tokens of a call, and its number of steps; None if the next step does more, or should
        be alone.

        The tokens of later steps are like a draft that comes true: the model's own.
        """
        is_larger = len(self._scheduler.running) > self._num_measured
        if is_larger or self.step_seconds * 2 > CALL_SECONDS:
            return None
        steps = min(self._most, int(CALL_SECONDS / max(self.step_seconds, 1e-9)))
        chunks = self._scheduler.schedule_decodes(steps)
        if not chunks:
            return None
        drafts = [chunk.draft for chunk in chunks]
        ends = {*self._ends}
        for chunk in chunks:
            ends.update(chunk.sequence.request.params.stop_token_ids or ())
        draws = self._sampler.draws(_rows(chunks, drafts))
        tokens, highest = self._runner.decode(chunks, MultiStep(draws, [*ends], self.interrupt))
        self._scheduler.commit()
        drawn = tokens.numpy().astype(np.int32)
        self._most = min(MAX_STEPS, 2 * drawn.shape[1]) if self.interrupt.value else MAX_STEPS
        tokens, rows = tokens.flatten(), _rows(chunks, [*drawn[:, :-1]])
        return PendingStep(rows, tokens, [], Fetch(tokens, highest.flatten())), drawn.shape[1]


def _rows(chunks: list[Chunk], drafts: list[Tokens]) -> list[Row]:
    """The rows behind each chunk and the first tokens of its draft."""
    return [
        Row(chunk.sequence, draft[:count])
        for chunk, draft in zip(chunks, drafts, strict=True)
        for count in range(1 + len(draft))
    ]
