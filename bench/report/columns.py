"""The columns of a report's tables, and what each says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from radixcache.bench.replay.figures import EngineFigures, Figures, Spread
from radixcache.bench.report.results import WorkloadReport


class Column(NamedTuple):
    """One column.

    Attributes:
        unit: what its numbers are, in two or three words under the title.
        note: what it says, in a sentence.
        text: its cell in a row.
    """

    title: str
    unit: str
    note: str
    text: Callable[[WorkloadReport, Any], str]


def share(part: float, whole: float | None) -> str:
    """In percent; a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "–"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _timed(row: Figures) -> EngineFigures:
    assert row.engine is not None
    return row.engine


def _ms(spread: Spread) -> str:
    return f"{1000 * spread.median:,.1f}"


_SETUP = [
    Column(
        "memory",
        "for KV",
        "What was asked for: a share of the workload's distinct tokens, bytes or tokens; the same "
        "for every scheme.",
        lambda w, r: r.memory,
    ),
    Column(
        "scheme",
        "and page size",
        "hash-B: blocks of B tokens; radix-P: a token-exact tree over pages of P tokens; "
        "aligned-P: a tree in whole pages; none: no cache.",
        lambda w, r: r.scheme,
    ),
    Column(
        "hit",
        "of prompt tokens",
        "Share of all prompt tokens that were in the cache when their request was first admitted.",
        lambda w, r: f"{r.hit_rate:.1%}",
    ),
]
_PREFILLED = Column(
    "prefilled",
    "prompt tokens",
    "Prompt tokens computed, again after a preemption included: the work that is left.",
    lambda w, r: _count(r.computed_tokens),
)

INDEX = [
    *_SETUP,
    Column(
        "of unlimited",
        "of its hits",
        "Hits relative to those of memory without end, where nothing is ever evicted.",
        lambda w, r: share(r.hit_tokens, w.unlimited_hits),
    ),
    Column(
        "of optimum",
        "of its hits",
        "Hits relative to eviction that knows the future, one request after the other, in the "
        "same memory.",
        lambda w, r: share(r.hit_tokens, w.optimal_hits.get(r.memory_tokens)),
    ),
    _PREFILLED,
    Column(
        "doubled",
        "prompt tokens",
        "Computed although, at admission, a request in flight had them computed or was about to.",
        lambda w, r: _count(r.doubled_tokens),
    ),
    Column("evicted", "tokens", "Dropped to make room.", lambda w, r: _count(r.evicted_tokens)),
    Column(
        "peak pages",
        "in use",
        "The most pages that running requests used at once, of 64 samples.",
        lambda w, r: _count(r.peak_used_pages),
    ),
    Column(
        "empty slots",
        "of held pages",
        "Of the slots in pages that are held, how many hold no token; mean of 64 samples.",
        lambda w, r: share(r.empty_share or 0, 1),
    ),
    Column(
        "cache time",
        "µs a request",
        "Processor time in the cache's methods for each request.",
        lambda w, r: _count(r.cache_us),
    ),
]

ENGINE = [
    *_SETUP,
    _PREFILLED,
    *(
        Column(
            f"TTFT {name[-3:]}",
            "ms",
            f"Time to first token that {name[-2:]} % of the requests stay within, from when they "
            "were due; median of the repeats.",
            lambda w, r, name=name: _ms(getattr(_timed(r), name)),  # type: ignore[misc]
        )
        for name in ("ttft_p50", "ttft_p90", "ttft_p99")
    ),
    Column(
        "throughput",
        "tokens/s",
        "Prompt and generated tokens served a second; median of the repeats.",
        lambda w, r: _count(_timed(r).throughput.median),
    ),
    Column(
        "range",
        "tokens/s",
        "The least and the greatest throughput of the repeats.",
        lambda w, r: f"{_count(_timed(r).throughput.low)}–{_count(_timed(r).throughput.high)}",
    ),
]

ROUTING = [
    *_SETUP[:2],
    _SETUP[2]._replace(
        note="Share of all prompt tokens that were cached on the replica when prefill began."
    ),
    Column(
        "routing", "of requests", "How the replica of a request is chosen.", lambda w, r: r.routing
    ),
    _PREFILLED._replace(note="Prompt tokens computed, on all replicas."),
    Column(
        "TTFT mean",
        "ms",
        "Time to first token, simulated, from when a request was due.",
        lambda w, r: f"{1000 * r.ttft_mean:,.0f}" if r.ttfts else "–",
    ),
    Column(
        "TTFT p99",
        "ms",
        "Time to first token that 99 % of the requests stay within, simulated.",
        lambda w, r: f"{1000 * r.ttft_p99:,.0f}" if r.ttfts else "–",
    ),
    Column(
        "busiest",
        "of the mean",
        "Prompt tokens that the busiest replica computed, relative to the mean of all.",
        lambda w, r: f"{r.imbalance:.2f}x",
    ),
    Column(
        "refused", "requests", "They do not fit into a replica.", lambda w, r: _count(r.refused)
    ),
]
