"""The share of the machine that this process's control groups, as those of a container, allow.

Linux has two versions of control groups, which may both be mounted. A process is bound by its own
group and by each ancestor that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
"""The root of the file system, which tests replace."""


def memory_limit() -> int | None:
    """Bytes of memory that the process may use at most; None if no group says."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes of memory that the process may still use; None if no group says.

    Cached files count as free: the kernel drops them when memory is short.
    """
    return min((max(0, limit - used) for limit, used in _memory()), default=None)


def cpu_quota() -> float | None:
    """The CPU time that the process may use, in CPUs, such as 1.5; None if no group says."""
    quotas = []
    for version, folder in _groups("cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = (_text(folder / name) for name in names)
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # "max" and -1 are none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use without cached files) of each group that has a limit."""
    for version, folder in _groups("memory"):
        if version == 2:
            limits, usage, stats = ["memory.max", "memory.high"], "memory.current", ""
        else:
            limits, usage, stats = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        sizes = [int(text) for name in limits if (text := _text(folder / name)).isdecimal()]
        used = _text(folder / usage)
        if sizes and used.isdecimal():
            lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
            counts = {
                line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()
            }
            kept = sum(counts.get(f"{stats}{kind}_file", 0) for kind in ("inactive", "active"))
            yield min(sizes), int(used) - kept


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that the process is in, and of their ancestors."""
    lines = _text(ROOT / "proc/self/cgroup").splitlines()
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for line in _text(ROOT / "proc/self/mountinfo").splitlines():
        mount, _, kind = (part.split() for part in line.partition(" - "))
        if len(mount) < 5:
            continue
        if kind[:1] == ["cgroup"] and controller in kind[-1].split(","):
            version, name = 1, controller
        elif kind[:1] == ["cgroup2"]:
            version, name = 2, ""
        else:
            continue
        top = ROOT / mount[4].lstrip("/")
        for _, names, path in groups:
            if name in names.split(","):
                own = PurePosixPath(path)
                inside = own.is_relative_to(mount[3]) and ".." not in own.parts
                folder = top / own.relative_to(mount[3]) if inside else top
                folders = (folder, *folder.parents)
                yield from ((version, each) for each in folders if each.is_relative_to(top))


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
