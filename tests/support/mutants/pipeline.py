"""Mutants of how bytes move: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = [
    Mutant(
        says="after a failure waiting jobs keep their buffers",
        file="storage/runtime/scheduler.py",
        old="        waiting = [j for stage in self._waiting[1:] for j in stage]\n",
        new="        waiting = []\n",
        tests="tests/property/test_storage_scheduler.py::test_a_failure_frees_the_memory_of_jobs_that_wait",
    ),
    Mutant(
        says="a task overtakes a start that was given before",
        file="storage/runtime/executor.py",
        old="        first = None if self._given else next((t for t in todo if isinstance(t, Start)), None)\n",
        new="        first = next((t for t in todo if isinstance(t, Start)), None)\n",
        tests="tests/unit/test_storage_executor.py::test_jobs_begin_a_stage_in_order_where_it_asks_for_that",
    ),
    Mutant(
        says="cancelled, what runs is not waited for (buffers in use)",
        file="storage/runtime/executor.py",
        old=("    while tasks:\n        await wait_out(tasks)\n"),
        new="",
        tests="tests/unit/test_storage_executor.py::test_cancelled_it_waits_for_what_runs",
    ),
    Mutant(
        says="packed chunks are written out of order",
        file="storage/pipeline/image_writer.py",
        old="        stages = (Stage('capture', 'cpu'), Stage('hash', 'cpu'), *((Stage('pack', 'cpu'),) if packed else ()), Stage('write', 'io', in_order=packed or traits.part_order != 'any'))\n",
        new="        stages = (Stage('capture', 'cpu'), Stage('hash', 'cpu'), *((Stage('pack', 'cpu'),) if packed else ()), Stage('write', 'io', in_order=traits.part_order != 'any'))\n",
        tests="tests/unit/test_storage_packed.py::test_what_is_saved_comes_back",
    ),
    Mutant(
        says="the first bad block of a partial read is ignored",
        file="storage/pipeline/image_reader.py",
        old="        bad = damaged_blocks(page, pages[image, chunk_start][first:first + len(page)])\n",
        new="        bad = damaged_blocks(page, pages[image, chunk_start][first:first + len(page)])[1:]\n",
        tests="tests/unit/test_storage_damage.py::test_a_slice_is_verified_on_its_own",
    ),
    Mutant(
        says="pages of chunks read in part are not verified themselves",
        file="storage/pipeline/image_reader.py",
        old=(
            "            pages[image, start] = page = bytes(data[a:b])\n"
            "            if digest(page) != expected:\n"
        ),
        new=("            pages[image, start] = page = bytes(data[a:b])\n            if False:\n"),
        tests="tests/unit/test_storage_damage.py::test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data",
    ),
    Mutant(
        says="what an upload holds is not counted",
        file="storage/pipeline/image_writer.py",
        old="            ours_nbytes = max(CHUNK_NBYTES, self._budget_nbytes - traits.upload_nbytes)\n",
        new="            ours_nbytes = max(CHUNK_NBYTES, self._budget_nbytes)\n",
        tests="tests/unit/test_storage_hands_over.py::test_what_an_upload_holds_is_within_the_budget",
    ),
    Mutant(
        says="budget overshot by half a job",
        file="storage/runtime/scheduler.py",
        old="        return needed <= self.budget.memory_nbytes or not self._holding\n",
        new="        return needed <= self.budget.memory_nbytes + self._nbytes[self._waiting[0][0]] // 2 or not self._holding\n",
        tests="tests/property/test_storage_executor.py::test_everything_runs_or_the_first_failure_is_raised",
    ),
]
