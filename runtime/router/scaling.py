"""How many replicas there should be: by the tokens that wait, and the places that are taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "load"
"""The number that each replica reports."""

QUEUED_TOKENS = 16_384
"""Tokens of waiting prompts that are worth a replica of their own."""


def by_queued_tokens(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy function of Ray Serve, which applies its delays and bounds to what this wants."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    return math.ceil(sum(loads.values())), {}
