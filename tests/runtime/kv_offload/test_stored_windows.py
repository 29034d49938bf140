"""Windows in tiers: what the pool evicts goes on from there, whole or not at all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from radixcache import SamplingParams
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.model.kv_pool import WindowLayout
from radixcache.states.stored_windows import StoredWindows
from radixcache.tiers.index import LowerTier
from tests.helpers.cover import seeds
from tests.helpers.engines import only_by_saved_states
from tests.helpers.hash_model import VOCAB, greedy
from tests.helpers.tiers import Asker, Disk, MemoryStore, draw_windows

TEXT = [(7 * n) % (VOCAB - 1) for n in range(60)]
LAYOUT = WindowLayout(24, 3, (True, False))


def ask(disk: Disk, prompt: list[int], namespace: str | None = None) -> int:
    """The cached tokens of a prompt whose answer is right."""
    params = SamplingParams(temperature=0, max_tokens=4)
    request = disk.engine.add_request(prompt, params, namespace=namespace)
    while not request.finished:
        disk.engine.step()
        disk.engine.check()
    Asker.verify(request)
    return request.sequences[0].cached_tokens


def stored(disk: Disk) -> StoredWindows:
    assert disk.engine.cache.windows is not None and disk.engine.cache.windows.stored is not None
    return disk.engine.cache.windows.stored


@pytest.mark.parametrize("again", [33, 0])
def test_kv_is_loaded_alone_where_windows_can_be_computed_again(tmp_path: Path, again: int) -> None:
    disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    if not again:
        only_by_saved_states(disk.engine)
    ask(disk, TEXT)
    disk.evict_all()
    stored(disk).clear()
    told = [(m.reason, m.start, m.end) for m in Explainer(disk.engine.cache).explain(TEXT, 0)]
    assert told == [("on_disk", 0, 33)] * bool(again) + [("no_saved_state", again, 59)]
    assert ask(disk, TEXT) == again, "of which it was told that they were loaded"
    assert disk.engine.cache.stats.loaded_tokens == (59 if again else 0)
    assert not disk.windows_loaded
    disk.close()


@pytest.mark.parametrize("restart", [False, True])
def test_a_conversation_goes_on_from_the_window_on_disk(tmp_path: Path, restart: bool) -> None:
    disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    assert ask(disk, TEXT) == 0
    done = [*TEXT, *greedy(TEXT, 4)]
    if restart:
        disk.close()
        disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    else:
        disk.evict_all()
    explainer = Explainer(disk.engine.cache)
    (below, new) = explainer.explain([*done, 5, 6], 0)
    assert (below.reason, below.start, below.end) == ("on_disk", 0, 63)
    assert (new.reason, new.start, new.end) == ("first_seen", 63, 65)
    assert ask(disk, [*done, 5, 6]) == 63, "all but the last token, which has no KV"
    assert disk.windows_loaded == 1
    (again,) = explainer.explain([*TEXT[:40], 1, 2], 0, kv=40)[:1]
    assert (again.reason, again.end) == ("no_saved_state", 40)
    disk.close()


@seeds(20_261_198, 12)
def test_what_is_explained_of_tiers_is_what_a_request_finds(tmp_path: Path, seed: int) -> None:
    """Of a text some turns may be in memory, others on disk, and a window with the last of them."""
    rng = Random(seed)
    asker, windows, lengths = Asker(rng), draw_windows(rng), Counter[str]()
    disk = Disk(tmp_path, rng.choice([3, 4, 8]), 900, above=rng.choice([0, 9, 40]), windows=windows)
    if windows is not None and rng.random() < 0.5:
        only_by_saved_states(disk.engine)
    explainer, cache = Explainer(disk.engine.cache), disk.engine.cache
    for _ in range(50):
        prompt, params, namespace = asker.ask([])
        hit = at = disk.engine.match(prompt, namespace)
        for miss in explainer.explain(prompt, hit, namespace, cache.match(prompt, namespace)):
            assert miss.start == at < miss.end
            at = miss.end
            hit = at if miss.reason in ("on_host", "on_disk") else hit
            lengths[miss.reason] += len(miss)
        assert at == max(hit, len(prompt) - 1)
        request = disk.engine.add_request(prompt, params, namespace=namespace)
        while not request.finished:
            disk.engine.step()
            disk.store.flush()
        asker.verify(request)
        assert request.sequences[0].cached_tokens == hit
        if rng.random() < 0.5:
            cache.evict(rng.randrange(900))
            disk.store.flush()
    print(f"seed {seed}: {dict(lengths)}")
    disk.close()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
def test_windows_of_as_many_other_tokens_share_no_page(tmp_path: Path, page_size: int) -> None:
    """Pages so small that the first cannot name its text are not kept."""
    disk = Disk(tmp_path, page_size, 900, 900, windows=WindowLayout(24, 1, (True, False)))
    only_by_saved_states(disk.engine)
    texts = [[number, *TEXT, number] for number in range(5)]
    for text in texts:
        ask(disk, text)
        disk.evict_all()
    cached = [ask(disk, [*text, *greedy(text, 4), 5]) for text in texts]
    assert cached == [65 if page_size >= 4 else 0] * len(texts)
    disk.close()


def test_salted_windows_stay_out_of_tiers(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    ask(disk, TEXT, "salt")
    disk.evict_all()
    assert not len(disk.tier) and not stored(disk).counts["kept"]
    disk.close()


def test_a_window_is_evicted_whole_and_goes_down_whole(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    ask(disk, TEXT)
    pool, index = disk.engine.kv_pool, disk.engine.cache.windows
    assert index is not None
    saved = index.find(np.array(TEXT, np.int32), None, 60)
    assert saved is not None
    pages, size = saved.held.pages, disk.tier.page_size
    below = LowerTier(40, size, MemoryStore(pool))
    upper = LowerTier(len(pages) + 2, size, MemoryStore(pool), below=below)
    windows, tokens = StoredWindows(upper, index.span), np.array(TEXT, np.int32)
    windows.demote(saved, pages)
    found = windows.find_stored(tokens, 60, 0)
    assert found is not None and found.tier is upper and len(found.pages) == len(pages)
    assert (found.length, found.kind) == (saved.key.length, saved.kind)
    assert not upper.num_tokens, "a name is no text"
    below.store.save = lambda pages, stored: stored.finish("stored")  # type: ignore[method-assign]
    upper.demote(np.arange(3 * size, dtype=np.int32), 0, pages[:3])
    assert len(upper) == 3 and len(below) == len(pages), "for want of one slot"
    again = StoredWindows(upper, index.span)
    for one in (windows, again):
        found = one.find_stored(tokens, 60, 0)
        assert found is not None and found.tier is below and len(found.pages) == len(pages)
        assert one.find_stored(tokens, 60, found.length) is None
        assert one.find_stored(tokens, found.length - 1, 0) is None
        one.check()
    (first, *_) = found.pages
    first.state = "writing"
    assert windows.find_stored(tokens, 60, 0) is None and windows.counts["kept"] == 1
    first.state = "stored"
    below.demote(np.arange(100, 100 + 39 * size, dtype=np.int32), 0, np.arange(39, dtype=np.int32))
    assert windows.find_stored(tokens, 60, 0) is None
    assert not windows.counts["kept"], "it is looked for once"
    windows.check()
    assert len(below) == 39
    index.release(saved)
    disk.close()


def test_a_name_that_was_changed_on_disk_is_left_out(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_pages=90, windows=LAYOUT)
    ask(disk, TEXT)
    disk.evict_all()
    kept, tier = stored(disk).counts["kept"], disk.tier
    names = [page for page in tier.in_order() if page.is_of_window]
    first = next(page for page in names if page.tokens.item(0) < -1)
    assert kept == stored(disk).counts["kept"] > 0
    first.tokens = np.full_like(first.tokens, -(2**24))
    again = StoredWindows(tier, lambda length: (0, length))
    assert again.counts["kept"] <= kept
    again.check()
    disk.store.close([])
