"""Where the time goes: the host's phases of a step, and the device's kernels."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixcache.bench.gpu.place import Work
from radixcache.runtime.engine import engine as engine_module
from radixcache.runtime.engine.engine import Engine


@contextmanager
def phases(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of what a step consists of, measured from outside.

    "read tokens" waits for the device, so it holds the time that nothing else hides.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    attention: Any = engine.model.attention
    with (
        _timed(engine.scheduler, "schedule", "schedule", seen),
        _timed(engine, "_batch", "page tables and groups", seen),
        _timed(attention, "_plan", "plan and upload", seen),
        _timed(engine, "_compute", "launch, planning included", seen),
        _timed(engine_module, "sample", "sample", seen),
        _timed(engine, "_finish", "read tokens, waiting included, and end sequences", seen),
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


def kernels(work: Work, count: int = 8) -> list[str]:
    """The longest kernels of one run of `work`, and how long the device was busy."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    rows = [
        (row.self_device_time_total, row.count, row.key)
        for row in profile.key_averages()
        if str(row.device_type).endswith("CUDA") and row.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    busy = sum(row[0] for row in rows)  # µs
    lines = [
        f"profiled: {wall * 1e3:.2f} ms on the host's clock, device busy {busy / 1e3:.2f} ms "
        f"({busy / wall / 1e4:.0f} %), {sum(row[1] for row in rows)} launches"
    ]
    lines += [
        f"{taken / 1e3:8.3f} ms  {calls:5} x  {key[:100]}" for taken, calls, key in rows[:count]
    ]
    return lines
