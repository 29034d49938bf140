"""Products of rows by their experts, in each of the ways that a device may need."""

from __future__ import annotations

import pytest
import torch

from radixcache.kernels.torch.experts import _grouped, by_expert, by_row


@pytest.mark.parametrize("size", [16, 14, 5])
def test_all_ways_give_the_same_products(size: int) -> None:
    torch.manual_seed(1)
    counts = torch.tensor([3, 0, 7, 1])
    experts = torch.arange(4).repeat_interleave(counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    x, weight = torch.randn(11, size), torch.randn(4, 32, size).transpose(1, 2)
    expected = torch.stack([row @ weight[e] for row, e in zip(x, experts, strict=True)])
    for found in (
        by_row(x, weight, experts),
        by_expert(x, weight, ends),
        _grouped(x, weight.transpose(1, 2), None, ends, experts),
    ):
        torch.testing.assert_close(found, expected)
