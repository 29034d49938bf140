"""Random operations on a `Machine` from one seed, for as long as you like.

    python tests/index/stress.py --operations 200000 --seed 7

prints the seed and how often each thing happened; a failure prints the seed, the shape of the
cache and the shortest part of its operations that fails too.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":  # a plain script finds the package it stands beside
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from radixcache.eviction import POLICIES
from tests.index.machine import Machine, Request
from tests.index.reference import NAMESPACES

SHAPES = [(1, 24), (1, 60), (2, 16), (2, 40), (4, 10), (4, 30), (16, 6), (16, 16)]
"""Page size and number of pages: small pools, so that everything runs out."""


Operation = tuple[Any, ...]
"""The name of a method of `Machine` and its arguments; a request is given by its index."""

TAKES_REQUEST = {
    "reserve", "publish", "publish_written", "publish_nothing", "publish_unreserved", "release",
}  # fmt: skip


def apply(machine: Machine, operation: Operation) -> Any:
    """Carry out one operation; one that makes no sense (any more) is skipped."""
    name, *arguments = operation
    if name in TAKES_REQUEST:
        index = arguments.pop(0)
        if index >= len(machine.requests):
            return None
        request = machine.requests[index]
        if name in ("publish", "publish_written"):
            tokens = list(arguments[0][: max(0, request.reserved - len(request.tokens))])
            if tokens and machine.may_go_on(request):
                getattr(machine, name)(request, tokens)
            return None
        if name == "reserve":
            arguments[0] = max(arguments[0], len(request.tokens))
        return getattr(machine, name)(request, *arguments)
    if name == "pin" and machine.reference.in_flight():
        return None
    return getattr(machine, name)(*arguments)


class RandomDriver:
    """Chooses operations as an erratic scheduler would, all from one `Random`."""

    def __init__(self, machine: Machine, rng: Random) -> None:
        self.machine, self.rng = machine, rng
        self.trace: list[Operation] = []
        self.alphabet = rng.choice([1, 2, 2, 3])
        self.longest = min(48, machine.page_size * machine.pool.num_pages * 2 // 3)
        self.past: deque[tuple[Hashable, list[int]]] = deque(maxlen=30)
        self.choices: dict[Callable[[], object], int] = {
            self.match: 4,
            self.acquire: 14,
            self.reserve: 14,
            self.publish: 22,
            self.publish_written: 10,
            self.publish_nothing: 4,
            self.schedule: 12,
            self.run_step: 7,
            self.fail_step: 3,
            self.release: 9,
            self.evict: 3,
            self.pin: 1,
            self.unpin: 1,
            self.refused: 1,
            self.reset: 1,
        }

    def run(self, operations: int) -> None:
        """That many operations, then let go of everything."""
        while self.machine.counts["operations"] < operations:
            self.one()
        self.do("finish")

    def one(self) -> None:
        """One operation, or nothing if it makes no sense now."""
        self.rng.choices(list(self.choices), list(self.choices.values()))[0]()

    def do(self, *operation: Any) -> Any:
        """Carry out an operation and remember it."""
        self.trace.append(operation)
        return apply(self.machine, operation)

    def match(self) -> None:
        namespace, prompt = self.prompt()
        self.do("match", prompt, namespace)

    def acquire(self) -> None:
        if len(self.machine.requests) < 6:
            namespace, prompt = self.prompt()
            resumed, whole = self.rng.random() < 0.1, self.rng.random() < 0.4
            self.do("acquire", prompt, namespace, resumed, whole)

    def reserve(self) -> None:
        if request := self.request():
            more = self.rng.randint(0, 2 * self.machine.page_size + 2)
            self.do("reserve", self.index, len(request.tokens) + more)

    def publish(self) -> None:
        request = self.request()
        room = request.reserved - len(request.tokens) if request else 0
        if request and room > 0 and self.machine.may_go_on(request):
            self.chunk(request, self.rng.randint(1, room))

    def publish_written(self) -> None:
        request = self.request()
        room = request.reserved - len(request.tokens) if request else 0
        if request and room > 0:
            count = self.rng.randint(1, room)
            tokens = request.to_compute[:count]
            tokens = tokens + self.tokens(count - len(tokens))
            self.do("publish_written", self.index, tokens)

    def publish_nothing(self) -> None:
        if self.request():
            self.do("publish_nothing", self.index)

    def schedule(self) -> None:
        """What a scheduler does with one request in one step: reserve and publish a chunk."""
        request = self.request()
        if not request or len(request.tokens) >= self.longest:
            return
        if not self.machine.may_go_on(request):
            return
        whole = len(request.to_compute) or 1
        count = self.rng.choice([1, 1, 2, self.machine.page_size, whole, whole, whole])
        if self.do("reserve", self.index, len(request.tokens) + count):
            self.chunk(request, count)

    def chunk(self, request: Request, count: int) -> None:
        """Publish `count` tokens, of the prompt as long as it lasts."""
        tokens = request.to_compute[:count]
        self.do("publish", self.index, tokens + self.tokens(count - len(tokens)))

    def run_step(self) -> None:
        self.do("run_step", self.rng.getrandbits(16))

    def fail_step(self) -> None:
        self.do("fail_step", self.rng.getrandbits(16))

    def release(self) -> None:
        request = self.request()
        if request and self.do("release", self.index) and request.tokens:
            self.past.append((request.namespace, request.tokens))

    def evict(self) -> None:
        self.do("evict", self.rng.choice([0, 1, 1, 2, 3, self.machine.pool.num_pages]))

    def pin(self) -> None:
        if self.past:
            namespace, tokens = self.rng.choice(self.past)
            tokens = tokens[: self.rng.randint(1, len(tokens))]
            self.do("pin", self.rng.choice("abc"), tokens, namespace)

    def unpin(self) -> None:
        self.do("unpin", self.rng.choice("abc"), self.rng.choice(NAMESPACES))

    def refused(self) -> None:
        if self.request():
            self.do("publish_unreserved", self.index, self.rng.randint(1, 3))

    def reset(self) -> None:
        self.do("reset")

    def request(self) -> Request | None:
        """Any live request, and its number in `index`."""
        if not self.machine.requests:
            return None
        self.index = self.rng.randrange(len(self.machine.requests))
        return self.machine.requests[self.index]

    def prompt(self) -> tuple[Hashable, list[int]]:
        """Mostly a prefix of something seen before, followed by a few random tokens."""
        rng = self.rng
        namespace: Hashable = rng.choice([NAMESPACES[0], NAMESPACES[0], *NAMESPACES])
        live = [(r.namespace, path) for r in self.machine.requests for path in (r.prompt, r.tokens)]
        known = live if live and rng.random() < 0.5 else list(self.past)
        prompt: list[int] = []
        if known and rng.random() < 0.8:
            namespace, whole = rng.choice(known)
            prompt = whole[: rng.choice([len(whole), rng.randint(0, len(whole))])]
        some = rng.choice([0, 1, 3, 2 * self.machine.page_size, self.longest])
        prompt = prompt + self.tokens(rng.randint(0, some))
        return namespace, prompt[: self.longest] or self.tokens(1)

    def tokens(self, count: int) -> list[int]:
        """Random tokens of a small alphabet: sharing and divergence are frequent."""
        return [self.rng.randrange(self.alphabet) for _ in range(count)]


@dataclass(frozen=True)
class Shape:
    """What a machine is made of."""

    page_size: int
    num_pages: int
    pin_budget: int | None
    policy: str

    def machine(self, check_every: int = 1) -> Machine:
        """A new machine of this shape."""
        return Machine(
            self.page_size,
            self.num_pages,
            pin_budget=self.pin_budget,
            policy=self.policy,
            check_every=check_every,
        )

    def failure(self, trace: list[Operation]) -> tuple[type, str, int | None] | None:
        """How and where `trace` fails, checked after each operation; None if it does not."""
        try:
            machine = self.machine()
            for operation in trace:
                apply(machine, operation)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return type(error), last.filename, last.lineno
        return None

    def shrink(self, trace: list[Operation]) -> list[Operation]:
        """A short part of `trace` that fails in the same place; takes a few seconds at most."""
        wanted, size = self.failure(trace), len(trace) // 2
        enough = time.monotonic() + 5
        while size and wanted:
            at = len(trace)
            while at > 0 and time.monotonic() < enough:
                shorter = trace[: max(0, at - size)] + trace[at:]
                if self.failure(shorter) == wanted:
                    trace = shorter
                at -= size
            size //= 2
        return trace


def stress(
    seed: int,
    page_size: int,
    num_pages: int,
    operations: int,
    *,
    check_every: int = 1,
) -> Counter[str]:
    """One cache of the given shape under `operations` random operations; what happened, counted."""
    rng = Random(f"{seed}/{page_size}/{num_pages}")
    budget = rng.choice([None, None, num_pages // 4, 0])
    shape = Shape(page_size, num_pages, budget, rng.choice(["lru", *POLICIES]))
    driver = RandomDriver(shape.machine(check_every), rng)
    try:
        driver.run(operations)
    except Exception as error:
        shortest = shape.shrink(driver.trace)
        raise AssertionError(
            f"{error!r}\nseed {seed}, {shape}, {len(driver.trace)} operations; these suffice:\n  "
            + "\n  ".join(map(repr, shortest))
        ) from error
    return driver.machine.counts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random operations on RadixCache, all verified.")
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--round", type=int, default=2_000, help="operations per cache")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    counts: Counter[str] = Counter()
    started, seed = time.perf_counter(), arguments.seed
    while counts["operations"] < arguments.operations:
        for page_size, num_pages in SHAPES:
            counts += stress(seed, page_size, num_pages, arguments.round)
        seed += 1
    for what, count in sorted(counts.items()):
        print(f"{count:>9,}  {what}")
    print(f"seeds {arguments.seed}..{seed - 1}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
