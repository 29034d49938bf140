"""Many clients talk to one server at the same time, and a third of them hang up in mid-answer.

Each client holds conversations of six turns about one of eight tables, one after the other, until
the time is over. One in three is impatient: in each conversation it hangs up during one answer,
and asks again. At the end nothing may be lost: no error, no lease, no page; memory must have
stayed where it was, and the server must use no processor while nobody asks.

    python -m radixcache.bench.probes.serve_load --minutes 5
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai import AsyncOpenAI, OpenAIError

from radixcache.bench.machine import cpu_seconds, held_bytes
from radixcache.bench.probes.people import FIELDS, make_table

TURNS = 6


@dataclass
class Tally:
    """What the clients have seen."""

    answers: int = 0
    hang_ups: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)


class Client:
    """Somebody who talks about tables, and may be impatient."""

    def __init__(self, url: str, tally: Tally, rng: random.Random, impatient: bool) -> None:
        self.api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.tally, self.rng, self.impatient = tally, rng, impatient

    async def converse(self, table: str, people: list[str]) -> None:
        """One conversation of six turns."""
        messages = [{"role": "system", "content": f"{table}\n"}]
        hang_up_in = self.rng.randrange(TURNS) if self.impatient else None
        for turn in range(TURNS):
            person, what = self.rng.choice(people), self.rng.choice([*FIELDS]).lower()
            messages.append({"role": "user", "content": f"What is the {what} of {person}?"})
            if turn == hang_up_in:
                await self.ask(messages, hang_up_after=self.rng.randrange(1, 8))
            messages.append({"role": "assistant", "content": await self.ask(messages)})

    async def ask(self, messages: list[Any], hang_up_after: int | None = None) -> str:
        """The streamed answer; or hang up after some chunks."""
        start, answer, chunks, ended = time.perf_counter(), "", 0, False
        try:
            async with await self.api.chat.completions.create(
                model="tabletalk", messages=messages, max_tokens=40, stream=True
            ) as stream:
                async for chunk in stream:
                    if not chunks:
                        self.tally.ttft.append(time.perf_counter() - start)
                    chunks += 1
                    answer += chunk.choices[0].delta.content or ""
                    ended = chunk.choices[0].finish_reason is not None
                    if chunks == hang_up_after:
                        self.tally.hang_ups += 1
                        return answer
            if ended:
                self.tally.answers += 1
            else:
                self.tally.errors["a stream without an end"] += 1
        except OpenAIError as error:
            self.tally.errors[f"{type(error).__name__}: {error}"] += 1
        return answer


async def load(url: str, pid: int, clients: int, minutes: float, seed: int) -> None:
    """Run the clients, and print what became of the server."""
    rng = random.Random(seed)
    tables = [make_table(rng) for _ in range(8)]
    tally, end, memory = Tally(), time.monotonic() + 60 * minutes, []

    async def talk(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        client = Client(url, tally, own, impatient=number % 3 == 0)
        while time.monotonic() < end:
            await client.converse(*own.choice(tables))

    async def watch() -> None:
        while True:
            memory.append(held_bytes(pid) / (1 << 20))
            await asyncio.sleep(5)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(talk(number) for number in range(clients)))
    watcher.cancel()
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        found = await client.get("/check", cast_to=dict[str, Any])
    before, cpu = time.monotonic(), cpu_seconds(pid)
    await asyncio.sleep(20)
    idle = (cpu_seconds(pid) - cpu) / (time.monotonic() - before)
    median, late = np.percentile(tally.ttft, (50, 95))
    third = len(memory) // 3
    print(f"seed {seed}, {clients} clients, {minutes:g} minutes")
    print(f"answers {tally.answers:,}, hang-ups {tally.hang_ups:,}, errors {dict(tally.errors)}")
    print(f"time to first chunk, as the clients saw it: median {median:.3f} s, 95 % {late:.3f} s")
    print("afterwards: " + ", ".join(f"{what} {value}" for what, value in found.items()))
    print(
        f"MiB held: start {memory[0]:.0f}, second third {max(memory[third : 2 * third + 1]):.0f}, "
        f"last third {max(memory[2 * third :]):.0f}"
    )
    print(f"idle: {idle:.2%} of a core")


def run_server(kv_memory: str) -> None:
    """The server under test: `radixcache serve`, and a route that looks for what is lost."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from radixcache import LLM
    from radixcache.runtime.server.app import create_app
    from radixcache.runtime.server.listener import listen
    from radixcache.runtime.server.serve import serve

    llm = LLM(kv_memory=kv_memory)
    app = create_app(llm)

    async def check() -> dict[str, Any]:
        found: dict[str, Any] = await app.state.backend.jobs.call(look)
        return found

    def look() -> dict[str, Any]:
        cache = llm.cache
        found = {
            "hit rate": f"{cache.stats.hit_rate:.1%}",
            "evicted pages": cache.stats.evicted_pages,
            "leases": len(cache._leases),
            "check": "ok",
        }
        try:
            cache.check()
        except AssertionError as error:
            found["check"] = str(error)
        cache.evict(cache.pool.num_pages)
        return {**found, "pages lost": cache.pool.num_pages - cache.pool.num_free}

    app.add_api_route("/check", check)
    serve(app, listen("127.0.0.1", 0), shutdown_timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=20_261_120)
    parser.add_argument("--kv-memory", default="64MiB", help="so little that pages are evicted")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(args.kv_memory)
        return
    command = [sys.executable, "-m", "radixcache.bench.probes.serve_load", "--serve"]
    command += ["--kv-memory", args.kv_memory]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        urls = (re.search(r"at (http://\S+)", line) for line in server.stderr)
        url = next((found[1] for found in urls if found), None)
        assert url, "the server did not start"
        try:
            asyncio.run(load(url, server.pid, args.clients, args.minutes, args.seed))
        finally:
            server.terminate()
            start = time.monotonic()
            server.wait(60)
            print(f"SIGTERM to end: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
