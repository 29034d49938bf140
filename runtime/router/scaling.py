"""Autoscaling: how many replicas there should be, by waiting tokens and running requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "load"
"""The name of the number that each replica reports."""

QUEUED_TOKENS = 16_384
"""Tokens of waiting prompts that justify one more replica."""


def by_queued_tokens(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy function of Ray Serve, which applies its own delays and bounds to the result."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    return math.ceil(sum(loads.values())), {}
