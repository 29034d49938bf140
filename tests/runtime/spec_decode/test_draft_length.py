"""Drafts are as long as they pay, by chances and step times that are learnt."""

from __future__ import annotations

import random

import pytest

from radixcache.runtime.spec_decode.draft_length import CAUTION, DraftLength

SEED = 20_261_125


@pytest.mark.parametrize("fixed", [0.5, 20.0])
@pytest.mark.parametrize(("jump", "row"), [(0.0, 0.01), (1.0, 0.1), (4.0, 1.0)])
def test_the_cost_of_a_row_is_that_of_the_steps(fixed: float, jump: float, row: float) -> None:
    rng, length = random.Random(SEED), DraftLength()
    for _ in range(400):
        rows = rng.choice([1, 2, 3, 9, 17])
        time = fixed + jump * (rows > 1) + row * rows
        length.note_step(rows, 1e-3 * time * rng.uniform(0.98, 1.02))
    for sequences in (1, 4, 64):
        token = (fixed + jump * (sequences > 1)) / sequences + row
        cost, besides = length.costs(sequences)
        assert cost == pytest.approx(CAUTION * row / token, rel=0.3, abs=0.01)
        assert besides == pytest.approx(
            CAUTION * jump / token if sequences == 1 else 0, rel=0.3, abs=0.05
        )


def test_steps_of_one_kind_leave_the_guess_and_one_that_was_held_up_does_not_count() -> None:
    length = DraftLength()
    for _ in range(100):
        length.note_step(1, 0.01)
    before = length.costs(1)
    length.note_step(1, 5.0)
    assert length.step_seconds == pytest.approx(0.01) and length.costs(1) == before
    assert 0.01 < before[0] < 0.1 and before[1] < 0.1


def test_chances_become_the_shares_that_were_seen() -> None:
    rng, length = random.Random(SEED), DraftLength()
    for _ in range(3000):  # behind three tokens half are right, and then the next with 0.9
        accepted = 0
        while accepted < 8 and rng.random() < (0.9 if accepted else 0.5):
            accepted += 1
        length.learn(("suffix", False), 3, accepted, accepted < 8)
    chances = length.chances(("suffix", False), 3, 8, 0.0)
    assert chances == pytest.approx([0.5 * 0.9**place for place in range(8)], abs=0.1)
    assert length.chances(("suffix", False), 3, 8, 0.3) == [c for c in chances if c > 0.3]
    untouched = DraftLength()
    assert length.chances(("suffix", False), 40, 4, 0) == untouched.chances(
        ("suffix", False), 40, 4, 0
    )
    assert length.chances(("suffix", True), 3, 4, 0) == untouched.chances(("suffix", True), 3, 4, 0)
    assert length.chances(("tree", False), 3, 4, 0) == untouched.chances(("tree", False), 3, 4, 0)


def test_what_nobody_looked_at_is_no_observation() -> None:
    length, untouched = DraftLength(), DraftLength()
    length.learn(("tree", True), 5, 0, refused=False)
    assert length.chances(("tree", True), 5, 3, 0) == untouched.chances(("tree", True), 5, 3, 0)
