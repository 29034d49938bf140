"""The mutants of `tests.mutants` can still be made."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, changed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert changed(text, mutant) != text
