"""The mutants of `tests.scripts.mutants` can still be made."""

from __future__ import annotations

import re

import pytest

from tests.scripts.mutants import MUTANTS, ROOT, TABLE, Mutant, changed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert changed(text, mutant) != text


def test_no_file_or_name_is_written_twice() -> None:
    # The later of two equal keys would silently replace the first.
    assert len(MUTANTS) == len(re.findall(r"^    \S", TABLE, re.MULTILINE))
