"""What a process and its descendants hold in memory."""

from __future__ import annotations

from pathlib import Path


def held_bytes(pid: int) -> int:
    """The tree's proportional set size: a page that n processes map counts as 1/n in each.

    Linux only; `ProcessLookupError` if the process is gone.
    """
    if not Path(f"/proc/{pid}").exists():
        raise ProcessLookupError(f"no process {pid}")
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total
