"""Checkpoints that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.vlm_models import write_vlm


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, written once."""

    @cache
    def written(family: str) -> Path:
        return write_vlm(tmp_path_factory.mktemp(family), family)

    return written
