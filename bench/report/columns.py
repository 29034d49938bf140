"""The columns of a report's tables, on a terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import WorkloadReport
from radixcache.bench.schemes.windows import ALL_KEPT


class Column(NamedTuple):
    """One column.

    Attributes:
        note: what it says, in a sentence.
        text: its cell in a row.
        on_page_only: too much for 80 columns.
    """

    title: str
    note: str
    text: Callable[[WorkloadReport, Figures], str]
    on_page_only: bool = False


def share(part: float, whole: float | None) -> str:
    """Format a share in percent; a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "–"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ttft(percent: int) -> Column:
    def text(_: WorkloadReport, row: Figures) -> str:
        spread = row.engine and getattr(row.engine, f"ttft_p{percent}")
        return f"{1000 * spread.median:,.1f}" if spread else "–"

    note = f"Time to first token in ms that {percent} % of the requests stay within, from when they"
    return Column(f"TTFT p{percent}", f"{note} were due; median of the repeats.", text)


def _range(row: Figures) -> str:
    if row.engine is None:
        return "–"
    rate = row.engine.throughput
    return f"± {(rate.high - rate.low) / 2 / rate.median:.0%}"


MEMORY = Column(
    "memory",
    "For KV: what was asked for, a share of the workload's distinct tokens, bytes or tokens; the "
    "same for every scheme.",
    lambda w, r: r.memory,
)
SCHEME = Column(
    "scheme",
    "hash-B: blocks of B tokens; radix-P: a token-exact tree over pages of P tokens; aligned-P: a "
    "tree in whole pages; none: no cache.",
    lambda w, r: r.scheme,
)
HIT = Column(
    "hit",
    "Share of all prompt tokens that were in the cache when their request was first admitted.",
    lambda w, r: f"{r.hit_rate:.1%}",
)
PREFILLED = Column(
    "prefilled",
    "Prompt tokens computed, again after a preemption included: the work that is left.",
    lambda w, r: _count(r.computed_tokens),
)
REMARK = Column(
    "remark", "Requests that were refused or preempted, which spoils figures.",
    lambda w, r: r.spoiled,
)  # fmt: skip

INDEX = [
    MEMORY,
    SCHEME,
    HIT,
    Column(
        "of optimum",
        "Hits relative to eviction that knows the future, one request after the other, in the "
        "same memory.",
        lambda w, r: share(
            r.hit_tokens, None if r.has_tier else w.optimal_hits.get(r.memory_tokens)
        ),
    ),
    PREFILLED,
    Column(
        "empty slots",
        "Of the slots in pages that are held, how many hold no token; mean of 64 samples.",
        lambda w, r: share(r.empty_share or 0, 1),
        on_page_only=True,
    ),
    Column(
        "cache µs",
        "Processor time in the cache's methods for each request.",
        lambda w, r: _count(r.cache_us),
    ),
    REMARK,
]

WINDOWS = [
    MEMORY,
    SCHEME._replace(
        note="all-kept: layers with a window keep all KV. Which windows are kept otherwise: ours, "
        "told where templates end or not (untold); vllm, sglang: their rules, simplified."
    ),
    *(column for column in INDEX[2:] if column.title != "of optimum"),
]

STATES = [
    MEMORY,
    SCHEME._replace(
        note="Where recurrent states are kept: ours, told where templates end or not; the rules of "
        "Marconi, SGLang (sglang-64: with extra_buffer) and vLLM (blocks of 528 tokens), "
        "simplified. kv-alone: a model without."
    ),
    Column(
        "states",
        "Slots for recurrent states, those of running requests included.",
        lambda w, r: _count(r.states),
    ),
    HIT,
    Column(
        "computed",
        "Share of the prompt tokens that was computed: less is better.",
        lambda w, r: f"{r.computed_share:.1%}",
    ),
    PREFILLED,
    Column(
        "no state",
        "Prompt tokens whose KV was cached, computed again for lack of a state.",
        lambda w, r: _count(r.recomputed_tokens),
    ),
    REMARK,
]

ENGINE = [
    MEMORY,
    SCHEME,
    HIT,
    PREFILLED,
    _ttft(50),
    _ttft(99),
    Column(
        "tokens/s",
        "Prompt and generated tokens served a second; median of the repeats.",
        lambda w, r: _count(r.engine.throughput.median if r.engine else None),
    ),
    Column(
        "tok/step",
        "Tokens that a request gets in a step: more than one where drafts are accepted.",
        lambda w, r: f"{r.engine.tokens_per_step:.2f}" if r.engine else "–",
    ),
    Column("range", "Half the range of the throughput over its median.", lambda w, r: _range(r)),
    REMARK,
]


def tables(workload: WorkloadReport) -> Iterator[tuple[list[Column], list[Figures]]]:
    """Columns and rows of each level that was run; without remarks where there are none."""
    index = STATES if workload.states else INDEX
    if any(row.scheme == ALL_KEPT for row in workload.level("index")):
        index = WINDOWS
    for level, columns in (("index", index), ("engine", ENGINE)):
        if rows := workload.level(level):
            yield columns if any(row.spoiled for row in rows) else columns[:-1], rows
