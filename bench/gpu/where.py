"""Where the host's time goes: the phases of a step."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixcache.runtime.engine.engine import Engine


@contextmanager
def phases(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of what a step consists of, measured from outside.

    "read tokens" waits for the device, so it holds the time that nothing else hides.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    attention: Any = engine.model.attention
    plan = "_plan" if hasattr(attention, "_plan") else "plan"  # of FlashInfer's, graphs' included
    with (
        _timed(engine.scheduler, "schedule", "schedule", seen),
        _timed(engine, "_batch", "page tables and groups", seen),
        _timed(attention, plan, "plan and upload", seen),
        _timed(engine, "_compute", "launch, planning included", seen),
        _timed(engine.sampler, "sample", "sample", seen),
        _timed(
            engine.output_processor,
            "finish",
            "read tokens (waits), end sequences",
            seen,
        ),
        _timed(engine.cache, "commit", "commit", seen),
    ):
        yield seen


def tell_phases(seen: dict[str, list[float]]) -> list[str]:
    return [
        f"{name}: {statistics.median(times) * 1e6:.0f} µs (median of {len(times)})"
        for name, times in seen.items()
    ]


@contextmanager
def _timed(owner: Any, name: str, label: str, seen: dict[str, list[float]]) -> Iterator[None]:
    """Replace `owner.name` by one that notes how long it takes."""
    work = getattr(owner, name)
    own = name in vars(owner)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            seen[label].append(time.perf_counter() - start)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, work)
        else:
            delattr(owner, name)
