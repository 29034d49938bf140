"""The KV pool's memory: what a budget buys, and what it costs before it is used."""

from __future__ import annotations

import resource

import pytest
import torch

from radixcache.errors import InvalidRequest
from radixcache.kernels.huge_pages import HUGE
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.model import kv_pool
from radixcache.runtime.model.kv_pool import (
    KVPool,
    LayerShape,
    bytes_per_token,
    count_pages,
    default_memory,
)

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 16, 16), LayerShape(4, 8, 32)]


def test_amounts_of_memory() -> None:
    for text, size in {
        "512MiB": 512 << 20,
        "2GB": 2 * 10**9,
        "1.5GiB": 3 << 29,
        " 3 kb ": 3000,
        "1 TiB": 1 << 40,
        "100": 100,
        "64B": 64,
        "8M": 8 * 10**6,
    }.items():
        assert parse_memory(text) == size, text
    assert parse_memory(4096) == 4096


@pytest.mark.parametrize("memory", ["", "GB", "2 XB", "-1GB", "1,5GB", "0", "1GiBs", 0, -5, True])
def test_nonsense_is_refused(memory) -> None:
    with pytest.raises(InvalidRequest, match="not an amount of memory"):
        parse_memory(memory)


def test_pages_that_fit_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 16 * bytes_per_token(SHAPES, torch.bfloat16)
    assert page_bytes == 16 * 2 * (2 * 32 + 4 * 40)
    assert count_pages(10 * page_bytes + 1, page_bytes, CPU) == 10
    with pytest.raises(InvalidRequest, match="hold no page"):
        count_pages(page_bytes - 1, page_bytes, CPU)
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 8 << 30)  # or it changes meanwhile
    assert 0 < default_memory(CPU) <= 2 << 30
    assert count_pages(None, page_bytes, CPU) == default_memory(CPU) // page_bytes
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 1 << 40)
    assert default_memory(CPU) <= 16 << 30


def test_copies_read_every_source_before_writing_any_target() -> None:
    pool = KVPool(SHAPES, 6, 4, torch.float32, CPU)
    for tensor in (tensor for layer in pool.layers for tensor in layer):
        tensor.normal_()
    before = [(k.clone(), v.clone()) for k, v in pool.layers]
    copies = [(0, 1, 4), (1, 2, 3), (2, 0, 2), (3, 4, 1)]  # 0 -> 1 -> 2 -> 0 is a ring
    pool.copy(copies)
    for layer, old in zip(pool.layers, before, strict=True):
        for tensor, was in zip(layer, old, strict=True):
            expected = was.clone()
            for source, target, count in copies:
                expected[target, :count] = was[source, :count]
            assert torch.equal(tensor, expected)


def test_unused_pages_cost_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = KVPool([LayerShape(8, 64, 64)], 1 << 16, 16, torch.float32, CPU)  # 4 GiB
    pool.layers[0][0][7, 3] = 1.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10  # KiB
    assert pool.layers[0][0].data_ptr() % HUGE == 0
