"""Which way the arrows between the folders run: down, and never in a circle."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import PEERS, ROOT, SOURCES, imports, module_name

Graph = dict[str, set[str]]
"""The modules that each module imports."""

FLOORS = [
    {"radixcache"},
    {
        "radixcache.kernels",
        "radixcache.runtime.files",
        "radixcache.runtime.flags",
        "radixcache.runtime.gguf_file",
        "radixcache.runtime.router.policy",
        "radixcache.runtime.sizes",
    },
    {"radixcache.runtime.kv_events", "radixcache.runtime.model", "radixcache.runtime.tokens"},
    {"radixcache.runtime.sampling"},
    {"radixcache.runtime.engine"},
    {"radixcache.runtime"},
    {"radixcache.runtime.demo"},
    {"radixcache.runtime.server"},
    {"radixcache.runtime.router"},
    {"radixcache.runtime.cli"},
    {
        "radixcache.__main__",
        "radixcache.bench.machine",
        "radixcache.bench.tables",
        "radixcache.bench.gpu",
    },
    {"radixcache.bench.workloads"},
    {"radixcache.bench.schemes"},
    {"radixcache.bench.replay"},
    {"radixcache.bench.report"},
    {"radixcache.bench.comparison"},
    {"radixcache.bench.cli", "radixcache.bench.probes"},
    {"bench.peers"},
    {"bench.peers.conformance", "bench.peers.engines", "bench.peers.index"},
]
"""Rooms from the ground up: folders, and a module that is a room by itself. A room uses what is
below it. Those of one floor do not know each other."""


def floor_and_room(module: str) -> tuple[int, str]:
    """Where a module is: in the smallest room that holds it."""
    rooms = [(room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms]
    room, floor = max(r for r in rooms if f"{module}.".startswith(f"{r[0]}."))
    return floor, room


PUBLIC = {
    f"radixcache.{imported.name.rpartition('.')[2]}": imported.name
    for imported in imports(Path("radixcache/__init__.py"))
    if imported.lazy and imported.is_below("radixcache")
}
"""What `radixcache` gives out of the runtime: a way up for whoever imports it from there."""


def read_graph() -> Graph:
    """Every arrow of the package, lazy ones and those for type checkers included.

    Only the lazy ones of `radixcache` itself are left out: its public names lead upward.
    """
    modules = {module_name(path) for path in SOURCES + PEERS}
    graph: Graph = {}
    for path in SOURCES + PEERS:
        found = graph[module_name(path)] = set()
        for imported in imports(path):
            if imported.lazy and module_name(path) == "radixcache":
                continue
            parts = PUBLIC.get(imported.name, imported.name).split(".")
            prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            found |= {next((p for p in prefixes if p in modules), "")} & modules
    return graph


def arrows_upward(graph: Graph) -> list[tuple[str, str]]:
    """Imports that lead to a higher floor, or to another room of the same."""
    found = []
    for module, targets in graph.items():
        floor, room = floor_and_room(module)
        for target in targets:
            there, other = floor_and_room(target)
            if there > floor or (there == floor and room != other):
                found.append((module, target))
    return found


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph()


def test_every_arrow_leads_down(graph: Graph) -> None:
    assert not arrows_upward(graph)


def test_no_modules_import_each_other_in_a_circle(graph: Graph) -> None:
    assert not circle(graph)


@pytest.mark.parametrize(
    ("module", "target", "is_circle"),
    [
        ("radixcache.radix", "radixcache.runtime.llm", True),
        ("radixcache.kernels.cascade", "radixcache.runtime.model.kv_pool", False),
        ("radixcache.runtime.model.kv_pool", "radixcache.runtime.tokens.tokenizer", False),
        ("radixcache.runtime.sampling.params", "radixcache.runtime.llm", True),
        ("radixcache.runtime.llm", "radixcache.runtime.server.protocol.openai", False),
        ("radixcache.runtime.server.app", "radixcache.runtime.cli", True),
        ("radixcache.runtime.cli", "radixcache.bench.cli", False),
        ("radixcache.bench.workloads.workload", "radixcache.bench.schemes.page_aligned", False),
        ("radixcache.bench.replay.play", "radixcache.bench.report.pages", True),
        ("radixcache.bench.probes.ttft", "radixcache.bench.cli", False),
        ("bench.peers.process", "bench.peers.engines.cases", False),
        ("bench.peers.index.cases", "bench.peers.engines.cases", False),
    ],
)
def test_an_arrow_planted_upward_is_seen(
    module: str, target: str, is_circle: bool, graph: Graph
) -> None:
    assert {module, target} <= set(graph)
    planted = {**graph, module: graph[module] | {target}}
    assert arrows_upward(planted) == [(module, target)]
    assert bool(circle(planted)) == is_circle


@pytest.mark.parametrize(
    ("path", "line", "target"),
    [
        ("bench/peers/process.py", "from .engines import cases", "bench.peers.engines.cases"),
        ("bench/peers/index/cases.py", "from ..engines import cases", "bench.peers.engines.cases"),
        ("runtime/sampling/params.py", "from ..llm import LLM", "radixcache.runtime.llm"),
        ("runtime/sampling/params.py", "from radixcache import LLM", "radixcache.runtime.llm"),
    ],
)
def test_a_line_planted_that_names_its_target_indirectly_is_seen(
    path: str, line: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def plant(self: Path, *args: str, **options: str) -> str:
        text = read(self, *args, **options)
        return f"{text}\n{line}\n" if self == ROOT / path else text

    monkeypatch.setattr(Path, "read_text", plant)
    assert arrows_upward(read_graph()) == [(module_name(Path(path)), target)]


ROOMS = [p for p in SOURCES + PEERS if p.name == "__init__.py" and p.parts[0] != "radixcache"]


@pytest.mark.parametrize("path", ROOMS, ids=str)
def test_a_folder_runs_nothing_when_it_is_imported(path: Path) -> None:
    """Or whoever imports a module of it would import more than is written there."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    assert [type(statement) for statement in body] == [ast.Expr]


def test_a_circle_planted_within_a_room_is_seen(graph: Graph) -> None:
    gate, paged = (
        "radixcache.runtime.model.compatibility",
        "radixcache.runtime.model.transformers_model",
    )
    assert gate in graph[paged]
    planted = {**graph, gate: graph[gate] | {paged}}
    assert not arrows_upward(planted)
    assert set(circle(planted)) == {gate, paged}


# `python -m radixcache` is the command line, not the index.
INDEX = [p for p in SOURCES if p.parts[0] == "radixcache" and p.name != "__main__.py"]


@pytest.mark.parametrize("path", INDEX, ids=str)
def test_the_index_needs_numpy_and_sortedcontainers_alone(path: Path) -> None:
    for imported in imports(path):
        if path.name == "__init__.py" and imported.lazy:  # it leads into the runtime, but lazily
            continue
        assert imported.top in {"radixcache", "numpy", "sortedcontainers", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "kernels"], ids=str)
def test_kernels_do_not_know_the_tree(path: Path) -> None:
    for imported in imports(path):
        if imported.top == "radixcache":
            assert imported.is_below("radixcache.kernels") or imported.is_below("radixcache.errors")
