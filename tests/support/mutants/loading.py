"""Mutants of loads: what fits, what goes into memory that is shared, what a failed load leaves."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("load: memory that tensors share is filled with all of them at once", "storage/operations/load.py", '    groups = await offload(overlapping, wanted)\n', '    groups: list[list[int]] = []\n', "tests/unit/test_storage_overlaps.py::test_tied_weights_of_which_two_values_are_stored_are_refused"),
    Mutant("load: values that do not agree are taken for values that do", "storage/operations/overlaps.py", '        if before != [await offload(copy.digest, view) for view in copy.views]:\n', '        if before != before:\n', "tests/unit/test_storage_overlaps.py::test_tied_weights_of_which_two_values_are_stored_are_refused"),
    Mutant("load: what a failed load began to fill is forgotten", "storage/operations/load.py", '    job.touched |= job.match.filled\n', '', "tests/unit/test_storage_leftovers.py"),
    Mutant("load: a state of which nothing is stored is loaded", "storage/operations/differences.py", '        nothing = self._nothing(told)\n', '        nothing = False\n', "tests/unit/test_storage_strict.py::test_a_state_of_which_nothing_is_stored_is_an_error"),
    Mutant("load: strict=\"state\" wants no name of the state", "storage/operations/differences.py", '        if self._strict or nothing:\n', '        if self._strict is True or nothing:\n', "tests/unit/test_storage_strict.py::test_strict_state_wants_every_name_of_the_state"),
    Mutant("load: a rank whose mate left since the checkpoint was replaced fails", "storage/operations/load.py", '    except (DamagedError, RankFailedError):  # of another rank that, perhaps, saw that it was replaced, and left\n', '    except DamagedError:\n', "tests/unit/test_storage_exchange.py::test_a_rank_whose_mate_left_since_the_checkpoint_was_replaced_starts_over"),
    Mutant("load: an exchange over a network takes twice the budget", "storage/operations/load.py", '    budget_nbytes = job.budget_nbytes // (2 if circle and circle.near else 1)  # as much to receive into\n', '    budget_nbytes = job.budget_nbytes\n', "tests/unit/test_storage_exchange.py::test_an_exchange_stays_within_the_budget"),
]
