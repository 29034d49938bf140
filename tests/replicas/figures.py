"""Figures for `docs/deploy/README.md`: `.venv-replicas/bin/python -m tests.replicas.figures 20 5`.

Kills the busiest of three nodes under load, time and again, and counts what came of the streams;
then what routing finds on one node, and on three, for the same chats.
"""

from __future__ import annotations

import asyncio
import statistics
import sys

from radixcache import LLM, SamplingParams
from tests.replicas.conftest import Deployment
from tests.replicas.load import Load
from tests.replicas.nodes import Nodes, cluster, node_of


async def kill_under_load(nodes: Nodes, deployment: Deployment, kills: int) -> list[Load]:
    """Chats without a pause, while the busiest node dies and another comes, `kills` times."""
    loads: list[Load] = []
    enough = asyncio.Event()

    async def talk() -> None:
        while not enough.is_set():
            loads.append(Load(deployment.client(), seed=len(loads)))
            await loads[-1].run()

    async def kill() -> None:
        for number in range(kills):
            while True:
                await asyncio.sleep(0.05)
                replicas = await asyncio.to_thread(deployment.replicas)
                busiest = max(replicas.values(), key=lambda replica: replica["requests"])
                if len(replicas) == 3 and busiest["requests"] >= 3:
                    break
            await asyncio.to_thread(nodes.kill, node_of(busiest))
            print(f"kill {number + 1}, {sum(len(x.answered) for x in loads)} answers", flush=True)
            await asyncio.to_thread(nodes.add)
            while busiest["replica"] in await asyncio.to_thread(deployment.replicas):
                await asyncio.sleep(0.2)
        enough.set()

    await asyncio.gather(talk(), kill())
    return loads


def count_wrong(loads: list[Load]) -> int:
    """Answers that are not those of the same model in this process."""
    params = SamplingParams(max_tokens=40, temperature=0)
    with LLM(kv_cache_memory_bytes="1GB") as alone:
        answered = [pair for load in loads for pair in load.answered]
        outputs = alone.chat([messages for messages, _ in answered], params, use_tqdm=False)
        pairs = zip(outputs, answered, strict=True)
        return sum(output.outputs[0].text != text for output, (_, text) in pairs)


def show(name: str, loads: list[Load]) -> None:
    waits = [1000 * wait for load in loads for wait in load.waits]
    cached, prompt = (sum(getattr(x, f"{n}_tokens") for x in loads) for n in ("cached", "prompt"))
    cuts = statistics.quantiles(waits, n=100)
    print(
        f"{name}: {sum(len(x.answered) for x in loads)} answers, {count_wrong(loads)} wrong, "
        f"{sum(len(x.failed) for x in loads)} cut off with an error, of which "
        f"{sum(not text for x in loads for _, text in x.failed)} before a first token, "
        f"{sum(len(x.unended) for x in loads)} without an end; hits {cached / prompt:.1%} of "
        f"{prompt:,} tokens; TTFT p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms, "
        f"most {max(waits):.0f} ms",
        flush=True,
    )


def main(kills: int, rounds: int) -> None:
    if kills:
        with cluster(3) as (nodes, deployment):
            loads = asyncio.run(kill_under_load(nodes, deployment, kills))
        show(f"3 nodes, {kills} kills", loads)
    for count in (1, 3):
        with cluster(count) as (_, deployment):
            loads = [Load(deployment.client(), seed=100 + number) for number in range(rounds)]
            for load in loads:
                asyncio.run(load.run())
        show(f"{count} node{'s' * (count > 1)}", loads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
