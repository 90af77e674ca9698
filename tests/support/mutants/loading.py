"""Mutants of loads: what fits, what goes into memory that is shared, what a failed load leaves."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="load: memory that tensors share is filled with all of them at once",
        file="storage/operations/loading/load.py",
        old="    groups = await offload(overlapping, wanted)\n",
        new="    groups: list[list[int]] = []\n",
        tests="tests/unit/test_storage_overlaps.py::test_tied_weights_of_which_two_values_are_stored_are_refused",
    ),
    Mutant(
        says="load: values that do not agree are taken for values that do",
        file="storage/operations/loading/overlaps.py",
        old="        if before != [await offload(copy.digest, view) for view in copy.views]:\n",
        new="        if before != before:\n",
        tests="tests/unit/test_storage_overlaps.py::test_tied_weights_of_which_two_values_are_stored_are_refused",
    ),
    Mutant(
        says="load: what a failed load began to fill is forgotten",
        file="storage/operations/loading/load.py",
        old="    job.touched |= job.match.filled\n",
        new="",
        tests="tests/unit/test_storage_leftovers.py",
    ),
    Mutant(
        says="load: a state of which nothing is stored is loaded",
        file="storage/operations/loading/differences.py",
        old="        nothing = self._nothing(told)\n",
        new="        nothing = False\n",
        tests="tests/unit/test_storage_strict.py::test_a_state_of_which_nothing_is_stored_is_an_error",
    ),
    Mutant(
        says='load: strict="state" wants no name of the state',
        file="storage/operations/loading/differences.py",
        old="        if self._strict or nothing:\n",
        new="        if self._strict is True or nothing:\n",
        tests="tests/unit/test_storage_strict.py::test_strict_state_wants_every_name_of_the_state",
    ),
    Mutant(
        says="load: a rank whose mate left since the checkpoint was replaced fails",
        file="storage/operations/loading/load.py",
        old="    except (DamagedError, RankFailedError):\n",
        new="    except DamagedError:\n",
        tests="tests/property/test_storage_exchange.py::test_a_rank_whose_mate_left_since_the_checkpoint_was_replaced_starts_over",
    ),
    Mutant(
        says="load: an exchange over a network takes twice the budget",
        file="storage/operations/loading/load.py",
        old="        budget_nbytes //= 2\n",
        new="        pass\n",
        tests="tests/property/test_storage_exchange.py::test_an_exchange_stays_within_the_budget",
    ),
    Mutant(
        says="a part of a checkpoint must be all of it",
        file="storage/operations/loading/differences.py",
        old="        return [(name, text) for name, text in out if self._part.holds(name)]\n",
        new="        return out\n",
        tests="tests/unit/test_load_part.py",
    ),
    Mutant(
        says="what only begins like a part belongs to it",
        file="storage/format/part.py",
        old="        return name == self.name or name.startswith(f'{self.name}.')\n",
        new="        return name.startswith(self.name)\n",
        tests="tests/unit/test_load_part.py",
    ),
]
