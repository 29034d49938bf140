"""Runs all schemes on each workload in every memory, with one progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.report.results import WorkloadReport
from radixcache.bench.schemes.bounds import build_trie, optimal_hits, unlimited_hits
from radixcache.bench.schemes.named import Memory, Scheme
from radixcache.bench.workloads.workload import Workload

if TYPE_CHECKING:
    from radixcache.runtime.model.paged_model import PagedModel

_SIZES = 40
"""Memory sizes in the curve of the optimum."""


def compare(
    workloads: list[Workload],
    schemes: list[Scheme],
    memories: list[Memory],
    serving: Serving,
    *,
    token_bytes: int,
    with_index: bool,
    model: PagedModel | None,
    repeats: int,
) -> Iterator[WorkloadReport]:
    """Run all schemes on each workload.

    Args:
        token_bytes: KV bytes of a token, for memory given in bytes.
        with_index: run the index level.
        model: runs the engine level, timed `repeats` times; None skips that level.
    """
    runs = (with_index + (repeats + 1) * (model is not None)) * len(schemes) * len(memories)
    requests = sum(len(workload.arrivals) for workload in workloads)
    with tqdm(
        total=requests * (1 + runs),
        bar_format="{desc:<34.34} {percentage:3.0f} % |{bar}| {remaining} left",
        leave=False,
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        for workload in workloads:
            bar.set_description_str(f"bounds, {workload.name}")
            trie = build_trie(workload, progress=bar.update)
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
            # With windows that are not kept, a token has no fixed size.
            has_optimum = not any(scheme.windowed for scheme in schemes)
            for size in np.linspace(workload.longest, most, _SIZES * has_optimum):
                found.optimal_hits[int(size)] = optimal_hits(trie, int(size))
            for memory in memories:
                tokens = memory.tokens(trie.footprint, token_bytes, schemes)
                if has_optimum:
                    found.optimal_hits[tokens] = optimal_hits(trie, tokens)
                where, rows = f"{memory.text}, {workload.name}", found.rows
                for scheme in schemes if with_index else ():
                    bar.set_description_str(f"{scheme.name}, {where}")
                    rows.append(
                        run_index(workload, scheme, tokens, serving, memory.text, bar.update)
                    )
                if model is not None:
                    from radixcache.bench.replay.engine_level import run_engine

                    bar.set_description_str(f"engine, {where}")
                    rows += run_engine(
                        workload, schemes, tokens, serving, model,
                        repeats=repeats, memory=memory.text, progress=bar.update,
                    )  # fmt: skip
            yield found
