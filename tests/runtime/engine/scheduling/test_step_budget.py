"""How many tokens a step may take, by what steps before have taken."""

from __future__ import annotations

import pytest

from radixcache.runtime.engine.scheduling.step_budget import STEP_SECONDS, StepBudget


def seconds_of(position: int, tokens: int) -> float:
    """A model whose attention costs as much as all else behind 4,000 tokens."""
    return 0.0005 * sum(1 + at / 4000 for at in range(position, position + tokens))


def prefill(budget: StepBudget, length: int, *, start: int = 0, alone: bool = False) -> list[float]:
    """The seconds of all steps of a prompt."""
    steps = []
    while start < length:
        budget.begin(2048, alone=alone)
        count = min(length - start, budget.room(start))
        budget.spend(count, start)
        steps.append(seconds_of(start, count))
        budget.note([(start, count)], steps[-1])
        start += count
    return steps


def test_no_step_takes_long_beside_others_however_deep_a_prompt_is() -> None:
    budget = StepBudget(STEP_SECONDS)
    prefill(budget, 600)
    for prompt in (20_000, 300, 20_000):
        steps = prefill(budget, prompt)
        assert max(steps) < 1.4 * STEP_SECONDS
        assert sum(steps) > 0.7 * STEP_SECONDS * (len(steps) - 1), "nor are they short"
    assert max(prefill(budget, 20_000, start=19_000)) < 1.4 * STEP_SECONDS
    assert max(prefill(budget, 4_000, alone=True)) > 1.6 * STEP_SECONDS


def test_depths_that_were_not_measured_are_thought_to_be_slow() -> None:
    budget = StepBudget(STEP_SECONDS)
    prefill(budget, 900)
    assert prefill(budget, 20_000, start=16_000)[0] < 2 * STEP_SECONDS


def test_before_anything_was_measured_a_step_is_short() -> None:
    budget = StepBudget(STEP_SECONDS)
    for seconds in (5.0, 0.001):  # the first one loads libraries
        budget.begin(2048, alone=True)
        assert budget.room(0) == 256
        budget.note([(0, 256)], seconds)
    budget.begin(2048, alone=False)
    assert budget.room(0) == 2048


@pytest.mark.parametrize("prompts", [1, 2, 5])
@pytest.mark.parametrize("position", [0, 5000])
def test_prompts_that_are_first_measured_together_count_as_one_would(
    prompts: int, position: int
) -> None:
    budget = StepBudget(STEP_SECONDS)
    for _ in range(3):
        budget.note([(position, 200)] * prompts, 0.1 * prompts)
    budget.begin(2048, alone=False)
    assert budget.room(position) == pytest.approx(500, abs=2)


def test_one_step_that_was_held_up_does_not_make_the_next_ones_short() -> None:
    budget = StepBudget(STEP_SECONDS)
    for seconds in (0.1, 0.1, 0.1, 9.0):
        budget.note([(0, 500)], seconds)
    budget.begin(2048, alone=False)
    assert budget.room(0) >= 600
    for _ in range(3):
        budget.note([(0, 500)], 0.1)
    budget.begin(2048, alone=False)
    assert budget.room(0) > 1000


@pytest.mark.parametrize(("alone", "fewest"), [(True, 128), (False, 64)])
def test_a_slow_model_computes_enough_tokens_at_once(alone: bool, fewest: int) -> None:
    budget = StepBudget(STEP_SECONDS)
    for _ in range(3):
        budget.note([(0, 64)], 20.0)
    budget.begin(2048, alone=alone)
    assert budget.room(0) == fewest
    assert budget.room(0, parts=4) == fewest // 4
    budget.spend(fewest, 0)
    assert budget.room(0) == 0
    budget.begin(10, alone=alone)
    assert budget.room(0) == 10


def test_without_an_aim_time_does_not_matter() -> None:
    budget = StepBudget()
    budget.note([(0, 64)], 20.0)
    budget.note([(0, 64)], 20.0)
    budget.begin(2048, alone=False)
    assert budget.room(0) == 2048 and budget.room(0, parts=3) == 683
    budget.spend(2000, 0)
    budget.spend(20)
    assert budget.room(50_000) == 28
