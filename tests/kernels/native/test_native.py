"""The native kernels: right against float64, the same to the bit for a row in any company, refusing
what would read wild memory, and absent without a word where nothing compiles them."""

from __future__ import annotations

import os
import pwd
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import AttentionBackend, LayerInputs, LayerKind, LayerPages
from radixcache.kernels.native import build as native_build
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.linear import PackedLinear
from tests.helpers.forks import Forked
from tests.helpers.native import needs_kernels
from tests.kernels.native.panels import F32, bits
from tests.kernels.reference import Step, error, inputs_of, make_batch, make_step, random_step, run


def randn(seed: int, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# A row's bits.


def rows_one_by_one(step: Step, backend: AttentionBackend, **options) -> torch.Tensor:
    """What each new token gives as a decode of its own, with nobody beside it."""
    copied = replace(step, k_pages=step.k_pages.clone(), v_pages=step.v_pages.clone())
    inputs, outs, size = inputs_of(copied, **options), [], step.batch.page_size
    rows = iter(range(len(step.query)))
    for table, queries, length in zip(step.tables, step.query_lens, step.kv_lens, strict=True):
        for end in range(length - queries + 1, length + 1):
            row = next(rows)
            plan = backend.plan(make_batch([table[: -(-end // size)]], [1], [end], size))
            query, key, value = (t[row : row + 1] for t in (step.query, step.key, step.value))
            outs.append(plan.run(inputs._replace(query=query, key=key, value=value)))
    return torch.cat(outs)


SEEDS = [*range(20), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(20, 200))]


@needs_kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(seed: int) -> None:
    step, options = random_step(seed)
    alone = rows_one_by_one(step, NativeAttention(), **options)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together = run(step, NativeAttention(), **options)
        np.testing.assert_array_equal(bits(together), bits(alone), f"{threads} threads")


@needs_kernels
@pytest.mark.parametrize("heads", [(7, 1), (4, 2)])
def test_threads_beyond_the_kv_heads_take_some_of_their_query_heads(heads) -> None:
    step = make_step(3, [(1, 90)], heads=heads)
    torch.set_num_threads(1)
    expected = run(step, NativeAttention(), scale=0.3)
    assert error(step, expected, scale=0.3) < 2e-5
    for threads in (2, 3, 5, 16):
        torch.set_num_threads(threads)
        np.testing.assert_array_equal(bits(run(step, NativeAttention(), scale=0.3)), bits(expected))


@needs_kernels
def test_a_row_keeps_its_bits_in_other_pages_and_beside_shared_ones() -> None:
    lens = [(1, 600), (1, 640), (1, 700)]
    step = make_step(2, lens, page_size=16, share=32)
    expected = run(step, NativeAttention(), scale=0.3)
    order = np.random.default_rng(0).permutation(len(step.k_pages))
    step.tables = [[int(np.flatnonzero(order == page)[0]) for page in t] for t in step.tables]
    step.k_pages, step.v_pages = step.k_pages[order], step.v_pages[order]
    step.batch = make_batch(step.tables, step.query_lens, step.kv_lens, 16)
    np.testing.assert_array_equal(bits(run(step, NativeAttention(), scale=0.3)), bits(expected))


@needs_kernels
def test_values_may_be_narrower_than_keys() -> None:
    step, backend = make_step(5, [(1, 300), (40, 20)], dim=48), NativeAttention()
    expected = run(step, backend, scale=0.3)
    assert error(step, expected, scale=0.3) < 2e-5
    value, v_pages = step.value[..., :20].contiguous(), step.v_pages[..., :20].contiguous()
    out = run(replace(step, value=value, v_pages=v_pages), backend, scale=0.3)
    np.testing.assert_array_equal(bits(out), bits(expected[..., :20]))


# What is refused.


@needs_kernels
def test_what_does_not_fit_together_is_refused() -> None:
    step, backend = make_step(7, [(3, 10), (1, 40)], page_size=4), NativeAttention()
    plan, good = backend.plan(step.batch), inputs_of(step, scale=0.3)

    def refused(match: str, **changes: Any) -> None:
        kind = changes.pop("kind", good.layer)
        inputs = inputs_of(replace(step, **changes), scale=0.3)._replace(layer=kind)
        with pytest.raises(ValueError, match=match):
            plan.run(inputs)

    refused("other pages or tokens", query=step.query[:3])
    refused("other pages or tokens", k_pages=step.k_pages[:5])  # pages are missing
    refused("other pages or tokens", k_pages=step.k_pages.view(-1, 8, 2, 16)[:20])
    refused("expected .* got", key=step.key[:3])
    refused("expected .* got", value=step.value.bfloat16())
    refused("expected .* got", v_pages=step.v_pages[:5])
    refused("not contiguous", key=step.key.transpose(1, 2).contiguous().transpose(1, 2))
    refused("not contiguous", k_pages=step.k_pages.transpose(1, 2).contiguous().transpose(1, 2))
    refused("expected .* got", k_pages=randn(0, len(step.k_pages), 4, 3, 16))
    refused("8 query heads on 3", kind=good.layer._replace(kv_heads=3))
    refused("window of 0", kind=good.layer._replace(window=0))
    names = ("query", "key", "value", "k_pages", "v_pages")
    refused("no native kernels for", **{name: getattr(step, name).double() for name in names})


@pytest.mark.parametrize(("fields", "match"), [
    ({"kv_indices": [0, -1, 2]}, "negative"),
    ({"kv_indices": [0, 1]}, "pages without"),
    ({"kv_indptr": [0, 0, 3]}, "without pages"),
    ({"kv_indptr": [0, 3]}, "different batches"),
    ({"qo_indptr": [1, 2, 3]}, "different batches"),
    ({"qo_indptr": [0, 2, 1]}, "impossible length"),
    ({"kv_last_page_len": [1, 0]}, "impossible length"),
    ({"kv_last_page_len": [1, 5]}, "impossible length"),
    ({"qo_indptr": [0, 6, 7]}, "more new tokens"),
    ({"qo_indptr": [0, 1, 1000]}, "impossible length"),
    ({"kv_indptr": [0, 9, 3]}, "without pages"),
    ({"first": [0]}, "different batches"),
    ({"write_indices": [0, 1]}, "without pages"),
    ({"write_indices": [0, -1, 2]}, "negative"),
    ({"first": [0, -1]}, "impossible length"),
    ({"first": [0, 2**31 - 4]}, "impossible length"),
    ({"kv_indices": [0, 1 << 32, 2]}, "int32 cannot hold"),
    ({"write_indices": [0, 1 - (1 << 32), 2]}, "int32 cannot hold"),
])  # fmt: skip
@needs_kernels
def test_page_tables_that_contradict_each_other_are_refused(fields, match) -> None:
    good = make_batch([[0, 1], [2]], [1, 1], [5, 4], 4)
    NativeAttention().plan(good)
    bad = replace(good, **{name: np.array(value) for name, value in fields.items()})
    with pytest.raises(ValueError, match=match):
        NativeAttention().plan(bad)


# Threads.


@needs_kernels
def test_threads_that_call_at_once_get_their_own_results() -> None:
    x, linear = [randn(seed, 300, 64) for seed in range(4)], PackedLinear(randn(4, 256, 64), None)
    torch.set_num_threads(3)
    expected = [linear(a) for a in x]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert all(map(torch.equal, pool.map(linear, x), expected))


def compute_in_a_child() -> int:
    torch.set_num_threads(3)
    x, linear = torch.ones(1000, 64), PackedLinear(torch.ones(256, 64), None)
    expected = linear(x).numpy()
    child = os.fork()
    if not child:
        os._exit(0 if (linear(x).numpy() == expected).all() else 1)
    return os.waitpid(child, 0)[1]


@needs_kernels
def test_a_forked_child_computes_too(tmp_path) -> None:
    """It has none of its parent's threads; torch's own operations may hang there."""
    assert Forked(tmp_path, compute_in_a_child).wait(60) == 0


# Where nothing compiles them.


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A machine with an empty cache folder, and an empty folder of programs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RADIXCACHE_MARCH", raising=False)
    return tmp_path


def test_without_a_compiler_that_is_the_reason(bare) -> None:
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        native_build.build()


@pytest.mark.parametrize(
    ("said", "reason"), [("no such flag", "no such flag"), (r"\377bad", ".bad")]
)
def test_a_compiler_that_fails_is_the_reason_and_leaves_nothing(bare, said, reason) -> None:
    (bare / "c++").write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    (bare / "c++").chmod(0o755)
    with pytest.raises(OSError, match=rf"c\+\+ failed: {reason}"):
        native_build.build()
    assert not list((bare / "cache").rglob("*.so"))


def test_a_library_that_lost_bytes_is_compiled_anew(bare) -> None:
    program = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf library > "$2"\n'
    (bare / "c++").write_text(program)
    (bare / "c++").chmod(0o755)
    library = native_build.build()
    for spoiled in (b"", b"lib", bytes(7)):
        library.write_bytes(spoiled)
        assert native_build.build() == library and library.read_bytes() == b"library"


def want_memory() -> int:
    backend, pages = NativeAttention(), torch.zeros(1, 40_000, 1, 16)
    query, new = torch.zeros(512, 128, 16), torch.zeros(512, 1, 16)
    plan = backend.plan(make_batch([[0]] * 512, [1] * 512, [40_000] * 512, 40_000))
    kind = LayerKind(128, 1, 16, 16, 1.0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), -1))
    with pytest.raises(MemoryError, match=r"^no memory for what a step computes$"):
        plan.run(LayerInputs(query, new, new, LayerPages(pages, pages), kind))
    return 0


@needs_kernels
def test_want_of_memory_is_an_exception(tmp_path) -> None:
    """512 queries of 40,000 keys each keep 2 GB of sums, which the process may not have."""
    process = Forked(tmp_path, want_memory)
    assert process.wait(60) == 0, process.err.read_text()


def test_what_was_compiled_is_used_again_by_the_same_processor_only(bare, monkeypatch) -> None:
    (bare / "c++").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    (bare / "c++").chmod(0o755)
    first = native_build.build()
    (bare / "c++").unlink()
    assert native_build.build() == first and first.is_file()
    for name, value in (("_processor", lambda: ["another"]), ("_FLAGS", ("-march=another",))):
        with monkeypatch.context() as patch:
            patch.setattr(native_build, name, value)
            with pytest.raises(OSError, match="no C\\+\\+ compiler"):
                native_build.build()


def test_of_what_a_wheel_holds_the_best_that_the_processor_can_run_is_taken(
    bare, monkeypatch
) -> None:
    compiler = bare / "fake"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf "$2" > "$2"\n')
    compiler.chmod(0o755)
    folder = bare / "wheel"
    folder.mkdir()
    (folder / "native.cpp").write_text("source")
    monkeypatch.setattr(native_build, "_SOURCE", folder / "native.cpp")
    made = {n: native_build.build_ahead(folder, n, str(compiler)) for n in native_build.LEVELS}
    assert len(set(made.values())) == len(made)
    for name, level in native_build.LEVELS.items():
        monkeypatch.setattr("platform.machine", lambda level=level: level.machine)
        said = ["model name: another", f"flags: fpu {level.needs} later"]
        monkeypatch.setattr(native_build, "_processor", lambda said=said: said)
        assert native_build.build() == made[name]
        if "avx" in level.needs:  # a machine that lacks one thing takes the next
            fewer = level.needs.split()[:-1]
            monkeypatch.setattr(native_build, "_processor", lambda fewer=fewer: fewer)
            assert native_build.build() != made[name]
        monkeypatch.setenv("RADIXCACHE_MARCH", "x86-64")  # another than the best
        if level.machine == "x86_64":
            assert native_build.build() == made["x86-64"]
        monkeypatch.setattr(native_build, "_processor", list)
        for other in native_build.LEVELS.keys() - {*native_build.usable_levels()}:
            monkeypatch.setenv("RADIXCACHE_MARCH", other)
            with pytest.raises(OSError, match=f"cannot run {other}, which RADIXCACHE_MARCH names"):
                native_build.build()
        monkeypatch.setattr(native_build, "_processor", lambda said=said: said)
        monkeypatch.setenv("RADIXCACHE_MARCH", "native")  # asks for a compiler
        with pytest.raises(OSError, match="no C\\+\\+ compiler"):
            native_build.build()
        monkeypatch.delenv("RADIXCACHE_MARCH")
    for file, good in ((folder / "native.cpp", b"source"), (made[name], made[name].read_bytes())):
        file.write_text("other")  # of other sources, or cut off
        with pytest.raises(OSError, match="no C\\+\\+ compiler"):
            native_build.build()
        file.write_bytes(good)
        assert native_build.build() == made[name]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    needs = native_build.LEVELS["x86-64-v4-bf16"].needs
    monkeypatch.setattr(native_build, "_processor", lambda: [needs])
    made["x86-64-v4-bf16"].unlink()
    made["x86-64-v4-bf16"].symlink_to(bare / "nowhere")  # what cannot be read is passed over
    assert native_build.build() == made["x86-64-v4-vnni"]


def test_kernels_come_from_no_folder_that_strangers_can_write_to(bare, monkeypatch) -> None:
    compiler = bare / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    before = os.umask(0)
    try:
        library = native_build.build()
    finally:
        os.umask(before)
    folder = library.parent
    assert native_build.build() == library and not folder.stat().st_mode & 0o022
    folder.chmod(0o777)
    for _ in range(2):  # neither loads what is there nor compiles
        with pytest.raises(OSError, match="other users can write to"):
            native_build.build()
        library.unlink(missing_ok=True)
    folder.chmod(0o755)
    folder.chmod(0o775)
    me = pwd.getpwuid(os.getuid()).pw_name
    for name, members, is_mine in ((me, [], True), (me, [me, "eve"], False), ("staff", [], False)):
        group = Mock(gr_name=name, gr_mem=members)
        monkeypatch.setattr("grp.getgrgid", Mock(return_value=group))
        with nullcontext() if is_mine else pytest.raises(OSError, match="other users can write"):
            native_build.build().chmod(0o666)
    folder.chmod(0o755)
    assert not native_build.build().stat().st_mode & 0o022  # compiled anew
    theirs = Mock(stat=lambda: Mock(st_uid=12_345, st_mode=0o40755))
    with pytest.raises(OSError, match="other users can write to"):
        native_build._refuse_strangers(theirs)
    with monkeypatch.context() as patch:  # but whoever owns the package may
        patch.setattr(native_build, "_SOURCE", theirs)
        native_build._refuse_strangers(theirs)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(bare / "home"))
    assert native_build.build().is_relative_to(bare / "home")
