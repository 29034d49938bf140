"""Mixed traffic for minutes or hours: every answer is right, and nothing grows.

    python -m tests.scripts.soak --minutes 3 --seed 1

Threads talk to one `LLM`, directly and through its server: completions, streams that are read and
streams that are left, pins and salts. Meanwhile forward passes, copies and changes of the cache
fail at random, in far too little memory. Each answer must be what the model gives without a cache
and alone, or an error that says what happened. Round after round, each with another cache, the
process must come back to the same threads and open files, and to no more memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import httpx2 as httpx

from radixcache import LLM, PinError, SamplingParams
from radixcache.errors import EngineFailed
from tests.helpers.engines import assert_no_page_is_lost
from tests.helpers.models import tiny_model
from tests.runtime.server.live import live

CLIENTS = 6
FAILURES = 0.01
"""How often a call that may fail does."""
MODES: list[dict[str, Any]] = [
    {"cache": "radix", "page_size": 1},
    {"cache": "radix", "page_size": 16},
    {"cache": "hash-block", "page_size": 8},
    {"cache": "none", "page_size": 4},
]
LITTLE: dict[str, Any] = {
    "kv_cache_memory_bytes": "384KiB", "max_num_batched_tokens": 64, "max_num_seqs": 8,
}  # fmt: skip
"""Room for a few of the longest requests: eviction and preemption all the time."""
SALTS = (None, "blue", "red")
_ARENA_MAX = -8  # glibc's M_ARENA_MAX
GROWTH = 8.0
"""MiB by which the later rounds may hold more than the earlier ones."""


class Case(NamedTuple):
    """A prompt, how to go on from it, and the tokens that come."""

    prompt: str
    params: SamplingParams
    tokens: list[list[int]]


class Soak:
    """The traffic on one server.

    Attributes:
        tally: what was done and how it ended, counted.
        wrong: what must not have happened.
    """

    def __init__(self, llm: LLM, cases: list[Case], tally: Counter[str]) -> None:
        self.llm, self.cases, self.tally = llm, cases, tally
        self.wrong: list[str] = []
        self.end = threading.Event()

    def run(self, seconds: float, rng: random.Random) -> None:
        with live(self.llm, max_queued_requests=40) as server:
            clients = [
                threading.Thread(
                    target=self._client, args=(server.url, random.Random(rng.random()))
                )
                for _ in range(CLIENTS)
            ]
            with failing(self.llm, random.Random(rng.random()), self.tally):
                for client in clients:
                    client.start()
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and not self.wrong:
                    time.sleep(0.2)
                    self.llm.call(self.llm.engine.check)
                self.end.set()
                for client in clients:
                    client.join(60)
                    if client.is_alive():
                        self.wrong.append("a client waits for ever")
            for prefix in self.llm.call(self.llm.prefixes.list):
                self.llm.unpin_prefix(prefix.name, cache_salt=prefix.cache_salt)
            server.assert_idle()
            self.llm.call(self.llm.engine.check)
            self.llm.reset_prefix_cache()
            self.llm.call(lambda: assert_no_page_is_lost(self.llm.engine))

    def _client(self, url: str, rng: random.Random) -> None:
        acts = [
            self._generate, self._generate, self._stream, self._post, self._post, self._hang_up,
            self._pin,
        ]  # fmt: skip
        with httpx.Client(base_url=url, timeout=60) as http:
            while not self.end.is_set() and not self.wrong:
                act = rng.choice(acts)
                try:
                    act(http, rng)
                    self.tally[act.__name__[1:]] += 1
                except (EngineFailed, MemoryError):
                    self.tally["told of a failure"] += 1
                except Exception as error:
                    self.wrong.append(f"{act.__name__}: {error!r}")

    def _expect(self, case: Case, tokens: list[list[int]]) -> None:
        if tokens != case.tokens:
            self.wrong.append(f"{case.prompt!r} gave {tokens}, not {case.tokens}")

    def _generate(self, http: httpx.Client, rng: random.Random) -> None:
        cases = rng.sample(self.cases, rng.randint(1, 5))
        outputs = self.llm.generate(
            [case.prompt for case in cases], [case.params for case in cases],
            cache_salt=rng.choice(SALTS), use_tqdm=False,
        )  # fmt: skip
        for case, output in zip(cases, outputs, strict=True):
            self._expect(case, [o.token_ids for o in output.outputs])

    def _stream(self, http: httpx.Client, rng: random.Random) -> None:
        case = rng.choice(self.cases)
        leaves = rng.random() < 0.4
        outputs = []
        for output in self.llm.stream(case.prompt, case.params, cache_salt=rng.choice(SALTS)):
            outputs.append(output)
            if leaves and rng.random() < 0.5:
                return
        self._expect(case, [o.token_ids for o in outputs[-1].outputs])

    def _post(self, http: httpx.Client, rng: random.Random) -> None:
        case = rng.choice(self.cases)
        params = case.params
        body = {
            "prompt": case.prompt, "max_tokens": params.max_tokens, "n": params.n,
            "temperature": params.temperature, "seed": params.seed, "return_token_ids": True,
            "cache_salt": rng.choice(SALTS), "ignore_eos": True,
        }  # fmt: skip
        answer = http.post("/v1/completions", json=body)
        if answer.status_code in (429, 500):
            assert answer.json()["error"]["message"]
            self.tally[f"status {answer.status_code}"] += 1
            return
        assert answer.status_code == 200, answer.text
        self._expect(case, [choice["token_ids"] for choice in answer.json()["choices"]])

    def _hang_up(self, http: httpx.Client, rng: random.Random) -> None:
        body = {"prompt": rng.choice(self.cases).prompt, "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if rng.random() < 0.3:
                    return

    def _pin(self, http: httpx.Client, rng: random.Random) -> None:
        name, salt = f"p{rng.randrange(4)}", rng.choice(SALTS)
        case = rng.choice(self.cases)
        try:
            self.llm.pin_prefix(
                name, case.prompt, lifetime=rng.choice([None, 0.3]), cache_salt=salt
            )
            self.llm.generate("ab", prefix=name, cache_salt=salt)
            self.llm.unpin_prefix(name, cache_salt=salt)
        except PinError:
            self.tally["pins refused"] += 1


@contextmanager
def failing(llm: LLM, rng: random.Random, tally: Counter[str]) -> Iterator[None]:
    """Let parts of the engine fail now and then, before or after they have done their work."""
    engine = llm.engine
    owners: list[tuple[Any, str]] = [
        (engine.model, "forward"), (engine.kv_pool, "copy"), (engine.sampler, "sample"),
        (engine.cache.pool, "allocate"), (engine.cache.pool, "drop"),
    ]  # fmt: skip

    def flaky(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            chance = rng.random()
            if chance > FAILURES:
                return call(*args, **kwargs)
            tally["failures"] += 1
            if chance > FAILURES / 2:
                call(*args, **kwargs)
            raise MemoryError("planted")

        return run

    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patch.object(owner, name, flaky(getattr(owner, name))))
        yield


def make_cases(path: Path, rng: random.Random) -> list[Case]:
    """Prompts that share beginnings of all lengths, greedy and seeded, and their answers."""
    stems = ["".join(rng.choices("abcdef ", k=90)) for _ in range(5)]
    prompts = [
        rng.choice(stems)[: rng.randint(0, 90)] + "".join(rng.choices("xyz", k=rng.randint(1, 20)))
        for _ in range(120)
    ]
    params = [
        SamplingParams(temperature=1.0, seed=i, n=rng.randint(1, 3), max_tokens=8, ignore_eos=True)
        if rng.random() < 0.3
        else SamplingParams(temperature=0, max_tokens=rng.randint(1, 24), ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(path, cache="none", kv_cache_memory_bytes="16MiB") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [[o.token_ids for o in output.outputs] for output in outputs]
    return [Case(*case) for case in zip(prompts, params, tokens, strict=True)]


class Held(NamedTuple):
    """What the process holds between two rounds."""

    mib: float
    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but not given back, is not held
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mib = pages * resource.getpagesize() / 2**20
        # Those that read bodies are the process's, four at most, and begin as they are needed.
        threads = [t for t in threading.enumerate() if not t.name.startswith("bodies")]
        return cls(mib, len(os.listdir("/proc/self/fd")), len(threads))


def check_flat(held: list[Held]) -> None:
    """The later half of what was held is no more than the earlier half, the first round apart."""
    held = held[1:]
    early, late = held[: len(held) // 2], held[len(held) // 2 :]
    for name in Held._fields:
        before = statistics.median(getattr(one, name) for one in early)
        after = statistics.median(getattr(one, name) for one in late)
        allowed = GROWTH if name == "mib" else 0
        assert after <= before + allowed, f"{name} grew from {before} to {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the planted failures
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)  # each thread's arena keeps gaps, which are no leak
    print(f"seed {args.seed}")
    rng, tally, held = random.Random(args.seed), Counter[str](), [Held.now()]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("llama", Path(folder), seed=args.seed)
        cases = make_cases(path, rng)
        end, rounds = time.monotonic() + args.minutes * 60, 0
        while len(held) < 6 or time.monotonic() < end:
            for mode in MODES:
                with LLM(path, **mode, **LITTLE) as llm:
                    llm.cache.events.append(lambda event: tally.update([type(event).__name__]))
                    soak = Soak(llm, cases, tally)
                    soak.run(min(5.0, args.minutes * 60 / 24), rng)
                if soak.wrong:
                    print(f"{mode}:", *soak.wrong[:5], sep="\n")
                    return 1
            rounds += 1
            held.append(Held.now())
    for what, count in sorted(tally.items()):
        print(f"{count:>9,} {what}")
    for name in Held._fields:
        print(f"{name}: " + " ".join(f"{getattr(one, name):.0f}" for one in held))
    check_flat(held)
    print(f"{rounds} rounds of {len(MODES)} caches: all answers right, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
