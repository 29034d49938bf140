"""All schemes on a workload, in every memory; one bar says how far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.report.results import WorkloadReport
from radixcache.bench.schemes.bounds import build_trie, optimal_hits, unlimited_hits
from radixcache.bench.schemes.named import Memory, Scheme
from radixcache.bench.workloads.workload import Workload

if TYPE_CHECKING:
    from radixcache.runtime.model.paged_model import PagedModel

_SIZES = 40
"""Sizes of memory in the curve of the optimum."""

Says = Callable[[str], object]
Tick = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how; the same for every workload.

    Attributes:
        token_bytes: KV bytes of a token, for memory that is given in bytes.
        level: "index", "engine" or "both".
        model, repeats: at engine level, which model runs and how often it is timed.
    """

    schemes: list[Scheme]
    memories: list[Memory]
    serving: Serving
    token_bytes: int
    level: str = "index"
    model: PagedModel | None = None
    repeats: int = 3

    def run(self, workloads: list[Workload]) -> Iterator[WorkloadReport]:
        runs = (self.level != "engine") + (self.repeats + 1) * (self.level != "index")
        runs *= len(self.schemes) * len(self.memories)
        requests = sum(len(workload.arrivals) for workload in workloads)
        with _progress(requests * (1 + runs)) as (says, tick):
            for workload in workloads:
                says(f"bounds, {workload.name}")
                trie = build_trie(workload, progress=tick)
                found = WorkloadReport(
                    workload.name,
                    workload.shape,
                    len(workload.arrivals),
                    workload.prompt_tokens,
                    workload.answer_tokens,
                    trie.footprint,
                    unlimited_hits(trie),
                    workload.longest,
                )
                most = max(trie.footprint, workload.longest)
                for size in np.linspace(workload.longest, most, _SIZES):
                    found.optimal_hits[int(size)] = optimal_hits(trie, int(size))
                for memory in self.memories:
                    tokens = memory.tokens(trie.footprint, self.token_bytes, self.schemes)
                    found.optimal_hits[tokens] = optimal_hits(trie, tokens)
                    self._replay(workload, memory, tokens, found, says, tick)
                yield found

    def _replay(
        self, workload: Workload, memory: Memory, tokens: int, found: WorkloadReport,
        says: Says, tick: Tick,
    ) -> None:  # fmt: skip
        for scheme in self.schemes if self.level != "engine" else ():
            says(f"{scheme.name}, {memory.text}, {workload.name}")
            found.rows.append(run_index(workload, scheme, tokens, self.serving, memory.text, tick))
        if self.model is not None:
            from radixcache.bench.replay.engine_level import run_engine

            says(f"engine, {memory.text}, {workload.name}")
            found.rows += run_engine(
                workload,
                self.schemes,
                tokens,
                self.serving,
                self.model,
                repeats=self.repeats,
                memory=memory.text,
                progress=tick,
            )


@contextmanager
def _progress(requests: int) -> Iterator[tuple[Says, Tick]]:
    """One bar for everything, where a terminal shows it: what is running, how much is left."""
    from tqdm import tqdm

    with tqdm(
        total=requests,
        bar_format="{desc:<34.34} {percentage:3.0f} % |{bar}| {remaining} left",
        leave=False,
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.set_description_str, bar.update
