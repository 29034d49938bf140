"""Appends the sampled tokens of a step to their sequences, and ends those that are done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

import numpy as np
from numpy.typing import NDArray

from radixcache.runtime.engine.logits_cache import PooledRows
from radixcache.runtime.engine.rows import by_sequence
from radixcache.runtime.engine.sampler import PendingStep
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.request import Request, Sequence
from radixcache.runtime.sampling.grammar import GrammarError
from radixcache.runtime.sampling.penalties import NOTHING_LEFT

NOT_A_NUMBER = "the model's logits are not numbers: a weight is not, or the dtype is too narrow"
"""Why a sequence fails."""


class OutputProcessor:
    """Appends tokens and detects stops, on the engine's thread."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: Iterable[int]) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = frozenset(eos_token_ids)
        self.num_generated = 0
        """Tokens, since the engine was made."""
        self.pooled_rows = PooledRows()
        scheduler.has_row = lambda sequence: sequence.request.prompt_key in self.pooled_rows
        self.changed: dict[Request, None] = {}
        """Requests that `Engine.step` has yet to report, also of a step that failed after some of
        its tokens were read."""

    def finish(self, step: PendingStep) -> None:
        """Read the tokens of a step, and note the requests that got one."""
        if step.pooled is not None:
            (rows,) = step.pooled.read()
            for sequence, row in zip(step.pools, rows, strict=True):
                if sequence.finish_reason is None:
                    self._finish_pooled(sequence, np.array(row, np.float32))
        tokens, highest_logits, *top_tokens = step.fetched.read()
        top = dict(zip(step.asking, zip(*top_tokens, strict=True), strict=True))
        for sequence, places in by_sequence(step.rows).items():
            if sequence.finish_reason is not None:  # since the step was launched
                continue
            self.changed[sequence.request] = None
            draft = step.rows[places[-1]].draft.tolist()
            accepted, goes_on = 0, True
            while goes_on and self._can_go_on(sequence, highest_logits[places[accepted]]):
                place, logprobs = places[accepted], None
                if place in top:
                    end = 1 + (sequence.request.params.logprobs or 0)
                    ids, values = top[place]
                    logprobs = dict(zip(ids[:end], values[:end], strict=True))
                for token in self._with_forced(sequence, tokens[place]):
                    if goes_on and accepted:  # the token before was drafted: its KV is there
                        sequence.num_computed = len(sequence)
                    sequence.append(token, logprobs)
                    self.num_generated += 1
                    goes_on = goes_on and draft[accepted : accepted + 1] == [token]
                    accepted += goes_on
                    self.end_if_done(sequence)
            sequence.num_first = sequence.num_first or sequence.num_generated
            if draft and self._scheduler.proposer is not None:
                self._scheduler.proposer.learn(sequence, len(draft), accepted)

    def answer(self, sequences: Iterable[Sequence]) -> None:
        """End waiting sequences whose rows are kept."""
        for sequence in sequences:
            sequence.note_hit(len(sequence))
            self._finish_pooled(sequence, self.pooled_rows.use(sequence.request.prompt_key))

    def _finish_pooled(self, sequence: Sequence, row: NDArray[np.float32]) -> None:
        """End a sequence with its row, which is kept."""
        request = sequence.request
        self.changed[request] = None
        if not np.isfinite(row).all():
            self._scheduler.discard(sequence)
            self._scheduler.fail(sequence, NOT_A_NUMBER)
            return
        self.pooled_rows.keep(request.prompt_key, row)
        request.pooled = row
        self._scheduler.finish(sequence, "stop")
        request.note_admission()
        request.note_token()
        request.note_end()

    def _can_go_on(self, sequence: Sequence, highest: float) -> bool:
        """Whether the drawn token may be appended, by the highest logit; else the sequence ends."""
        if sequence.finish_reason is not None:
            return False
        if not highest < inf:
            self._scheduler.discard(sequence)
            self._scheduler.fail(sequence, NOT_A_NUMBER)
        elif not sequence.max_tokens:  # the prompt was all
            self._scheduler.finish(sequence, "length")
            sequence.request.note_end()
        elif highest > -inf:
            return True
        elif sequence.grammar is not None and sequence.grammar.may_end(sequence.generated):
            if sequence.detokenizer is not None:
                sequence.detokenizer.finish()
            self._scheduler.finish(sequence, "stop")
            sequence.request.note_end()
        else:
            self._scheduler.fail(sequence, NOTHING_LEFT, invalid=True)
        return False

    def _with_forced(self, sequence: Sequence, token: int) -> Iterator[int]:
        """The drawn token and, once it is appended, those that the grammar forces behind it: the
        next step computes all of them in one chunk."""
        yield token
        grammar, request = sequence.grammar, sequence.request
        if grammar is None or sequence.finish_reason is not None:
            return
        if request.params.logprobs is not None or request.penalties is not None:
            return  # logits are asked for, or a token may be forbidden
        for forced in grammar.forced(sequence.generated):
            yield forced
            if sequence.finish_reason is not None:
                break

    def end_if_done(self, sequence: Sequence) -> None:
        """End a sequence if its last token is its end; called again if this was cut off."""
        token = sequence.tokens.item(-1)
        try:
            reason = self._end_reason(sequence, token)
        except (MemoryError, RecursionError):
            raise
        except GrammarError as error:
            self._scheduler.fail(sequence, str(error), invalid=True)
        except Exception as error:  # text that cannot be made ends this sequence, no other
            self._scheduler.fail(sequence, f"token {token} gives no text: {error}")
        else:
            if reason:
                self._scheduler.finish(sequence, reason)
        sequence.request.note_token()
        if sequence.finish_reason is not None:
            sequence.request.note_end()

    def _end_reason(self, sequence: Sequence, token: int) -> str | None:
        params, detokenizer = sequence.request.params, sequence.detokenizer
        complete = sequence.grammar is not None and sequence.grammar.is_complete(sequence.generated)
        reason, is_text = None, True
        if token in (params.stop_token_ids or ()):
            reason, sequence.stop_reason, is_text = "stop", token, False
        elif token in self._eos_token_ids and not params.ignore_eos:
            reason, is_text = "stop", False
        elif complete:
            reason = "stop"
        elif sequence.num_generated >= sequence.max_tokens:
            reason = "length"
        if detokenizer is not None:
            if is_text or params.include_stop_str_in_output:
                detokenizer.append(token, sequence.num_generated - 1)
            if reason:
                detokenizer.finish()
            if detokenizer.stopped_by is not None:
                reason, sequence.stop_reason = "stop", detokenizer.stopped_by
        return reason
