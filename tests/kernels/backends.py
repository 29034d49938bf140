"""Shapes of layers on which attention backends are tried, and steps over their pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from radixcache.kernels.attention import AttentionBackend, AttentionPlan
from radixcache.kernels.kv_format import decode, encode
from tests.kernels.reference import Step, inputs_of

# (new tokens, cached tokens) of each sequence
SHAPES = {
    "fresh": [(7, 0), (33, 0), (1, 0), (16, 0)],
    "suffix": [(5, 40), (17, 3), (2, 16), (31, 33)],
    "decode": [(1, 1), (1, 40), (1, 15), (1, 16), (1, 200), (1, 63), (1, 60)],
    "mixed": [(1, 37), (20, 0), (1, 5), (9, 50), (1, 120), (3, 31)],
}


def held(step: Step, dtype: torch.dtype) -> Step:
    """The step whose K/V are the numbers that such pages would hold."""

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        return decode(encode(numbers, dtype), numbers.dtype)

    names = ("key", "value", "k_pages", "v_pages")
    changes: dict[str, Any] = {name: rounded(getattr(step, name)) for name in names}
    return replace(step, **changes)


def attend(
    step: Step, backend: AttentionBackend, dtype: torch.dtype, **options
) -> tuple[torch.Tensor, ...]:
    """The output, and both sides of the pages, which are of `dtype`."""
    sides = (encode(side, dtype) for side in (step.k_pages, step.v_pages))
    inputs = inputs_of(step, **options)
    pages = type(inputs.pages)(*sides)
    return backend.plan(step.batch).run(inputs._replace(pages=pages)), *pages


def assert_written_pages_stay(step: Step, plan: AttentionPlan, device: Any = "cpu") -> None:
    """What attends over K/V of an earlier layer writes none: values that are set to 0 stay so."""
    moved = {name: getattr(step, name).to(device) for name in ("query", "key", "value")}
    pages = {name: getattr(step, name).to(device, copy=True) for name in ("k_pages", "v_pages")}
    inputs = inputs_of(replace(step, **moved, **pages), scale=0.25)
    assert plan.run(inputs).any()
    inputs.pages.v.zero_()
    assert not plan.run(inputs._replace(written=True)).any()
