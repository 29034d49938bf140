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
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

NAMES = "Ada Bea Cleo Dora Elsa Finn Gus Hugo Ida Jon Kai Lena Milo Nora Otto Pia".split()
SURNAMES = "Lund Holm Frost Marsh Rossi Tanaka Byron Silva".split()
FIELDS = {
    "Age": [str(age) for age in range(20, 80)],
    "Occupation": "Pilot Baker Judge Nurse Painter Farmer".split(),
    "Country": "Norway Denmark Chile Japan Kenya Italy".split(),
}
TURNS = 6


@dataclass
class Tally:
    """What the clients have seen."""

    answers: int = 0
    hang_ups: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)


def make_table(rng: random.Random) -> tuple[str, list[str]]:
    """A table of ten people, and their names."""
    people = rng.sample([f"{name} {surname}" for name in NAMES for surname in SURNAMES], 10)
    rows = [["ID", "Name", *FIELDS], ["---"] * (2 + len(FIELDS))]
    for number, person in enumerate(people, 1):
        rows.append([str(number), person, *(rng.choice(values) for values in FIELDS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), people


async def converse(
    client: httpx.AsyncClient,
    tally: Tally,
    rng: random.Random,
    impatient: bool,
    table: str,
    people: list[str],
) -> None:
    """One conversation of six turns."""
    messages = [{"role": "system", "content": f"{table}\n"}]
    hang_up_in = rng.randrange(TURNS) if impatient else None
    for turn in range(TURNS):
        question = f"What is the {rng.choice([*FIELDS]).lower()} of {rng.choice(people)}?"
        messages.append({"role": "user", "content": question})
        if turn == hang_up_in:
            await ask(client, tally, messages, hang_up_after=rng.randrange(1, 8))
        answer = await ask(client, tally, messages)
        messages.append({"role": "assistant", "content": answer})


async def ask(
    client: httpx.AsyncClient,
    tally: Tally,
    messages: list[dict[str, str]],
    hang_up_after: int | None = None,
) -> str:
    """The streamed answer; or hang up after some chunks."""
    start, answer, chunks = time.perf_counter(), "", 0
    body = {"messages": messages, "stream": True, "max_tokens": 40}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                tally.errors[f"status {response.status_code}"] += 1
                return answer
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    tally.answers += 1
                    break
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        tally.errors[chunk["error"]["message"]] += 1
                        break
                    if not chunks:
                        tally.ttft.append(time.perf_counter() - start)
                    chunks += 1
                    answer += chunk["choices"][0]["delta"].get("content", "")
                    if chunks == hang_up_after:
                        tally.hang_ups += 1
                        return answer
            else:
                tally.errors["a stream without an end"] += 1
    except httpx.HTTPError as error:
        tally.errors[type(error).__name__] += 1
    return answer


async def load(url: str, pid: int, clients: int, minutes: float, seed: int) -> None:
    """Run the clients, and print what became of the server."""
    rng = random.Random(seed)
    tables = [make_table(rng) for _ in range(8)]
    tally, end, memory = Tally(), time.monotonic() + 60 * minutes, []

    async def talk(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while time.monotonic() < end:
                table, people = own.choice(tables)
                await converse(client, tally, own, number % 3 == 0, table, people)

    async def watch() -> None:
        while True:
            memory.append(resident_mib(pid))
            await asyncio.sleep(5)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(talk(number) for number in range(clients)))
    watcher.cancel()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        stats = (await client.get("/v1/cache?max_nodes=0")).json()["stats"]
        check = (await client.get("/check")).json()
    before, cpu = time.monotonic(), cpu_seconds(pid)
    await asyncio.sleep(20)
    idle = (cpu_seconds(pid) - cpu) / (time.monotonic() - before)
    tally.ttft.sort()
    third = len(memory) // 3
    print(f"seed {seed}, {clients} clients, {minutes:g} minutes")
    print(f"answers {tally.answers:,}, hang-ups {tally.hang_ups:,}, errors {dict(tally.errors)}")
    print(f"hit rate {stats['hit_rate']:.1%}, evicted pages {stats['evicted_pages']:,}")
    print(
        f"time to first chunk, as the clients saw it: median {quantile(tally.ttft, 0.5):.3f} s, "
        f"95 % {quantile(tally.ttft, 0.95):.3f} s"
    )
    print(
        f"afterwards: check {check['check']}, leases {check['leases']}, pages lost {check['lost']}"
    )
    print(
        f"resident MiB: start {memory[0]:.0f}, second third {max(memory[third : 2 * third]):.0f}, "
        f"last third {max(memory[2 * third :]):.0f}; every 30 s: "
        + " ".join(f"{value:.0f}" for value in memory[::6])
    )
    print(f"idle: {idle:.2%} of a core")


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(match[1]) / 1024 if match else float("nan")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_server(kv_memory: str) -> None:
    """The server under test: `radixcache serve`, and a route that looks for what is lost."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from radixcache import LLM
    from radixcache.runtime.server.app import create_app
    from radixcache.runtime.server.serve import listen, serve

    llm = LLM(kv_memory=kv_memory)
    app = create_app(llm)

    async def check() -> dict[str, Any]:
        found: dict[str, Any] = await app.state.backend.worker.call(look)
        return found

    def look() -> dict[str, Any]:
        cache = llm.cache
        found: dict[str, Any] = {"check": "ok", "leases": len(cache._leases)}  # type: ignore[attr-defined]
        try:
            cache.check()
        except AssertionError as error:
            found["check"] = str(error)
        cache.evict(cache.pool.num_pages)
        return {**found, "lost": cache.pool.num_pages - cache.pool.num_free}

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
    command = [
        sys.executable,
        "-m",
        "radixcache.bench.probes.serve_load",
        "--serve",
        "--kv-memory",
        args.kv_memory,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = ""
        while not url:
            line = server.stderr.readline()
            assert line, "the server did not start"
            url = "".join(re.findall(r"at (http://\S+)", line))
        asyncio.run(wait_for(url))
        try:
            asyncio.run(load(url, server.pid, args.clients, args.minutes, args.seed))
        finally:
            server.send_signal(signal.SIGTERM)
            start = time.monotonic()
            server.wait(60)
            print(f"SIGTERM to end: {time.monotonic() - start:.1f} s")


async def wait_for(url: str) -> None:
    """Wait until the server answers."""
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            try:
                await client.get("/health")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
