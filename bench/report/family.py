"""The story of the schemes in the order in which they came: what each step brought."""

from __future__ import annotations

from radixcache.bench.replay.figures import Figures
from radixcache.bench.schemes.named import FAMILY, INDEX_ONLY, parse_scheme

_NEVER = {
    "template": "what nobody registered, answers",
    "prefix": "what follows the position named, answers",
    "cow": "a prompt's last block, the newest full one, prompts of up to {size} tokens",
    "hash": "parts of blocks, prompts of up to {size} tokens",
    "aligned": "parts of pages, prompts of up to {size} tokens",
    "radix": "the last token",
}
"""What the rules of each kind never find."""


def story(rows: list[Figures]) -> list[str]:
    """A line for each step of the family, in the most memory; none without the old schemes."""
    most = max((row.memory_tokens for row in rows), default=0)
    by_scheme = {row.scheme: row for row in rows if row.memory_tokens == most}
    steps = [by_scheme[name] for name in FAMILY[1:] if name in by_scheme]
    lines = []
    before = 0.0
    for row in steps:
        never = _NEVER[parse_scheme(row.scheme).kind].format(size=row.page_size)
        nothing = f"{row.cold:,} of {row.requests:,} prompts nothing"
        lines.append(
            f"{row.workload}, {row.memory}: {row.scheme} hits {row.hit_rate:.1%} "
            f"({100 * (row.hit_rate - before):+.1f} points), {nothing}; never finds {never}"
        )
        before = row.hit_rate
    return lines if any(parse_scheme(row.scheme).kind in INDEX_ONLY for row in steps) else []
