"""The operating system's memory: its size, and returning what is free."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from radixcache.runtime.model.host import cgroups


def give_back() -> None:
    """Return what has been freed to the operating system, where the allocator is glibc's."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def resident_bytes() -> int:
    """Bytes of memory that this process has in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def total_memory() -> int:
    """The most memory that this process can have, in bytes: the machine's, or its container's."""
    return min(machine_memory(), cgroups.memory_limit() or sys.maxsize)


def free_memory() -> int:
    """Bytes of the machine's memory that are available."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return machine_memory() // 2


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
