"""A long errand for an agent: rooms, each of which says where to go next."""

from __future__ import annotations

ROOMS = 20


def room(number: int) -> str:
    """What is in the room of this number."""
    further = f"; the next is {number + 1}" if number < ROOMS else ""
    return f"Room {number}: a table with {number * 7} chairs{further}."
