"""The list of small changes of the engine keeps up with the engine and with its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mutants import TABLES, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "mutant", [mutant for table in TABLES for mutant in table], ids=lambda mutant: mutant.says
)
def test_a_mutant_changes_code_that_is_there_and_names_a_test_that_is(mutant: Mutant) -> None:
    """Else a change of the engine would take it out of the list, unseen until the list is run."""
    for change in mutant.changes:
        source = (ROOT / change.file).read_text()
        assert change.applied(source) != source
    file, _, test = mutant.noticed_by.split()[0].partition("::")
    assert f"def {test}" in (ROOT / file).read_text()
