"""What the documentation shows is what happens."""

from __future__ import annotations

import doctest
import importlib
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["runtime", "index"])
def test_the_readme_runs_and_prints_what_its_comments_say(block: str) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(block, "README.md", "exec"), {})
    printed = out.getvalue()
    claims = re.findall(r"^print\(.*\)\s+# ([^:\n]+)", block, re.MULTILINE)
    assert claims, "no print with a comment: nothing would be checked"
    for claim in claims:
        assert claim.strip() in printed, f"{claim!r} is not in:\n{printed}"


def test_readme_blocks_are_about_twenty_lines() -> None:
    assert all(len(block.strip().splitlines()) <= 24 for block in BLOCKS)


@pytest.mark.parametrize(
    "module",
    ["pages", "radix", "none", "block_hash", "free_queue", "hash_block", "runtime.engine.explain"],
)
def test_doctests(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"radixcache.{module}"))
    assert result.attempted and not result.failed


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
