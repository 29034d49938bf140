"""What control groups leave, by files as the kernel writes them, of both versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache.errors import InvalidRequest
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.build import load
from radixcache.runtime.model import kv_pool
from radixcache.runtime.model.host import cgroups

MIB = 1 << 20
CPU = torch.device("cpu")
V1 = [
    ("4:memory:{}", "35 31 0:32 {} /groups/memory rw,relatime - cgroup cgroup rw,memory"),
    ("2:cpu,cpuacct:{}", "32 31 0:29 {} /groups/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct"),
]
V2 = [("0::{}", "41 31 0:38 {} /groups/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate")]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return Machine(tmp_path)


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def mount(self, hierarchies: list[tuple[str, str]], own: str, top: str = "/") -> None:
        """The groups of a process are named `own`, and what is mounted begins at `top`."""
        lines = ["24 0 8:1 / / rw - ext4 /dev/root rw", *(m.format(top) for _, m in hierarchies)]
        self.write("proc/self/mountinfo", "\n".join(lines))
        lines = ["9:name=systemd:/", *(group.format(own) for group, _ in hierarchies)]
        self.write("proc/self/cgroup", "\n".join(lines))

    def write(self, path: str, text: Any) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def memory_v1(self, group: str, limit: int, usage: int, cached: int) -> None:
        folder = f"groups/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        stat = f"inactive_file 5\ntotal_inactive_file {cached - 7}\ntotal_active_file 7"
        self.write(f"{folder}/memory.stat", f"cache 3\n{stat}\ntotal_shmem 11")

    def memory_v2(self, group: str, limit: int | str, usage: int, cached: int) -> None:
        folder = f"groups/unified{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", usage)
        stat = f"file {usage}\ninactive_file {cached - 7}\nactive_file 7"
        self.write(f"{folder}/memory.stat", f"anon 3\n{stat}")


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_that_any_group_leaves_without_cached_files(machine: Machine, version: int):
    machine.mount(V1 if version == 1 else V2, "/pods/one/server")
    group = machine.memory_v1 if version == 1 else machine.memory_v2
    none: Any = 9223372036854771712 if version == 1 else "max"
    group("/pods/one/server", 900 * MIB, 700 * MIB, 400 * MIB)
    group("/pods/one", 2000 * MIB, 1900 * MIB, 300 * MIB)
    group("/pods", none, 5000 * MIB, MIB)
    group("/pods/other", 10 * MIB, 10 * MIB, 9 * MIB)  # is not the process's
    assert cgroups.memory_limit() == 900 * MIB
    assert cgroups.memory_left() == 400 * MIB, "an ancestor's"
    group("/pods/one", 2000 * MIB, 2100 * MIB, MIB)
    assert cgroups.memory_left() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_cpu_time(machine: Machine, version: int) -> None:
    machine.mount(V1 if version == 1 else V2, "/pods/one")

    def quota(group: str, microseconds: int, period: int) -> None:
        if version == 2:
            text = f"{'max' if microseconds < 0 else microseconds} {period}"
            machine.write(f"groups/unified{group}/cpu.max", text)
        else:
            machine.write(f"groups/cpu{group}/cpu.cfs_quota_us", microseconds)
            machine.write(f"groups/cpu{group}/cpu.cfs_period_us", period)

    quota("/pods/one", -1, 100_000)
    assert cgroups.cpu_quota() is None
    quota("/pods", 75_000, 50_000)
    assert cgroups.cpu_quota() == 1.5
    quota("/pods/one", 100_000, 100_000)
    assert cgroups.cpu_quota() == 1


@pytest.mark.parametrize("hierarchies", [V1, V2])
@pytest.mark.parametrize(
    ("own", "top"), [("/docker/4f", "/docker/4f"), ("/", "/"), ("/docker/4f", "/"), ("/../b", "/")]
)
def test_a_container_sees_its_own_group_at_the_top(
    machine: Machine, hierarchies: list[tuple[str, str]], own: str, top: str
) -> None:
    machine.mount(hierarchies, own, top)
    machine.memory_v1("", 900 * MIB, 300 * MIB, 100 * MIB)
    machine.memory_v2("", 900 * MIB, 300 * MIB, 100 * MIB)
    assert (cgroups.memory_limit(), cgroups.memory_left()) == (900 * MIB, 700 * MIB)


def test_a_soft_limit_of_version_2_counts(machine: Machine) -> None:
    machine.mount(V2, "/a")
    machine.memory_v2("/a", "max", 300 * MIB, 100 * MIB)
    machine.write("groups/unified/a/memory.high", 500 * MIB)
    assert cgroups.memory_left() == 300 * MIB


def test_nothing_said_is_no_limit(machine: Machine) -> None:
    everything = (cgroups.memory_limit, cgroups.memory_left, cgroups.cpu_quota)
    assert [f() for f in everything] == [None] * 3, "no such files"
    machine.mount([*V1, *V2], "/a")
    assert [f() for f in everything] == [None] * 3, "no such groups"
    machine.write("groups/memory/a/memory.limit_in_bytes", "nonsense")
    machine.write("groups/cpu/a/cpu.cfs_quota_us", "100000")
    machine.write("groups/unified/a/cpu.max", "")
    assert [f() for f in everything] == [None] * 3


def test_kv_memory_of_a_container(machine: Machine) -> None:
    machine.mount(V2, "/a")
    machine.memory_v2("/a", 900 * MIB, 500 * MIB, 120 * MIB)
    assert kv_pool.default_memory(CPU) == 260 * MIB
    assert kv_pool.count_pages("520MiB", MIB, CPU) == 520
    with pytest.raises(InvalidRequest, match=r"this container has left 0\.5 GiB"):
        kv_pool.count_pages("600MiB", MIB, CPU)


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (160_000, 2), (-1, 3), (900_000, 3)])
def test_threads_within_the_quota(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: int, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine.mount(V1, "/a")
    machine.write("groups/cpu/a/cpu.cfs_quota_us", quota)
    machine.write("groups/cpu/a/cpu.cfs_period_us", 100_000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(EngineArgs(device="cpu"))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_lines_that_are_none_of_the_kernels_say_nothing(machine: Machine) -> None:
    machine.mount(V2, "/a")
    for name in ("cgroup", "mountinfo"):
        path = machine.root / "proc/self" / name
        path.write_text(f"nonsense\n - cgroup2\n0:\n\n{path.read_text()}")
    machine.write("groups/unified/a/memory.max", 900)
    machine.write("groups/unified/a/memory.current", 500)
    machine.write("groups/unified/a/memory.stat", "inactive_file x\nactive_file 100\n")
    assert (cgroups.memory_limit(), cgroups.memory_left()) == (900, 500)
    for text in ("100000 100000 1", "100000 x", "100000", "x 100000"):
        machine.write("groups/unified/a/cpu.max", text)
        assert cgroups.cpu_quota() is None
