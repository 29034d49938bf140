"""The source files of the project, what each is imported as, and what it imports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("radixcache", "runtime", "kernels", "bench")
"""The folders that make the one import package; all but the first are links below it."""


def _files(folder: str) -> list[Path]:
    """Every file of a folder that is installed, relative to the root. Links are not followed."""
    found = (p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file())
    return sorted(p for p in found if p.suffix != ".pyc" and p.parts[:2] != ("bench", "peers"))


def installed_path(path: Path) -> Path:
    """Where an installed package holds a file of the repository."""
    return path if path.parts[0] == "radixcache" else Path("radixcache", path)


FILES = [path for folder in PACKAGES for path in _files(folder)]
SOURCES = [path for path in FILES if path.suffix == ".py"]
MODULES = [
    ".".join(installed_path(path).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
    if path.name != "__main__.py"  # importing it would run it
]


def imports(path: Path) -> set[str]:
    """The packages that a source file imports, by their first names."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found}
