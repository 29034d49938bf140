"""The picture of a cache shows what `match` finds, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from radixcache import HashBlockCache, PagePool, RadixCache
from radixcache.snapshot import MAX_DEPTH, CachedNode, Look
from tests.index.drive import put, snapshot

SEED = 20_261_120
MODES = {"radix": RadixCache, "hash-block": HashBlockCache}


def paths(node: CachedNode, above: tuple[CachedNode, ...] = ()) -> Iterator[tuple[CachedNode, ...]]:
    """Root to node, for every node but the root."""
    for child in node.children:
        yield (*above, child)
        yield from paths(child, (*above, child))


def spelled(path: tuple[CachedNode, ...]) -> list[int]:
    """The tokens of a path; each node is short enough to be shown in full."""
    assert all(node.num_tokens == len(node.tokens) for node in path)
    return [token for node in path for token in node.tokens]


@pytest.mark.parametrize("mode", MODES)
def test_every_path_of_the_picture_is_cached_and_everything_cached_is_in_it(mode: str) -> None:
    rng = random.Random(SEED)
    cache = MODES[mode](PagePool(400, 2))
    prompts: list[list[int]] = []
    for _ in range(60):
        stem = rng.choice(prompts)[: rng.randrange(12)] if prompts and rng.random() < 0.7 else []
        prompt = stem + [rng.randrange(5) for _ in range(rng.randrange(2, 10))]
        prompts.append(prompt)
        put(cache, prompt, rng.choice([None, "salt"]))
        cache.check()
        drawn = snapshot(cache)
        shown: dict[str | None, set[tuple[int, ...]]] = {None: set(), "salt": set()}
        ends: list[tuple[int, ...]] = []
        for namespace, root in drawn.items():
            assert namespace is None or namespace == "salt"
            ids = [path[-1].id for path in paths(root)]
            assert len(ids) == len(set(ids)) and root.more is None
            for path in paths(root):
                tokens = spelled(path)
                ends.append(tuple(tokens))
                assert path[-1].start + path[-1].num_tokens == len(tokens)
                assert cache.match([*tokens, 99], namespace) == len(tokens), f"seed {SEED}"
                shown[namespace].update(tuple(tokens[:n]) for n in range(1, len(tokens) + 1))
        for prompt in prompts:
            for namespace in shown:
                found = cache.match([*prompt, 99], namespace)
                assert not found or tuple(prompt[:found]) in shown[namespace], f"seed {SEED}"
        whole: list[tuple[int, ...]] = []  # each node is spelled behind its parent
        for _, parent, more in cache.outline().spell():
            whole.append((*(whole[parent] if parent >= 0 else ()), *more.tolist()))
        assert sorted(whole) == sorted(ends), f"seed {SEED}"


@pytest.mark.parametrize("mode", MODES)
def test_age_leases_and_pins_reach_up_to_what_they_hold(mode: str) -> None:
    cache = MODES[mode](PagePool(100, 2))
    stem = [1, 2, 3, 4]
    for tail in ([5, 5], [6, 6], [7, 7]):
        put(cache, stem + tail)
    cache.pin("six", [*stem, 6, 6])
    lease = cache.acquire([*stem, 5, 5, 9])
    (shared,) = snapshot(cache)[None].children
    five, six, seven = sorted(shared.children, key=lambda node: node.tokens)
    assert (shared.leases, five.leases, six.leases, seven.leases) == (1, 1, 0, 0)
    assert (shared.pinned, five.pinned, six.pinned) == (True, False, True)
    assert (shared.pins, six.pins) == ([], ["six"])
    assert shared.age == five.age == 0
    cache.release(lease)
    (shared,) = snapshot(cache)[None].children
    five, six, seven = sorted(shared.children, key=lambda node: node.tokens)
    assert shared.leases == 0 and five.age > seven.age >= shared.age
    cache.check()


def rows_of(node: CachedNode) -> int:
    """Leaves that are drawn, and folds."""
    return sum(map(rows_of, node.children)) + bool(node.more) or 1


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_any_size_accounts_for_every_node(mode: str) -> None:
    """What is drawn fits, is the part used last, and with what is folded it is the whole cache."""
    rng = random.Random(SEED)
    cache = MODES[mode](PagePool(3000, 1))
    prompts: list[list[int]] = [[0]]
    for _ in range(150):
        stem = rng.choice(prompts)
        prompts.append(stem[: rng.randrange(len(stem) + 1)] + rng.choices(range(9), k=5))
        put(cache, prompts[-1], rng.choice([None, "salt"]))
    cache.check()
    outline = cache.outline()
    whole = {path[-1].id: path for root in snapshot(cache).values() for path in paths(root)}
    sizes = {name: path[-1].num_tokens for name, path in whole.items()}
    for name, path in rng.sample([*whole.items()], 40):
        look = Look(rng.randrange(1, 40), rng.randrange(1, 8), rng.choice([None, name]))
        picture = outline.draw(look)
        assert picture is not None and picture.num_nodes == len(whole), f"seed {SEED}: {look}"
        drawn = [*picture.roots.values()]
        nodes = [path[-1] for root in drawn for path in paths(root)]
        folds = [node.more for node in [*drawn, *nodes] if node.more]
        folds += [picture.more] if picture.more else []
        assert all(len(path) <= look.levels for root in drawn for path in paths(root)), look
        assert sum(map(rows_of, drawn)) + bool(picture.more) <= max(look.rows, 2), look
        inside = [
            other for other, path in whole.items()
            if look.under is None or look.under in [node.id for node in path]
        ]  # fmt: skip
        assert len(nodes) + sum(fold.nodes for fold in folds) == len(inside), look
        tokens = sum(node.num_tokens for node in nodes) + sum(fold.tokens for fold in folds)
        assert tokens == sum(sizes[other] for other in inside), look
        for node in [*drawn, *nodes]:
            if node.more:
                assert all(child.age <= node.more.age for child in node.children), look
        if look.under:
            assert [node.id for node in picture.above] == [node.id for node in path[:-1]]
            (root,) = drawn
            assert [node.id for node in root.children] == [name]
        revealed = outline.draw(Look(rows=2, reveal=name))
        assert revealed is not None and name in [
            path[-1].id for root in revealed.roots.values() for path in paths(root)
        ], f"seed {SEED}: {name}"
    assert outline.draw(Look(under="nowhere")) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_tree_is_cut_where_recursion_would_hurt(mode: str) -> None:
    cache = MODES[mode](PagePool(2000, 1))
    path: list[int] = []
    for depth in range(MAX_DEPTH + 20):
        path.append(0)
        put(cache, [*path, 1 + depth])
    depths = [len(path) for path in paths(snapshot(cache)[None])]
    assert max(depths) == MAX_DEPTH
