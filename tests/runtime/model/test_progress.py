"""Who watches hears how far a model is loaded."""

from __future__ import annotations

from radixcache import LLM
from radixcache.runtime.model.progress import report, track, watch

Heard = list[tuple[str, float | None]]


def test_the_share_of_the_bundled_model_grows_from_0_to_1() -> None:
    heard: Heard = []
    with watch(lambda stage, share: heard.append((stage, share))):
        LLM(kv_cache_memory_bytes="16MiB").close()
    shares = [share for _, share in heard if share is not None]
    assert len(shares) == len(heard) and shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    reading = [share for stage, share in heard if stage == "reading weights" and share is not None]
    assert reading[0] == 0 and 0.5 < reading[-1] < 1 and len({*reading}) == len(reading) > 3


def test_all_who_watch_hear_and_nobody_after_the_end() -> None:
    outer: Heard = []
    inner: Heard = []
    with watch(lambda *said: outer.append(said)):
        with watch(lambda *said: inner.append(said)):
            assert [*track("ab", "both")] == ["a", "b"]
        report("outer alone")
    report("nobody")
    assert inner == [("both", 0), ("both", 1 / 3), ("both", 2 / 3)]
    assert outer == [*inner, ("outer alone", None)]
