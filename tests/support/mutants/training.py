"""A training run's checkpoints: what is kept, what leads to where training is, and what follows a save."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="retention deletes what is under way",
        file="storage/training/retention.py",
        old="                return step is not None and step not in in_flight\n",
        new="                return step is not None\n",
        tests="tests/unit/test_checkpointer_background.py::test_nothing_is_deleted_of_a_step_in_flight",
    ),
    Mutant(
        says="old checkpoints are pruned also after a save that failed",
        file="storage/training/stats.py",
        old=("        return\n    log_safely(stats.saved, step, handle.report)\n"),
        new=("    else:\n        log_safely(stats.saved, step, handle.report)\n"),
        tests="tests/unit/test_checkpointer_background.py::test_nothing_is_deleted_after_a_failed_save",
    ),
    Mutant(
        says="SIGTERM: the step just saved is saved again",
        file="storage/training/checkpointer.py",
        old="        if self._stop_at is not None and step != self._last:\n",
        new="        if self._stop_at is not None:\n",
        tests="tests/unit/test_checkpointer_sigterm.py::test_saved_step_is_not_saved_again",
    ),
    Mutant(
        says="dry run lists live attempts as leftovers",
        file="storage/operations/maintenance/prune.py",
        old="        if silent_s >= await _spared_s(driver, attempt, files, current, idle_s):\n",
        new="        if await _spared_s(driver, attempt, files, current, idle_s) < float('inf'):\n",
        tests="tests/unit/test_storage_prune.py::test_a_dry_run_lists_no_attempt_that_may_be_alive",
    ),
    Mutant(
        says="going back is put on record with the next save only",
        file="storage/training/run_lineage.py",
        old=("        if record:\n            await self._record()\n"),
        new="",
        tests="tests/unit/test_checkpointer_back.py::test_going_back_is_durable",
    ),
    Mutant(
        says="a manifest does not say its branch",
        file="storage/operations/saving/save.py",
        old="        manifest = replace(manifest, branch=self._branch)\n",
        new="",
        tests="tests/unit/test_checkpointer_back.py::test_save_replaces_an_abandoned_step",
    ),
    Mutant(
        says="a first save below the newest step is let in",
        file="storage/training/run_lineage.py",
        old="                if newest is not None and step < _step(newest):\n",
        new="                if False:\n",
        tests="tests/unit/test_checkpointer_back.py::test_first_save_below_the_newest_is_refused",
    ),
    Mutant(
        says="strides that pass a multiple are not due",
        file="storage/training/schedule.py",
        old="        return step // self._every > last // self._every\n",
        new="        return step // self._every >= last // self._every and step % self._every == 0\n",
        tests="tests/unit/test_checkpointer.py::test_steps_are_due_at_multiples_or_when_one_is_passed",
    ),
    Mutant(
        says="a watcher that has ended speaks for the next one",
        file="storage/training/preemption.py",
        old="            if watcher is not self._watcher:\n                return\n",
        new="",
        tests="tests/unit/test_checkpointer_sigterm.py::test_handed_over_signal_does_not_count_again",
    ),
]
