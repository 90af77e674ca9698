"""Mutants of how bytes move: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

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
        old="        if not self._pending:\n",
        new="        if True:\n",
        tests="tests/property/test_storage_executor.py::test_jobs_begin_a_stage_in_order_where_it_asks_for_that",
    ),
    Mutant(
        says="cancelled, what runs is not waited for (buffers in use)",
        file="storage/runtime/executor.py",
        old="        cancelled = await wait_out([run.ended], on_cancel=run.cancel)\n",
        new=(
            "        cancelled = None\n"
            "        try:\n"
            "            await run.ended\n"
            "        except asyncio.CancelledError as error:\n"
            "            run.cancel()\n"
            "            cancelled = error\n"
        ),
        tests="tests/property/test_storage_executor.py::test_cancelled_it_waits_for_what_runs",
    ),
    Mutant(
        says="packed chunks are written out of order",
        file="storage/pipeline/image_writer.py",
        old="        in_order = self._packing is not None or self._driver.traits.part_order != 'any'\n",
        new="        in_order = self._driver.traits.part_order != 'any'\n",
        tests="tests/unit/test_storage_capture.py::test_packed_chunks_wait_for_those_before_them",
    ),
    Mutant(
        says="the first bad block of a partial read is ignored",
        file="storage/format/chunks.py",
        old=".any(axis=1))",
        new=".any(axis=1))[1:]",
        tests="tests/unit/test_storage_damage.py::test_a_slice_is_verified_on_its_own",
    ),
    Mutant(
        says="pages of chunks read in part are not verified themselves",
        file="storage/pipeline/image_reader.py",
        old="            if digest(page) != chunk.digest:\n",
        new="            if False:\n",
        tests="tests/unit/test_storage_damage.py::test_damage_to_the_checksums_does_not_pass_for_damage_to_the_data",
    ),
    Mutant(
        says="what an upload holds is not counted",
        file="storage/pipeline/image_writer.py",
        old="    ours = max(1, (budget_nbytes - traits.upload_nbytes) // chunk_nbytes)\n",
        new="    ours = max(1, budget_nbytes // chunk_nbytes)\n",
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
