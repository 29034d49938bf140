"""Where the recurrent states of a hybrid model are kept: by our rule, and by those of others.

A hit of such a model goes on from a state, so of what is cached of its KV only as much counts as
has one. Every rule gets the same KV (`radix-1`) and as many slots for states, those of running
sequences among them. Ours is the runtime's own `StatePlanner`. The others are as read in sources
and papers (November 2026) and simplified; they are not those systems, and none of their code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from radixcache.base import Tokens
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.request import Request, Sequence
from radixcache.runtime.engine.state_planner import StatePlanner
from radixcache.states import Checkpoint, Kind, SequenceStates, StateIndex


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

    def _victim(self) -> Checkpoint | None:
        kept = self._kept.values()
        return next((state for state in kept if state.slot not in self._reads), None)


class LeastRecentPaths(LeastRecentStates):
    """Whoever goes on from a state uses those above it, too, the deeper the more recently."""

    def find(self, tokens: Tokens, namespace: Hashable, limit: int) -> Checkpoint | None:
        found = above = super().find(tokens, namespace, limit)
        path: list[Checkpoint] = []
        while above is not None:
            path.insert(0, above)
            above, _ = self._deepest(tokens, namespace, above.key.length - 1)
        for state in path:
            self._use(state.key)
        return found


class MarconiPlanner(StatePlanner):
    """Marconi (arXiv 2411.19379): where a second prompt parts from what is cached, and after a
    sequence's last token. Its weighing of a state's FLOPs against recency is left out."""

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {match: "branch"}


class SGLangPlanner(StatePlanner):
    """SGLang's `MambaRadixCache`: at the ends of its nodes, which are those of prompts and of whole
    sequences, and where a second prompt parts, on a grid of 64 tokens.

    The ends are exact, as without `extra_buffer`; branch points are kept, as with it. A request
    keeps both, where SGLang keeps one of them. That an evicted leaf takes its KV along is left out.
    """

    GRID = 64

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {match // self.GRID * self.GRID: "branch", len(request.prompt_token_ids): "prompt"}


class AlignPlanner(StatePlanner):
    """vLLM's `mamba_cache_mode="align"`: the last whole block that a step completes, so the last
    one of a prompt; blocks are grown until one of KV takes as much memory as a state.

    Branch points (vLLM's pull request 37898) are left out.
    """

    BLOCK = 528

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {}

    def plan(self, sequence: Sequence, start: int, end: int) -> SequenceStates:
        whole = end // self.BLOCK * self.BLOCK
        if whole > start:
            self._plans[sequence].marks.append((whole, "prompt"))
        return super().plan(sequence, start, end)

    def leave(self, sequence: Sequence) -> None:
        """What follows the last whole block is not kept."""


KV_ALONE = "kv-alone"

STATE_RULES: dict[str, Callable[[int, Workload], StatePlanner | None]] = {
    KV_ALONE: lambda slots, workload: None,
    "ours": lambda slots, workload: ToldPlanner(StateIndex(slots), workload.templates()),
    "ours-untold": lambda slots, workload: StatePlanner(StateIndex(slots)),
    "marconi": lambda slots, workload: MarconiPlanner(LeastRecentStates(slots)),
    "sglang": lambda slots, workload: SGLangPlanner(LeastRecentPaths(slots)),
    "vllm-528": lambda slots, workload: AlignPlanner(LeastRecentStates(slots)),
}
"""By name; the first is what a model without recurrent layers computes, and no rule beats it."""
