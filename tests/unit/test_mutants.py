"""The list of small changes of the engine keeps up with the engine and with its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mutants import TABLES
from support.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "mutant", [mutant for table in TABLES for mutant in table], ids=lambda mutant: mutant.says
)
def test_a_mutant_changes_code_that_is_there_and_names_a_test_that_is(mutant: Mutant) -> None:
    """Else a change of the engine would take it out of the list, unseen until the list is run."""
    source = (ROOT / mutant.file).read_text()
    assert mutant.applied(source) != source
    file, _, test = mutant.tests.split()[0].partition("::")
    assert f"def {test}" in (ROOT / file).read_text()
