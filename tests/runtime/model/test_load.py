"""Loading, beside others on the same machine."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from radixcache import ModelError
from radixcache.kernels.native.library import num_threads
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.model import load
from radixcache.runtime.model.fallback.loading import call_transformers


def test_loading_computes_on_the_pool_of_kernels_not_on_threads_that_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside busy processes, torch's own threads take ten times as long."""
    seen: list[tuple[int, int]] = []
    read, before = load._load_decoder, torch.get_num_threads()

    def watch(*args: Any) -> Any:
        seen.append((torch.get_num_threads(), num_threads()))
        return read(*args)

    monkeypatch.setattr(load, "_load_decoder", watch)
    torch.set_num_threads(3)
    try:
        load.load_model(BUNDLED_MODEL, device="cpu")
        assert seen == [(1, 3)] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_versions_that_were_not_tried_are_told(caplog: pytest.LogCaptureFixture) -> None:
    load.warn_of_untried({"torch": "2.13.0+cpu", "transformers": "5.24.7"})
    assert not caplog.records
    load.warn_of_untried({"torch": "3.0.0.dev1", "transformers": "5.25.0"})
    assert [record.message for record in caplog.records] == [
        "torch 3.0.0.dev1 is newer than what was tried, 2.13",
        "transformers 5.25.0 is newer than what was tried, 5.24",
    ]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: ...", "more memory"),
        ("You set `ignore_mismatched_sizes` to `False`, thus ...", "other shapes"),
        ("We encountered some issues during conversion of the weights. ...", "lacks some"),
    ],
)
def test_what_transformers_says_first_and_means_later_is_told(said: str, told: str) -> None:
    with pytest.raises(ModelError, match=f"^the model at . does not load: it .*{told}"):
        call_transformers(".", Mock(side_effect=RuntimeError(said)))
