"""What a workload shows, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable

from radixcache.bench.replay.figures import Figures
from radixcache.bench.report.results import ENOUGH, TIE, WorkloadReport, duels, scarcity, winner
from radixcache.bench.schemes.routing import BLIND


def headline(workload: WorkloadReport) -> str:
    """One sentence over all sizes of memory: which side computes less, and how much less; with
    several replicas, which way to route is the fastest, and what one that ignores caches costs."""
    if workload.routing and workload.requests < ENOUGH:
        return f"Too little data to compare ways to route: {workload.requests} requests."
    if any(not row.refused for row in workload.routing):
        return _fastest(workload)
    if not workload.unlimited_hits:
        return "No prompt begins as one before it does: no scheme can hit anything."
    wins: dict[str, list[tuple[float, Figures, Figures]]] = {}
    for block, tree in duels(workload):
        ratio, won = block.computed_tokens / tree.computed_tokens, winner(block, tree)
        saved = 0 if won in ("tie", "nothing", "little") else 1 - min(ratio, 1 / ratio)
        wins.setdefault(won, []).append((saved, block, tree))
    if not wins:
        return _best(workload)
    clauses = []
    names = list(dict.fromkeys(row.memory for row in workload.main_rows))
    for won, rounds in sorted(wins.items(), key=lambda item: -max(r[0] for r in item[1])):
        fewer = f"{_range(saved for saved, _, _ in rounds)} fewer prompt tokens"
        tried = [row for _, *pair in rounds for row in pair]
        hits = _range(max(block.hit_rate, tree.hit_rate) for _, block, tree in rounds)
        sizes = sorted({block.page_size for _, block, _ in rounds})
        blocks = f"blocks of {_listed([str(size) for size in sizes])}"
        words = {
            "radix": f"radix computes {fewer} than {blocks}",
            "blocks": f"{blocks} compute {fewer} than radix",
            "tie": f"radix and {blocks} tie, within {TIE:.0%},".replace("%", " %"),
            "only radix": f"only radix hits anything, {hits} of the prompt tokens,",
            "only blocks": f"only {blocks} hit anything, {hits} of the prompt tokens,",
            "nothing": "nothing is hit",
            "little": f"too little data for a verdict ({scarcity(*tried)})",
        }[won]
        clauses.append(f"{words} in {_memories([block.memory for _, block, _ in rounds], names)}")
    compared = {block.memory for rounds in wins.values() for _, block, _ in rounds}
    refusing = {row.memory for row in workload.main_rows if row.refused}
    if unfit := [name for name in names if name in refusing - compared]:
        clauses.append(f"requests are refused in {_memories(unfit, names)}")
    sentence = "; ".join(clauses)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _range(shares: Iterable[float]) -> str:
    """Such as "9 to 50 %"."""
    said = sorted({f"{100 * share:.0f}" for share in shares}, key=int)
    return f"{' to '.join(dict.fromkeys((said[0], said[-1])))} %"


def _fastest(workload: WorkloadReport) -> str:
    """Which way to route is the fastest, beside the best that ignores what is shared."""
    served = [row for row in workload.routing if not row.refused]
    best = min(served, key=lambda row: row.ttft_mean)
    rivals = [r for r in served if (r.memory, r.scheme) == (best.memory, best.scheme)]
    near = [
        row.routing
        for row in rivals
        if row is not best and row.ttft_mean <= best.ttft_mean * (1 + TIE)
    ]
    also = f" ({_listed(near)} within {100 * TIE:.0f} %)" if near else ""
    said = (
        f"Routed by {best.routing}, requests have their first token earliest, after "
        f"{milliseconds(best.ttft_mean)} in the mean, and hit {100 * best.hit_rate:.0f} % of the "
        f"prompt tokens{also}"
    )
    blind = [row for row in rivals if row.routing in BLIND]
    if not blind or best.routing in BLIND:
        return f"{said}."
    other = min(blind, key=lambda row: row.ttft_mean)
    return (
        f"{said}; by {other.routing}, the fastest that ignores what is shared, after "
        f"{milliseconds(other.ttft_mean)}, and {100 * other.hit_rate:.0f} %."
    )


def milliseconds(seconds: float) -> str:
    """With a digit more where it is less than ten."""
    ms = 1000 * seconds
    return f"{ms:,.{1 if ms < 9.95 else 0}f} ms"


def _best(workload: WorkloadReport) -> str:
    """The headline where one of the sides is missing."""
    rows = [row for row in workload.main_rows if not row.refused]
    if not rows:
        return "Requests were refused everywhere: the memory is too small for them."
    best = max(rows, key=lambda row: row.hit_tokens)
    most = workload.unlimited_hits / workload.prompt_tokens
    if not best.hit_tokens:
        return f"No scheme here hits anything; unlimited memory would hit {100 * most:.0f} %."
    return (
        f"The best scheme here, {best.scheme}, hits {100 * best.hit_rate:.0f} % of the prompt "
        f"tokens in {_memories([best.memory], [])}; unlimited memory would hit {100 * most:.0f} %."
    )


def _memories(names: list[str], measured: list[str]) -> str:
    """Such as "memory for 10 % and 30 % of its distinct tokens", of what was `measured`."""
    shares = all(name.endswith("%") for name in names)
    said = [f"{name} tokens" if name.isdigit() else name.replace("%", " %") for name in names]
    first = measured.index(names[0]) if measured else 0
    if len(names) > 2 and names == measured[first : first + len(names)]:
        words = f"{said[0]} to {said[-1]}"
    else:
        words = _listed(said)
    every = "every size of memory, " if len(names) > 2 and names == measured else "memory "
    return f"{every}for {words} of its distinct tokens" if shares else f"{words} of memory"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
