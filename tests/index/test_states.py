"""Slots of recurrent states, against a list of what was written and kept."""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from radixcache import InvalidRequest, OutOfPages
from radixcache.states.recurrent import StateIndex
from radixcache.states.saved import SavedState
from radixcache.tokens import Tokens
from tests.helpers.cover import seeds


def text(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


@seeds(1, 30)
def test_random_calls_agree_with_a_plain_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcache.states.saved.STRIDE", 3)
    rng = random.Random(seed)
    index = StateIndex(rng.randint(2, 9))
    kept: dict[tuple[object, bytes], int] = {}
    written: dict[tuple[object, bytes], int] = {}
    own: list[int] = []
    texts = [text(*(rng.randrange(2) for _ in range(rng.randint(1, 9)))) for _ in range(12)]
    for _ in range(1500):
        tokens, namespace = rng.choice(texts), rng.choice([None, "a"])
        key = namespace, tokens.tobytes()
        call = rng.choice(["take", "write", "give", "drop", "find", "commit", "recover"])
        if call == "take":
            with suppress(OutOfPages):
                own.append(index.take())
        elif call == "write":
            saved = index.write(tokens, namespace, "prompt")
            if key in kept or key in written:
                assert saved is None
            elif saved is not None:
                written[key] = saved.held
        elif call == "give" and own:
            slot = own.pop(rng.randrange(len(own)))
            index.keep(slot, tokens, namespace, [c.key for c in index._kept.values()][:1])
            if key not in written:
                kept.setdefault(key, slot)
        elif call == "drop" and own:
            index.drop(own.pop())
        elif call == "find":
            limit = rng.randint(0, len(tokens))
            ends = [n for n in range(limit, 0, -1) if (namespace, tokens[:n].tobytes()) in kept]
            depth = index.depth(tokens, namespace, limit)
            assert depth == max(ends, default=0)
            found = index.find(tokens, namespace, limit)
            assert (found is None) == (not ends)
            if found is not None:
                assert found.held == kept[namespace, tokens[: ends[0]].tobytes()]
        elif call == "commit":
            index.commit()
            kept |= written
            written.clear()
        elif call == "recover":
            index.recover()
            written.clear()
            own.clear()
        # What was evicted is a saved state; nothing else goes by itself.
        there = {saved.held for saved in index._kept.values()}
        kept = {key: slot for key, slot in kept.items() if slot in there}
        assert there == {*kept.values()}
        assert len(there) == len(kept) == index.counts["kept"]
        index.check(own)


def saved_states(index: StateIndex, *texts: Tokens, kind: str = "prompt") -> list[SavedState]:
    """A saved state after each of these."""
    made = [index.write(tokens, None, kind) for tokens in texts]  # type: ignore[arg-type]
    index.commit()
    return [saved for saved in made if saved is not None]


def test_what_the_step_reads_is_not_evicted() -> None:
    index = StateIndex(2)
    first, second = saved_states(index, text(1), text(2))
    assert index.find(text(1), None, 1) is first
    assert index.take() == second.held
    with pytest.raises(OutOfPages):
        index.take()
    assert index.write(text(3), None, "prompt") is None
    index.release(first)
    assert index.take() == first.held


def test_what_the_step_reads_is_not_evicted_though_superseded() -> None:
    index = StateIndex(3)
    (turn,) = saved_states(index, text(1))
    slot = index.take()
    assert index.find(text(1), None, 1) is turn
    index.keep(slot, text(1, 2), None, [turn.key])
    assert {index.take(), index.take()} == {0, 1, 2} - {turn.held}


def test_a_conversation_that_has_gone_on_gives_up_what_it_went_on_from() -> None:
    index = StateIndex(3)
    old, turn = saved_states(index, text(9), text(1))
    assert index.find(text(1), None, 1) is turn
    slot = index.take()
    index.commit()
    index.keep(slot, text(1, 2, 3), None, [turn.key])
    assert index.take() == turn.held  # although `old` was used before it
    assert index.depth(text(9), None, 1) == 1
    assert index.depth(text(1, 2, 3), None, 3) == 3
    assert old.hits == 0


def test_where_ends_do_not_pay_the_end_goes_and_the_prompt_stays() -> None:
    index = StateIndex(3)
    (prompt, again) = saved_states(index, text(1), text(7))
    assert index.find(text(7), None, 1) is again
    index.commit()
    slot = index.take()
    index.keep(slot, text(1, 2), None, [prompt.key])
    assert index.take() == slot
    assert index.depth(text(1), None, 1) == 1


def test_one_slot_is_too_few() -> None:
    with pytest.raises(InvalidRequest, match="one sequence takes two"):
        StateIndex(1)


def test_a_pinned_state_goes_last() -> None:
    index = StateIndex(3)
    index.pin(text(1), None)
    saved_states(index, text(1), text(2), text(3))
    for n in range(4, 9):
        saved_states(index, text(n))
    slot = index.take()
    saved_states(index, text(9), text(10))
    assert index.depth(text(1), None, 1) == 1
    index.drop(slot)
    taken = {index.take(), index.take()}
    assert index.depth(text(1), None, 1) == 1
    assert {*taken, index.take()} == {0, 1, 2}  # a sequence always gets one
    assert index.depth(text(1), None, 1) == 0
    index.unpin(text(1), None)
    index.check([0, 1, 2])


def test_a_look_up_tries_few_of_many_saved_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that agree up to a stride before, and not every length there is."""

    class Counted(OrderedDict[Any, Any]):
        def get(self, *args: Any) -> Any:
            tried.append(args[0])
            return super().get(*args)

    tried: list[Any] = []
    monkeypatch.setattr("radixcache.states.saved.STRIDE", 8)
    index = StateIndex(1000)
    index._kept = Counted()
    texts = [text(*[1] * 12, *[n] * (n + 8)) for n in range(2, 300)]
    saved_states(index, *texts)
    for tokens in texts:
        tried.clear()
        assert index.depth(tokens, None, len(tokens)) == len(tokens)
        assert len(tried) <= 3


def test_a_kind_that_was_hardly_ever_hit_is_kept_again_once_it_pays() -> None:
    """What nobody came back for long ago counts less and less, and what is made again counts."""
    index, hits = StateIndex(40), 0

    def come_back(tokens: Tokens, kind: str) -> bool:
        if found := index.find(tokens, None, 2) is not None:
            index.commit()
        else:
            saved_states(index, tokens, kind=kind)
        return found

    for n in range(1000):
        saved_states(index, text(0, n), kind="branch")
    for n in range(300):
        come_back(text(1, n % 8), "prompt")
        hits += come_back(text(2, n % 8), "branch")
        saved_states(index, text(3, n))
    assert hits > 200


def spare(index: StateIndex, tokens: Tokens, kind: str = "trail", before_end: int = 0) -> bool:
    """Whether a spare state is kept."""
    made = index.write(tokens, None, kind, before_end)  # type: ignore[arg-type]
    index.commit()
    return made is not None


@pytest.mark.parametrize("kind", ["trail", "near"])
def test_spare_states_use_only_slots_that_nobody_else_wants(kind: str) -> None:
    index = StateIndex(5)
    assert [spare(index, text(n), kind) for n in range(4)] == [True] * 4
    assert index.counts == {"running": 0, "kept": 3 + 1, "free": 1}
    own = [index.take() for _ in range(3)]  # takes the free one, then spare ones
    assert index.counts["kept"] == 2
    assert not spare(index, text(9), kind), "two slots are left for others"
    (prompt,) = saved_states(index, text(7))
    assert prompt.kind == "prompt" and index.counts["kept"] == 2
    for slot in own:
        index.drop(slot)


def test_of_spare_states_the_farthest_from_its_prompts_end_goes_first() -> None:
    index = StateIndex(4)
    for n, before_end in enumerate((50, 900, 10, 400)):
        assert spare(index, text(n), before_end=before_end)
    assert index.counts["free"] == 0
    index.take()
    assert [index.depth(text(n), None, 1) for n in range(4)] == [1, 0, 1, 1]
    assert spare(index, text(5), before_end=7)
    assert [index.depth(text(n), None, 1) for n in range(4)] == [1, 0, 1, 0]


def test_a_spare_state_that_is_wanted_for_a_better_reason_is_no_longer_spare() -> None:
    index = StateIndex(6)
    assert spare(index, text(1)) and not spare(index, text(1), "prompt")
    assert [saved.kind for saved in index._kept.values()] == ["prompt"]
    assert not spare(index, text(1), "near")
    assert [saved.kind for saved in index._kept.values()] == ["prompt"]
