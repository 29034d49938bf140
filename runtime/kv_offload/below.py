"""What to load next from the tiers below a pool, for a prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

from radixcache.states.stored_windows import StoredWindow
from radixcache.states.windows import WindowIndex
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage
from radixcache.tokens import Tokens


class Below(NamedTuple):
    """Pages to load.

    Attributes:
        pages: those of the prefix of `end` tokens from index `first` of its page table on; or those
            of `window`.
        num_pages: pages to load before the prompt can go on, those of other tiers and of a window
            included.
        gain: tokens that are not computed then.
    """

    tier: LowerTier[Any]
    pages: list[StoredPage]
    first: int
    end: int
    num_pages: int
    gain: int
    window: StoredWindow | None = None


def parts_below(
    tier: LowerTier[Any], tokens: Tokens, start: int
) -> list[tuple[LowerTier[Any], list[StoredPage], int]]:
    """By which pages of which tier a prefix of `start` tokens goes on, and up to where; then by
    which of another one, and so on. O(len(tokens)) for each part."""
    parts = list[tuple[LowerTier[Any], list[StoredPage], int]]()
    while (part := tier.search(tokens, start))[1]:
        parts.append(part)
        start = part[2]
    return parts


def find_below(
    tier: LowerTier[Any], windows: WindowIndex | None, tokens: Tokens, start: int
) -> Below | None:
    """What `tier` and those below it have beyond a prefix of `start` tokens, which the pool has;
    None if it would spare no token. KV beyond the deepest window is left, as it would be computed
    again. Changes nothing. O(len(tokens)), for each part of the prefix that is in another tier.

    Args:
        windows: those of the pool, if layers with a window are kept apart.
    """
    size = tier.page_size
    first = start // size
    if windows is None or windows.stored is None:
        found, pages, end = tier.search(tokens, start)
        return Below(found, pages, first, end, len(pages), end - start) if pages else None
    parts = parts_below(tier, tokens, start)
    end = parts[-1][2] if parts else start
    (now, _), (goal, needed) = (windows.resume(tokens, None, limit) for limit in (start, end))
    stored, count = windows.stored.find_stored(tokens, end, goal), 0
    if stored is not None:
        goal, count = stored.length, len(stored.pages)
        needed = goal
    if goal <= now:
        return None
    if stored is not None and needed <= start:
        return Below(stored.tier, stored.pages, 0, count * size, count, goal - now, stored)
    found, pages, end = parts[0]
    num_pages, end = -(-needed // size) - first, min(end, needed)
    return Below(found, pages[:num_pages], first, end, num_pages + count, goal - now)
