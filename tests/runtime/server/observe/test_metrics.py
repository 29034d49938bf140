"""What Prometheus is told, against counts that the test made itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from radixcache import LLM
from radixcache.runtime.engine.scheduling.state_planner import StatePlanner
from radixcache.runtime.server.observe.metrics import VLLM
from tests.helpers.drafts import drafting_llm
from tests.helpers.models import tiny_model
from tests.runtime.server.live import LiveServer, ask, live
from tests.runtime.server.processes import streaming

ROOT = Path(__file__).resolve().parents[4]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE = "| 1 | Nora Lund | 30 | Pilot | Norway |" * 3  # some pages


@pytest.fixture(scope="module", params=["radix", "hash-block"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    llm = LLM(cache=request.param, kv_cache_memory_bytes="32MiB", max_num_seqs=2)
    with live(llm, served_model_name=["the model"]) as server:
        yield server


def families(server: LiveServer) -> dict[str, Metric]:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert all(family.documentation for family in found.values())
    return found


def samples(server: LiveServer) -> dict[str, float]:
    """All samples by their name, ours without "radixcache_", and the values of their labels."""
    found = {}
    for family in families(server).values():
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            name = sample.name.removeprefix("radixcache_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


class Growth:
    """How much each sample has grown since this was made."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.before = server, samples(server)

    def look(self) -> None:
        self.now = samples(self.server)

    def __getitem__(self, name: str) -> float:
        return round(self.now[name] - self.before.get(name, 0), 9)


def test_drafts_are_counted_by_where_they_come_from() -> None:
    body = {"prompt": LINE, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with live(drafting_llm()) as server:
        growth = Growth(server)
        answers = [server.post(COMPLETIONS, body).json() for _ in range(2)]
        growth.look()
    for which, name in (("drafted", "draft"), ("accepted", "accepted")):
        told = [answer["radixcache"][f"{which}_tokens"] for answer in answers]
        counted = growth[f"spec_decode_num_{name}_tokens_total{{tree}}"]
        assert counted == told[1] == 18 and answers[0]["choices"] == answers[1]["choices"]
        assert growth[f"spec_decode_num_{name}_tokens_total{{suffix}}"] == told[0]


def count(server: LiveServer, text: str) -> int:
    return int(server.post("/tokenize", {"prompt": text}).json()["count"])


def test_they_agree_with_what_was_asked_and_answered(fresh: LiveServer, monkeypatch):
    growth = Growth(fresh)
    monkeypatch.setattr(fresh.engine, "multi_step", None)  # so that steps can be counted
    body = {"prompt": LINE, "max_tokens": 5, "ignore_eos": True}
    answers = [fresh.post(COMPLETIONS, body).json() for _ in range(2)]
    answers.append(fresh.post(COMPLETIONS, {**body, "n": 2, "max_tokens": 7}).json())
    hits = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    growth.look()
    phases = [growth[f"{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode")]
    assert sum(phases) == pytest.approx(growth["request_latency_seconds_sum"], abs=1e-6)
    first = growth["time_to_first_token_seconds_sum"]
    assert min(phases) > 0 and sum(phases[:2]) == pytest.approx(first, abs=1e-6)
    fresh.post("/v1/prefixes", {"name": "p", "prompt": "x " * 40})
    growth.look()
    line, prefix = count(fresh, LINE), count(fresh, "x " * 40)
    wanted = {
        "hit_tokens_total": sum(hits) + hits[-1],  # both completions of the last hit
        "query_tokens_total": 4 * line + prefix,
        "vllm:prompt_tokens_total{the model}": 4 * line + prefix,
        "requests_started_total": 5,
        "time_to_first_token_seconds_count": 4,  # the prefix is one
        "inter_token_latency_seconds_count": 2 * 4 + 6,
        "generation_tokens_total": 2 * 5 + 2 * 7 + 1,
        "request_prompt_tokens_sum": 3 * line + prefix,
        "request_generation_tokens_count": 5,
        "request_longest_generation_tokens_sum": 2 * 5 + 7 + 1,
        "preemptions_total": 0,
        "evicted_pages_total": 0,
        "requests_finished_total{length}": 4,
        "requests_finished_total{stop}": 0,
        "request_generation_tokens_bucket{5.0}": 3,
    }
    assert {name: growth[name] for name in wanted} == wanted and sum(hits) > 0
    missed = sum(growth[name] for name in growth.now if name.startswith("missed_tokens_total"))
    computed = growth["query_tokens_total"] - growth["hit_tokens_total"]
    assert 5 < missed < computed  # the last token of each prompt apart
    cache, now = fresh.engine.cache, growth.now
    assert now["hit_rate"] == cache.stats.hit_rate > 0
    assert now["pages{free}"] == cache.pool.num_free
    assert now["pages{used}"] == cache.pool.num_pages - cache.pool.num_free
    pinned = -(-prefix // cache.page_size)
    assert now["pages{leased}"] == now["pages{pinned}"]
    assert now["pages{pinned}"] in (pinned - 1, pinned)  # in whole blocks
    fresh.delete("/v1/prefixes/p")


def test_what_waits_is_in_the_queue_and_what_runs_holds_pages(fresh: LiveServer):
    growth = Growth(fresh)
    with ThreadPoolExecutor(1) as pool:
        with streaming(fresh, prompt=LINE), streaming(fresh, prompt=LINE):
            third = pool.submit(fresh.post, COMPLETIONS, {"prompt": LINE, "max_tokens": 2})
            fresh.wait_until(lambda: len(fresh.engine.scheduler.waiting) == 1)
            growth.look()
            now, leased = growth.now, growth.now["pages{leased}"]
            assert (now["requests_running"], now["requests_waiting"]) == (2, 1)
            assert now["vllm:num_requests_waiting{the model}"] == 1
            page = fresh.engine.cache.page_size
            assert count(fresh, LINE) // page < leased <= now["pages{used}"]
            usage = leased / fresh.engine.cache.pool.num_pages
            assert now["vllm:kv_cache_usage_perc{the model}"] == pytest.approx(usage)
            assert growth["requests_finished_total{abort}"] == 0
            scheduler = fresh.engine.scheduler
            fresh.call(lambda: scheduler._preempt(scheduler.running[-1]))
        assert third.result(60).status_code == 200
    fresh.assert_idle()
    growth.look()
    assert growth["preemptions_total"] == growth["vllm:num_preemptions_total{the model}"] == 1
    assert growth["requests_finished_total{abort}"] == 2
    assert growth["requests_finished_total{length}"] == 1
    assert growth["queue_time_seconds_count"] == 3 and growth["decode_time_seconds_count"] == 1
    assert growth.now["kv_usage"] == 0  # although much is cached


def test_a_flush_takes_no_counter_back(fresh: LiveServer):
    for length in (50, 90):
        fresh.post(COMPLETIONS, {"prompt": LINE[:length], "max_tokens": 2})
    growth = Growth(fresh)
    assert fresh.post("/v1/cache/flush").status_code == 200
    growth.look()
    counters = [name for name in growth.now if re.search("_(total|sum|count|bucket)", name)]
    assert all(growth[name] >= 0 for name in counters) and growth.now["hit_tokens_total"] > 0


def test_what_has_vllm_s_name_is_what_has_ours(fresh: LiveServer):
    fresh.post(CHAT, {"messages": ask("How old is Nora Holm?")})
    shown = families(fresh)
    for theirs, ours in VLLM.items():
        assert shown[theirs].type == shown[ours].type
        assert {sample.labels["model_name"] for sample in shown[theirs].samples} == {"the model"}
        values, same = ([s.value for s in shown[name].samples] for name in (theirs, ours))
        assert values == same
    reasons = {s.labels["finished_reason"] for s in shown["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


def test_the_documentation_names_what_there_is(fresh: LiveServer):
    """The table of server.md all of it, and the dashboard nothing else."""
    fresh.post(COMPLETIONS, {"prompt": LINE, "max_tokens": 1})
    page = (ROOT / "docs" / "server.md").read_text()
    table = page.split("## Metrics")[1].split("## Traces")[0]
    ours, theirs = set(), set()
    for mine, other in re.findall(r"^\| (`.*?) \|(.*?)\|", table, re.MULTILINE):
        names = re.findall(r"`(\w+)", mine)
        ours |= {f"radixcache_{name}".removesuffix("_total") for name in names}
        same = names if other.strip() == "the same" else re.findall(r"`(\w+)", other)
        theirs |= {f"vllm:{name}".removesuffix("_total") for name in same}
    shown = families(fresh)
    assert ours == {name for name in shown if re.match("radixcache_(?!.*_created$)", name)}
    assert theirs == set(VLLM)
    asked = re.findall(r"radixcache_\w+", (ROOT / "docs" / "deploy" / "grafana.json").read_text())
    assert {*asked} <= {sample.name for family in shown.values() for sample in family.samples}


def test_a_server_tells_of_its_pages_on_disk(tmp_path: Path):
    for _ in range(2):
        llm = LLM(kv_dir=tmp_path, kv_dir_size="30MB", kv_cache_memory_bytes="10MB")
        with llm, live(llm) as server:
            body = server.post(COMPLETIONS, {"prompt": LINE * 9, "max_tokens": 1}).json()
            found = samples(server)
            loaded = body["radixcache"]["loaded_tokens"]
            assert found["loaded_tokens_total"] == loaded and not found["disk_failed_pages_total"]
            used, free = (found[f"disk_pages{{{state}}}"] for state in ("used", "free"))
            assert used + free == llm.offload.tiers[0].num_slots  # type: ignore[union-attr]
            (tier,) = server.get("/v1/cache").json()["stats"]["tiers"]
            assert tier == {
                "medium": "disk",
                "pages": used + free,
                "used_pages": used,
                "loaded_pages": found["disk_loaded_pages_total"],
                "stored_pages": found["disk_stored_pages_total"],
            }
    assert loaded and used, "the second one has found them"


def test_a_hybrid_tells_what_its_states_are_for(tmp_path: Path):
    with LLM(tiny_model("lfm2", tmp_path), kv_cache_memory_bytes="1MB") as llm, live(llm) as server:
        planner = llm.engine.scheduler.planner
        assert isinstance(planner, StatePlanner)
        server.post(COMPLETIONS, {"prompt": LINE, "max_tokens": 2, "ignore_eos": True})
        server.assert_idle()
        found = samples(server)
        # At the end of the prompt, and of what was computed of the answer.
        counts = {"running": 0, "kept": 2, "free": planner.index.num_slots - 2}
        assert server.get("/v1/cache").json()["stats"]["recurrent_states"] == counts
        for state, count in counts.items():
            assert found[f"recurrent_states{{{state}}}"] == count


def test_windows_that_are_kept_apart_are_told_by_what_they_are_for(tmp_path: Path):
    folder = tiny_model("gemma3_text", tmp_path)
    with LLM(folder, kv_cache_memory_bytes="1MB") as llm, live(llm) as server:
        response = server.post(COMPLETIONS, {"prompt": 4 * LINE, "max_tokens": 2})
        assert response.status_code == 200, response.text
        server.assert_idle()
        found, told = samples(server), server.get("/v1/cache").json()["stats"]["window_pages"]
        assert told["running"] == 0 < min(told["kept"], told["left"], told["free"])
        assert told == {state: found[f"window_pages{{{state}}}"] for state in told}
