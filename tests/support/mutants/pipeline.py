"""Mutants of how bytes move: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("after a failure waiting jobs keep their buffers", "storage/runtime/scheduler.py", '        waiting = [j for stage in self._waiting[1:] for j in stage]\n', '        waiting = []\n', "tests/property/test_storage_scheduler.py::test_a_failure_frees_the_memory_of_jobs_that_wait"),
    Mutant("a task overtakes a start that was given before", "storage/runtime/executor.py", '        first = None if self._given else next((t for t in todo if isinstance(t, Start)), None)\n', '        first = next((t for t in todo if isinstance(t, Start)), None)\n', "tests/unit/test_storage_executor.py::test_jobs_begin_a_stage_in_order_where_it_asks_for_that"),
    Mutant("cancelled, what runs is not waited for (buffers in use)", "storage/runtime/executor.py", '    for task in tasks:\n        task.cancel()\n    while tasks:\n        with contextlib.suppress(asyncio.CancelledError):  # once is enough\n            await asyncio.wait(tasks)\n', '    for task in tasks:\n        task.cancel()\n', "tests/unit/test_storage_executor.py::test_cancelled_it_waits_for_what_runs"),
    Mutant("packed chunks are written out of order", "storage/pipeline/image_writer.py", '            Stage("write", "io", in_order=packed or traits.part_order != "any"),\n', '            Stage("write", "io", in_order=traits.part_order != "any"),\n', "tests/unit/test_storage_packed.py::test_what_is_saved_comes_back"),
    Mutant("the first bad block of a partial read is ignored", "storage/pipeline/image_reader.py", '        bad = damaged_blocks(page, pages[image, chunk_start][first : first + len(page)])\n', '        bad = damaged_blocks(page, pages[image, chunk_start][first : first + len(page)])[1:]\n', "tests/unit/test_storage_damage.py::test_a_slice_is_verified_on_its_own"),
    Mutant("pages of chunks read in part are not verified themselves", "storage/pipeline/image_reader.py", '            pages[image, start] = page = bytes(data[a:b])\n            if digest(page) != expected:\n', '            pages[image, start] = page = bytes(data[a:b])\n            if False:\n', "tests/unit/test_storage_damage.py::test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data"),
    Mutant("what an upload holds is not counted", "storage/pipeline/image_writer.py", '            ours_nbytes = max(CHUNK_NBYTES, self._budget_nbytes - traits.upload_nbytes)\n', '            ours_nbytes = max(CHUNK_NBYTES, self._budget_nbytes)\n', "tests/unit/test_storage_hands_over.py::test_what_an_upload_holds_is_within_the_budget"),
    Mutant("budget overshot by half a job", "storage/runtime/scheduler.py", '        return needed <= self.budget.memory_nbytes or not self._holding\n', '        return needed <= self.budget.memory_nbytes + self._nbytes[self._waiting[0][0]] // 2 or not self._holding\n', "tests/property/test_storage_executor.py::test_everything_runs_or_the_first_failure_is_raised"),
]
