"""The tests' own modules: which may import which."""

from __future__ import annotations

import ast

from tests.helpers.sources import ROOT


def test_no_test_module_is_imported() -> None:
    """What two of them need stands in a module beside them, or in `tests/helpers`."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.rpartition(".")[2].startswith("test_")
    ]
    assert not found
