"""The simulator against a queue worked out by hand, and what must hold whatever the routing."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from radixcache.bench.replay.play import Arrivals
from radixcache.bench.replay.replicas import Fleet, RoutingFigures, run_replicas
from radixcache.bench.schemes.bounds import build_trie, unlimited_hits
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.schemes.routing import RULES
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Arrival, Workload
from radixcache.runtime.cli import main


def timed(*requests: tuple[float, int, int, int]) -> Workload:
    """Requests of (due, first token, prompt tokens, answer tokens), alike from the first token."""
    workload = Workload("timed", "")
    for at, first, length, answer in requests:
        prompt = partial(np.arange, first, first + length, dtype=np.int32)
        said = partial(np.arange, 7000, 7000 + answer, dtype=np.int32)
        workload.arrivals.append(Arrival(length, answer, prompt, said, at=at))
    return workload


def run(
    workload: Workload,
    routing: str,
    replicas: int,
    *,
    memory: int = 1 << 14,
    scheme: str = "radix-1",
    arrivals: Arrivals | None = None,
    fleet: Fleet | None = None,
) -> RoutingFigures:
    return run_replicas(
        workload,
        routing,
        parse_scheme(scheme),
        memory,
        fleet or Fleet(replicas, prefill_rate=100.0, step_time=1.0),
        arrivals or Arrivals(as_recorded=True),
    )


def test_one_replica_is_a_queue_first_come_first_served() -> None:
    # 100 tokens take a second; the second request finds 199 of its 200, the third 100 of them.
    workload = timed((0.0, 0, 200, 1), (0.5, 0, 200, 3), (0.5, 0, 300, 1), (9.0, 500, 50, 1))
    found = run(workload, "cost", 1)
    assert found.ttfts == pytest.approx([2.0, 1.51, 2.51, 0.5])
    assert found.computed_by_replica == [200 + 1 + 100 + 50]
    assert (found.hit_tokens, found.imbalance, found.refused) == (399, 1.0, 0)


def test_a_request_waits_until_there_is_room_for_its_answer() -> None:
    workload = timed((0.0, 0, 100, 21), (0.0, 500, 100, 1))
    assert run(workload, "cost", 1, memory=300).ttfts == pytest.approx([1.0, 2.0])
    assert run(workload, "cost", 1, memory=200).ttfts == pytest.approx([1.0, 22.0])
    refused = run(workload, "cost", 1, memory=110)
    assert refused.refused == 1 and refused.ttfts == pytest.approx([1.0])


def test_a_request_waits_until_another_ends_if_as_many_run_as_may() -> None:
    workload = timed((0.0, 0, 100, 21), (0.0, 500, 100, 1), (0.0, 700, 100, 1))
    one = Fleet(1, prefill_rate=100.0, step_time=1.0, max_num_seqs=1)
    found = run(workload, "cost", 1, fleet=one)
    assert found.ttfts == pytest.approx([1.0, 22.0, 23.0])  # the first ends after 21 seconds
    two = Fleet(1, prefill_rate=100.0, step_time=1.0, max_num_seqs=2)
    assert run(workload, "cost", 1, fleet=two).ttfts == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize("routing", RULES)
@pytest.mark.parametrize("scheme", ["radix-16", "hash-16", "aligned-16", "template-16", "none"])
def test_tokens_are_conserved_and_nobody_hits_more_than_an_endless_cache(
    routing: str, scheme: str
) -> None:
    workload = generate("chat:conversations=12,turns=3", 3, 1000)
    found = run(
        workload, routing, 3, scheme=scheme, memory=4096, arrivals=Arrivals(rate=0.2, seed=1)
    )
    assert len(found.ttfts) == len(workload.arrivals) and found.refused == 0
    assert found.hit_tokens + found.computed_tokens == workload.prompt_tokens
    assert sum(found.computed_by_replica) == found.computed_tokens
    assert found.hit_tokens <= unlimited_hits(build_trie(workload))
    assert (found.hit_tokens == 0) == (scheme == "none")
    assert min(found.ttfts) > 0 and 1 <= found.imbalance <= 3


def test_a_closed_loop_has_as_many_in_flight_as_it_may() -> None:
    workload = timed(*[(0.0, 1000 * n, 100, 1) for n in range(6)])
    found = run(workload, "cost", 6, arrivals=Arrivals(concurrency=2))
    assert found.ttfts == pytest.approx([1.0] * 6)


def test_a_trace_can_be_played_faster() -> None:
    workload = timed((0.0, 0, 100, 1), (1.0, 1000, 100, 1))
    assert run(workload, "cost", 1).ttfts == pytest.approx([1.0, 1.0])
    twice = Arrivals(as_recorded=True, speed=2.0)
    assert run(workload, "cost", 1, arrivals=twice).ttfts == pytest.approx([1.0, 1.5])


def test_the_command_compares_all_ways_in_a_table_of_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "bench chat:conversations=8,turns=3 --replicas 4 --memory 1GB 1000000".split()
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "radix-16" in line]
    assert [row.split()[2] for row in rows] == 2 * [*RULES]
    assert max(len(row.rstrip()) for row in rows) <= 80
    assert main([*words, "--routing", "cost", "session", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["workloads"][0]["routing"]
    assert [row["routing"] for row in found] == 2 * ["cost", "session"]
    assert found[0]["ttft_mean"] > 0 and len(found[0]["computed_by_replica"]) == 4
    assert report["settings"]["replicas"] == 4
