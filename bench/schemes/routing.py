"""Ways to choose a replica that are compared: ours and those of others, each by its rule.

All see the same books (`radixcache.runtime.routing`): a tree for each replica as large as its KV,
prompts remembered when they are sent. That is more than some of them have (SGLang's own tree is of
characters, AIBrix' and llm-d's of blocks), but so only the rules differ. A replica's load is the
requests there that have not ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from radixcache.errors import InvalidRequest
from radixcache.runtime.router.policy import Standing, preference


class Asked(NamedTuple):
    """What a rule may look at.

    Attributes:
        standings: of the replicas, in their order.
        session: a number that the requests of one conversation have in common.
    """

    standings: Sequence[Standing]
    session: int
    random: Random


Rule = Callable[[Asked], Standing]


def cost(asked: Asked) -> Standing:
    """Ours: least tokens to compute there, those queued before included at 0.9."""
    return min(asked.standings, key=preference)


def random(asked: Asked) -> Standing:
    """Any."""
    return asked.random.choice(asked.standings)


def two_choices(asked: Asked) -> Standing:
    """Power of two choices: the less loaded of two at random. Ray Serve's default."""
    pair = asked.random.sample(asked.standings, min(2, len(asked.standings)))
    return min(pair, key=lambda s: s.requests)


def least_queued(asked: Asked) -> Standing:
    """Least tokens queued for prefill, whatever is cached where; in turns if equal."""
    return min(asked.standings, key=lambda s: (s.queued_tokens, s.requests, s.last))


def session(asked: Asked) -> Standing:
    """Always the same replica for the same conversation, by a hash: what a session header does."""
    return asked.standings[asked.session % len(asked.standings)]


def longest_match(asked: Asked) -> Standing:
    """Most cached, whatever the load; least loaded if equal. production-stack's `prefixaware`."""
    return max(asked.standings, key=lambda s: (s.cached_tokens, -s.requests, -s.last))


def sglang(asked: Asked) -> Standing:
    """SGLang's gateway, `cache_aware` with its defaults 0.3, 64 and 1.5.

    The least loaded, if the most loaded has over 64 requests and 1.5 times more than it; else the
    longest match, if over 0.3 of the prompt; else the least loaded (before, the smallest tree).
    """
    most, least = _loads(asked)
    best = longest_match(asked)
    unbalanced = most - least > 64 and most > 1.5 * least
    if unbalanced or best.cached_tokens <= 0.3 * best.num_tokens:
        return _least_loaded(asked.standings)
    return best


def aibrix(asked: Asked) -> Standing:
    """AIBrix' `prefix-cache`: a spread of over 16 requests, or no match: the least loaded.

    Else the longest match of those with no more requests than the mean and two standard deviations.
    """
    loads = [s.requests for s in asked.standings]
    mean = sum(loads) / len(loads)
    limit = mean + 2 * math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
    allowed = [s for s in asked.standings if s.requests <= limit and s.cached_tokens]
    most, least = _loads(asked)
    if most - least > 16 or not allowed:
        return _least_loaded(asked.standings)
    return longest_match(asked._replace(standings=allowed))


def llm_d(asked: Asked) -> Standing:
    """llm-d's scorers with its guides' weights: 3 x cached share of the prompt + 2 x idleness.

    Idleness: 1 for the least loaded, 0 for the most, even in between.
    """
    most, least = _loads(asked)

    def score(s: Standing) -> tuple[float, int]:
        idle = (most - s.requests) / (most - least) if most > least else 1.0
        return 3 * s.cached_tokens / s.num_tokens + 2 * idle, -s.last

    return max(asked.standings, key=score)


def _loads(asked: Asked) -> tuple[int, int]:
    loads = [s.requests for s in asked.standings]
    return max(loads), min(loads)


def _least_loaded(standings: Sequence[Standing]) -> Standing:
    return min(standings, key=lambda s: (s.requests, s.last))


RULES: dict[str, Rule] = {
    "random": random,
    "two-choices": two_choices,
    "least-queued": least_queued,
    "session": session,
    "longest-match": longest_match,
    "sglang": sglang,
    "aibrix": aibrix,
    "llm-d": llm_d,
    "cost": cost,
}

BLIND = ("random", "two-choices", "least-queued")
"""Those that ask neither what is cached nor whose conversation it is."""


def find_rules(names: Sequence[str]) -> list[str]:
    """The rules of these names, each once; all of them for "all"."""
    if "all" in names:
        return [*RULES]
    for name in names:
        if name not in RULES:
            raise InvalidRequest(f"no routing {name!r}; say all, {', '.join(RULES)}")
    return [*dict.fromkeys(names)]
