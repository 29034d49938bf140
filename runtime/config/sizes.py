"""Amounts of memory as people write them. Imports no torch."""

from __future__ import annotations

import re

from radixcache.errors import InvalidRequest

_UNITS = {unit: 1000**i for i, unit in enumerate(["", "k", "m", "g", "t"])}
_UNITS |= {f"{unit}i": 1024**i for i, unit in enumerate(["", "k", "m", "g", "t"]) if unit}


def format_memory(size: int) -> str:
    """Bytes as people read them.

    >>> format_memory(3 << 29), format_memory(40 << 20)
    ('1.5 GiB', '40 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"


def parse_memory(memory: int | str) -> int:
    """Bytes of `memory`: a number of bytes, or text such as "512MiB", "2GB" or "1.5 GiB".

    Raises:
        InvalidRequest: it is neither, or not positive.
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", memory.lower())
        size = int(min(2.0**62, float(match[1]) * _UNITS[match[2]])) if match else 0
    else:
        size = 0 if isinstance(memory, bool) else int(memory)
    if size <= 0:
        raise InvalidRequest(f"not an amount of memory: {memory!r} (say 2GB, 512MiB, or bytes)")
    return size
