"""The source files of the project, what each is imported as, and what it imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Folder of each package, as in pyproject.toml.
PACKAGES = {
    "radixcache": "radixcache",
    "runtime": "radixcache.runtime",
    "kernels": "radixcache.kernels",
    "bench": "radixcache.bench",
}
NOT_INSTALLED = Path("bench/peers")


def files_below(folder: str) -> list[Path]:
    """Every file of a folder that git would keep, relative to the root. Links are not followed."""
    found = []
    for parent, folders, names in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(parent, name).relative_to(ROOT) for name in names]
    return sorted(p for p in found if p.suffix != ".pyc" and NOT_INSTALLED not in p.parents)


def installed_path(path: Path) -> Path:
    """Where an installed package holds a file of the repository."""
    return Path(PACKAGES[path.parts[0]].replace(".", "/"), *path.parts[1:])


def place(path: Path) -> Path:
    """Where a source file is imported from."""
    return path if NOT_INSTALLED in path.parents else installed_path(path)


def module_name(path: Path) -> str:
    """Dotted name that a source file is imported by."""
    return ".".join(place(path).with_suffix("").parts).removesuffix(".__init__")


PEERS = sorted(p.relative_to(ROOT) for p in (ROOT / NOT_INSTALLED).rglob("*.py"))
"""Imported by their path in the repository: `bench.peers.process`."""
FILES = [path for folder in PACKAGES for path in files_below(folder)]
SOURCES = [path for path in FILES if path.suffix == ".py"]
# Importing a __main__ would run it.
MODULES = [module_name(path) for path in SOURCES if path.name != "__main__.py"]


class Import(NamedTuple):
    """One imported name, absolute; `lazy` if importing the file does not execute the import."""

    name: str
    lazy: bool

    def is_below(self, package: str) -> bool:
        return f"{self.name}.".startswith(f"{package}.")

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports(path: Path) -> tuple[Import, ...]:
    """Everything that a source file imports. `from a import b` counts as a.b."""
    return _imports(path, (ROOT / path).read_text(encoding="utf-8"))


@cache  # several tests ask for the same files
def _imports(path: Path, text: str) -> tuple[Import, ...]:
    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [child.module] if child.module else []
                if child.level:
                    base = [*place(path).parts[: -child.level], *base]
                yield from (Import(".".join([*base, a.name]), lazy) for a in child.names)
            elif not isinstance(child, ast.expr):  # in which nothing is imported
                yield from walk(child, lazy or isinstance(child, LAZY) or is_typing_only(child))

    return tuple(walk(ast.parse(text), False))


LAZY = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
