"""What the documentation shows is what happens."""

from __future__ import annotations

import doctest
import importlib
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.sources import SOURCES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
# The programs of server.md need a server: tests/runtime/server/test_server_docs.py runs them.
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if page.name != "server.md"
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_and_prints_what_its_comments_say(block: str) -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(block, "a page", "exec"), {})
    printed = out.getvalue()
    claims = re.findall(r"^print\(.*\)\s+# ([^:\n]+)", block, re.MULTILINE)
    assert claims, "no print with a comment: nothing would be checked"
    for claim in claims:
        assert claim.strip() in printed, f"{claim!r} is not in:\n{printed}"


def test_the_clients_that_were_tried_are_those_that_the_tests_have() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    pins = (ROOT / "tests" / "clients" / "requirements.txt").read_text()
    ours = re.findall(r"^(?:openai|anthropic)==.*\n", (ROOT / "constraints.txt").read_text(), re.M)
    tried = re.findall(r"^([a-z-]+)[^=\n]*==([\d.]+)", "".join([*ours, pins]), re.M)
    assert len(tried) > 8
    for name, version in tried:
        row = rf"\n\| {name} \|[^|]*\b{re.escape(version)}\b"
        assert name in ("pytest", "torch") or re.search(row, page), f"{name} {version}"


def test_nothing_says_to_install_what_is_not_published() -> None:
    for page in [*PAGES, *(ROOT / source for source in SOURCES)]:
        assert not re.search(r"pip install [^\n`]*\bradixcache\b", page.read_text()), page.name


@pytest.mark.parametrize(
    "module",
    "pages states.recurrent radix.cache radix.ghost no_cache hash_block.cache hash_block.hashes "
    "hash_block.free_queue runtime.engine.explain".split(),
)
def test_doctests(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"radixcache.{module}"))
    assert result.attempted and not result.failed


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            target = (page.parent / link).resolve() if link else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                assert anchor in anchors_of(target), f"{page.name}: {link}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
