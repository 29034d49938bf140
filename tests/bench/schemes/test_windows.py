"""Rules for windows at equal bytes, replayed over the real scheduler."""

from __future__ import annotations

import pytest

from radixcache.bench.replay.play import Arrivals, IndexEngine, StepClock, play
from radixcache.bench.schemes.named import Scheme, windowed_schemes
from radixcache.bench.schemes.windows import ALL_KEPT, MODELS, WINDOW_RULES, WindowedModel
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.workload import Workload
from radixcache.runtime.engine.scheduling.scheduler import Scheduler

SMALL = WindowedModel(16, 80, 64, 0)
CHAT = "chat:conversations=8,turns=6,system=90,user=20,answer=40"


def computed(workload: Workload, rule: str, memory: int) -> int:
    """Prompt tokens that the rule computes, checked after each step."""
    scheme = Scheme("radix", 4, windows=rule, windowed=SMALL)
    cache, planner = scheme.make_planned(memory, 0, workload)
    scheduler = Scheduler(cache, 64, 8, "fcfs", planner)

    def check() -> None:
        cache.check()
        planner.check(scheduler.running)

    arrivals = Arrivals(concurrency=2)
    outcomes = play(workload, arrivals, IndexEngine(scheduler), StepClock(1.0), check)
    assert not any(outcome.error for outcome in outcomes)
    return sum(outcome.computed_tokens for outcome in outcomes)


@pytest.fixture(scope="module")
def chat() -> Workload:
    return generate(CHAT, 0, 1000)


def test_at_equal_bytes_one_window_leaves_room_for_more_conversations(chat: Workload) -> None:
    found = {rule: computed(chat, rule, 1000) for rule in WINDOW_RULES}
    print(found)
    assert found["ours"] <= found["ours-untold"] < found["vllm"] < found[ALL_KEPT]


def test_with_memory_for_all_only_what_lacks_a_checkpoint_is_computed_again(chat: Workload) -> None:
    found = {rule: computed(chat, rule, 1 << 16) for rule in WINDOW_RULES}
    system = 90
    assert found["ours"] <= found[ALL_KEPT] + system
    assert found["ours-untold"] <= found[ALL_KEPT] + 8 * system


def test_a_model_s_schemes_have_the_bytes_of_its_layers() -> None:
    for name, model in MODELS.items():
        assert [scheme.name for scheme in windowed_schemes(name)] == [*WINDOW_RULES]
        count, size = model.pages(10_000, 16)
        page_bytes = max(16 * model.full, size * model.windowed)
        assert count == 10_000 * (model.full + model.windowed) // page_bytes
