"""Rules for where to keep the recurrent states of a hybrid model: ours, and other engines'.

A hit of such a model resumes from a state, so cached KV counts as a hit only up to a kept state.
Every rule gets the same KV (`radix-1`) and as many slots for states, those of running sequences
included. Ours is the runtime's own `StatePlanner`. The others are simplified from sources and
papers (November 2026); they are not those systems, and none of their code.
"""

from __future__ import annotations

from collections.abc import Callable

from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.saved_state_planner import (
    NO_SAVED_STATES,
    Planner,
    SavedStatePlanner,
)
from radixcache.runtime.engine.scheduling.state_planner import StatePlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.states.recurrent import SequenceStates, StateIndex
from radixcache.states.saved import H, Kind, SavedState, SavedStateIndex
from radixcache.tokens import Tokens


class TemplatePlanner(SavedStatePlanner[H]):
    """Our rule where it knows how far prompts are templates, as a chat API knows messages."""

    def __init__(self, index: SavedStateIndex[H], templates: list[Tokens]) -> None:
        super().__init__(index)
        self._templates = {template.tobytes() for template in templates}
        self._lengths = sorted({len(template) for template in templates})

    def _boundaries(self, prompt: Tokens) -> list[int]:
        known = [n for n in self._lengths if prompt[:n].tobytes() in self._templates]
        return [*known, len(prompt) - 1]


class TemplateStates(TemplatePlanner[int], StatePlanner):
    """Our rule for states, told of templates."""


class LeastRecentStates(StateIndex):
    """Evicts the state that was least recently made or resumed from."""

    def _victim(self, pinned: bool = True) -> SavedState[int] | None:
        kept = self._kept.values()
        return next((state for state in kept if not self._is_read(state)), None)


class MarconiPlanner(StatePlanner):
    """Marconi (arXiv 2411.19379): keeps a state where a second prompt diverges from cached tokens,
    and after a sequence's last token. Not modelled: its weighing of FLOPs against recency."""

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {match: "branch"}


class GridPlanner(StatePlanner):
    """Keeps a state at the last grid point that a step reaches; a branch point takes precedence.

    Args:
        prefill: tokens between grid points in prompts.
        decode: the same in answers; 0 keeps no state there before the end.
        branches: whether to keep a state where a second prompt diverges from cached tokens, in
            place of the last one of that step.
        ends: whether to keep a state after a sequence's last token.
    """

    def __init__(
        self, index: StateIndex, prefill: int, decode: int, branches: bool = False,
        ends: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index)
        self._prefill, self._decode = prefill, decode
        self._branches, self._ends = branches, ends

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {match // self._prefill * self._prefill: "branch"} if self._branches else {}

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        marks = self._plans[sequence].marks
        in_prompt = start < len(sequence.request.prompt_token_ids)
        grid = self._prefill if in_prompt else self._decode
        last = end // grid * grid if grid else 0
        if last > start and not (marks and marks[-1][0] <= end):
            marks.append((last, "prompt"))
        return super().plan(sequence, start, end)

    def leave(self, sequence: Sequence) -> None:
        if self._ends:
            super().leave(sequence)


def _sglang(slots: int, workload: Workload) -> StatePlanner:
    """SGLang's `MambaRadixCache` without `extra_buffer`: states at the ends of its nodes, which are
    the ends of prefill chunks and sequences. Not modelled: an evicted leaf takes its KV along."""
    return GridPlanner(LeastRecentStates(slots), prefill=1, decode=0, ends=True)


def _sglang_64(slots: int, workload: Workload) -> StatePlanner:
    """The same with `extra_buffer`: one state a chunk, on a grid of 64 tokens, at its end or where
    a second prompt diverges; every 256 tokens of an answer. Its buffers take no slots here."""
    return GridPlanner(LeastRecentStates(slots), prefill=64, decode=256, branches=True)


def _vllm_528(slots: int, workload: Workload) -> StatePlanner:
    """vLLM's `mamba_cache_mode="align"`: the last whole block of each step, so of a prompt too;
    blocks grow until their KV takes as much memory as a state (528 tokens and more). Not modelled:
    branch points (its pull request 37898)."""
    return GridPlanner(LeastRecentStates(slots), prefill=528, decode=528)


KV_ALONE = "kv-alone"

STATE_RULES: dict[str, Callable[[int, Workload], Planner]] = {
    KV_ALONE: lambda slots, workload: NO_SAVED_STATES,
    "ours": lambda slots, workload: TemplateStates(StateIndex(slots), workload.templates()),
    "ours-untold": lambda slots, workload: StatePlanner(StateIndex(slots)),
    "marconi": lambda slots, workload: MarconiPlanner(LeastRecentStates(slots)),
    "sglang": _sglang,
    "sglang-64": _sglang_64,
    "vllm-528": _vllm_528,
}
"""Planners by name; the first is for a model without recurrent layers: with one request at a time,
no rule computes less."""
