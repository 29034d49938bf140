"""Each test runs on a simulated GPU, and with `-m gpu` on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.place import Place, real_place, simulated_place
from tests.gpu.table import Table, cells

Row = Callable[..., None]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table())


@pytest.fixture(scope="module", params=["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with real_place() if request.param == "gpu" else simulated_place() as place:
        yield place


@pytest.fixture
def row(request: pytest.FixtureRequest, place: Place) -> Row:
    """Adds a row to the table of what was measured, but for a simulated GPU's."""

    def add(*args: object, **options: object) -> None:
        found = cells(*args, **options)  # type: ignore[arg-type]
        if place.shrink == 1:
            request.node.user_properties.append(("row", found))

    return add
