"""Where the recurrent states of a hybrid model are kept: by our rule, and by those of others.

A hit of such a model goes on from a state, so of what is cached of its KV only as much counts as
has one. Every rule gets the same KV (`radix-1`) and as many slots for states, those of running
sequences among them. Ours is the runtime's own `StatePlanner`. The others are as read in sources
and papers (November 2026) and simplified; they are not those systems, and none of their code.
"""

from __future__ import annotations

from collections.abc import Callable

from radixcache.base import Tokens
from radixcache.bench.workloads.workload import Workload
from radixcache.checkpoints import Checkpoint, Kind
from radixcache.runtime.engine.checkpoint_planner import NO_CHECKPOINTS, Planner
from radixcache.runtime.engine.state_planner import StatePlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.states import SequenceStates, StateIndex


class ToldPlanner(StatePlanner):
    """Ours where it is known how far prompts are templates, as a chat API knows messages."""

    def __init__(self, index: StateIndex, templates: list[Tokens]) -> None:
        super().__init__(index)
        self._templates = {template.tobytes() for template in templates}
        self._lengths = sorted({len(template) for template in templates})

    def _boundaries(self, prompt: Tokens) -> list[int]:
        known = [n for n in self._lengths if prompt[:n].tobytes() in self._templates]
        return [*known, len(prompt) - 1]


class LeastRecentStates(StateIndex):
    """Evicts the state that was gone on from, or made, the longest ago."""

    def _victim(self, pinned: bool = True) -> Checkpoint[int] | None:
        kept = self._kept.values()
        return next((state for state in kept if not self._is_read(state)), None)


class MarconiPlanner(StatePlanner):
    """Marconi (arXiv 2411.19379): where a second prompt parts from what is cached, and after a
    sequence's last token. Its weighing of a state's FLOPs against recency is left out."""

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {match: "branch"}


class GridPlanner(StatePlanner):
    """At the last point of a grid that a step completes; a branch point on it comes first.

    Args:
        prefill: tokens of the grid in prompts.
        decode: the same in answers; 0 if no state is kept there before the end.
        branches: whether one is kept where a second prompt parts from what is cached, in place of
            the last one of that step.
        ends: whether one is kept after a sequence's last token.
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
    """SGLang's `MambaRadixCache` without `extra_buffer`: at the ends of its nodes, which are those
    of prefill chunks and of whole sequences. That an evicted leaf takes its KV along is left out.
    """
    return GridPlanner(LeastRecentStates(slots), prefill=1, decode=0, ends=True)


def _sglang_64(slots: int, workload: Workload) -> StatePlanner:
    """The same with `extra_buffer`: one state a chunk, on a grid of 64 tokens, at its end or where
    a second prompt parts; every 256 tokens of an answer. Its buffers take no slots here."""
    return GridPlanner(LeastRecentStates(slots), prefill=64, decode=256, branches=True)


def _vllm_528(slots: int, workload: Workload) -> StatePlanner:
    """vLLM's `mamba_cache_mode="align"`: the last whole block of each step, so that of a prompt;
    blocks are grown until KV for one takes as much memory as a state (528 tokens and more). Branch
    points (its pull request 37898) are left out."""
    return GridPlanner(LeastRecentStates(slots), prefill=528, decode=528)


KV_ALONE = "kv-alone"

STATE_RULES: dict[str, Callable[[int, Workload], Planner]] = {
    KV_ALONE: lambda slots, workload: NO_CHECKPOINTS,
    "ours": lambda slots, workload: ToldPlanner(StateIndex(slots), workload.templates()),
    "ours-untold": lambda slots, workload: StatePlanner(StateIndex(slots)),
    "marconi": lambda slots, workload: MarconiPlanner(LeastRecentStates(slots)),
    "sglang": _sglang,
    "sglang-64": _sglang_64,
    "vllm-528": _vllm_528,
}
"""By name; the first is a model without recurrent layers, and one request after the other no rule
computes less."""
