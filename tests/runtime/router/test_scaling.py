"""Autoscaling by the loads that replicas report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from radixcache.runtime.router.scaling import by_queued_tokens


@pytest.mark.parametrize(
    ("loads", "wanted"), [([], 0), ([0.0], 0), ([0.2, 0.3], 1), ([1.0, 1.0, 0.1], 3)]
)
def test_there_should_be_as_many_replicas_as_the_loads_would_keep_busy(
    loads: list[float], wanted: int
):
    metrics = {"load": {f"{index}": load for index, load in enumerate(loads)}}
    context: Any = SimpleNamespace(aggregated_metrics=metrics if loads else None)
    assert by_queued_tokens(context) == (wanted, {})
