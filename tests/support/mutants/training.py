"""A training run's checkpoints: what is kept, what leads to where training is, and what follows a save."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

_BACK = "tests/unit/test_checkpointer_back.py"
_BACKGROUND = "tests/unit/test_checkpointer_background.py"
_PRUNE = "tests/unit/test_storage_prune.py"
_SIGTERM = "tests/unit/test_checkpointer_sigterm.py"

MUTANTS = [
    Mutant(
        "retention deletes what is under way",
        "storage/training/retention.py",
        "return step is not None and step not in under_way",
        "return step is not None",
        f"{_BACKGROUND}::test_nothing_is_deleted_of_a_step_that_is_under_way",
    ),
    Mutant(
        "old checkpoints are pruned also after a save that failed",
        "storage/training/follower.py",
        "        _tell(ledger.failed, step, error)\n        return\n    _tell(ledger.saved, step, handle.report)\n",
        "        _tell(ledger.failed, step, error)\n    else:\n        _tell(ledger.saved, step, handle.report)\n",
        f"{_BACKGROUND}::test_nothing_is_deleted_after_a_save_that_failed",
    ),
    Mutant(
        "SIGTERM: the step just saved is saved again",
        "storage/training/checkpointer.py",
        "if self._stop_at is not None and step != self._last:",
        "if self._stop_at is not None:",
        f"{_SIGTERM}::test_a_step_that_was_just_saved_is_not_saved_again",
    ),
    Mutant(
        "dry run lists live attempts as leftovers",
        "storage/operations/prune.py",
        " and max(0.0, now_s - trace.written_s) >= least_s:",
        ":",
        f"{_PRUNE}::test_a_dry_run_lists_no_attempt_that_may_be_alive",
    ),
    Mutant(
        "going back is put on record with the next save only",
        "storage/training/line.py",
        "        if record:\n            await self._record()\n",
        "",
        f"{_BACK}::test_a_run_goes_on_after_a_kill_right_after_it_went_back",
    ),
    Mutant(
        "a manifest does not say its branch",
        "storage/operations/save.py",
        "        manifest = replace(manifest, branch=self._branch)\n",
        "",
        f"{_BACK}::test_a_save_at_an_abandoned_step_replaces_it",
    ),
    Mutant(
        "a first save below the newest step is let in",
        "storage/training/line.py",
        "if newest is not None and step < _step(newest):",
        "if False:",
        f"{_BACK}::test_a_first_save_below_the_newest_is_an_error",
    ),
    Mutant(
        "strides that pass a multiple are not due",
        "storage/training/schedule.py",
        "        return step // self._every > last // self._every\n",
        "        return step // self._every >= last // self._every and step % self._every == 0\n",
        "tests/unit/test_checkpointer.py::test_steps_are_due_at_multiples_or_when_one_is_passed",
    ),
]
