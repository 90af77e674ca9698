"""Mutants of saves, loads, copies and the commit: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="begin: the storage is not asked whether it ignores exclusive puts",
        file="storage/protocol/commit.py",
        old="        *_, survey = await side_by_side(check_exclusive_puts(driver, attempt), wait_for_prunings(driver, partial(time_of_marker_s, driver, attempt)), survey_attempts(driver, attempt))\n",
        new="        *_, survey = await side_by_side(wait_for_prunings(driver, partial(time_of_marker_s, driver, attempt)), survey_attempts(driver, attempt))\n",
        tests="tests/unit/test_storage_preflight.py::test_a_storage_that_ignores_exclusive_puts_is_refused_before_anything_is_written",
    ),
    Mutant(
        says="copies and prunings do not ask the storage",
        file="storage/protocol/attempt.py",
        old="        await check_exclusive_puts(driver, attempt)\n",
        new="",
        tests="tests/unit/test_storage_preflight.py::test_a_copy_and_a_pruning_ask_the_storage_likewise",
    ),
    Mutant(
        says="a trial that came late counts as a marker",
        file="storage/protocol/attempt.py",
        old=("    if info.nbytes == TRIAL_NBYTES:\n        raise await lost(driver, attempt)\n"),
        new="",
        tests="tests/unit/test_storage_preflight.py::test_a_trial_that_comes_late_is_taken_for_no_marker",
    ),
    Mutant(
        says="one answer that the marker is missing is believed",
        file="storage/protocol/attempt.py",
        old="        info = await _second_look(driver, attempt)\n",
        new="        raise await lost(driver, attempt) from None\n",
        tests="tests/unit/test_storage_preflight.py::test_one_false_answer_that_the_marker_is_missing_does_not_fail_a_save",
    ),
    Mutant(
        says="preflight: one put that is accepted condemns the storage",
        file="storage/protocol/preflight.py",
        old="_TRIES = 3\n",
        new="_TRIES = 1\n",
        tests="tests/unit/test_storage_preflight.py::test_a_marker_that_is_deleted_meanwhile_is_no_fault_of_the_storage",
    ),
    Mutant(
        says="commit: the commit record is not read back",
        file="storage/protocol/commit.py",
        old="    *_, (before, obsolete) = await side_by_side(check_marker(driver, attempt), check_images(driver, manifest), _check_record(driver, attempt, record), _replaced(driver, attempt, now_s))\n",
        new="    *_, (before, obsolete) = await side_by_side(check_marker(driver, attempt), check_images(driver, manifest), _replaced(driver, attempt, now_s))\n",
        tests="tests/unit/test_storage_preflight.py::test_a_storage_that_cannot_answer_ranges_fails_the_save_and_not_the_load",
    ),
    Mutant(
        says="commit: putting() after the put (attempt is deleted though its manifest may be there)",
        file="storage/protocol/commit.py",
        old="    putting()\n    for _ in range(_PUTS):\n        await driver.put(MANIFEST_KEY, data)\n",
        new="    for _ in range(_PUTS):\n        await driver.put(MANIFEST_KEY, data)\n        putting()\n",
        tests="tests/unit/test_storage_atomicity.py::test_a_save_that_fails_at_any_access_leaves_a_whole_checkpoint",
    ),
    Mutant(
        says="commit: no check of the marker after the commit record",
        file="storage/protocol/commit.py",
        old="    *_, (before, obsolete) = await side_by_side(check_marker(driver, attempt), check_images(driver, manifest), _check_record(driver, attempt, record), _replaced(driver, attempt, now_s))\n",
        new="    *_, (before, obsolete) = await side_by_side(check_images(driver, manifest), _check_record(driver, attempt, record), _replaced(driver, attempt, now_s))\n",
        tests="tests/unit/test_storage_atomicity.py::test_a_save_that_was_overtaken_is_told_so_and_changes_nothing",
    ),
    Mutant(
        says="announce: marker not put exclusively",
        file="storage/protocol/attempt.py",
        old="    await driver.put(attempt.marker_key, data, exclusive=True)\n",
        new="    await driver.put(attempt.marker_key, data)\n",
        tests="tests/unit/test_storage_atomicity.py::test_a_request_that_the_storage_did_twice_does_not_fail_a_save",
    ),
    Mutant(
        says="abandon: deletes an attempt that was settled by another owner, though it is the checkpoint",
        file="storage/protocol/commit.py",
        old=(
            "            if await current_attempt(driver) != attempt.id:\n"
            "                await delete_attempt(driver, attempt)\n"
        ),
        new="            await delete_attempt(driver, attempt)\n",
        tests="tests/unit/test_storage_commit_records.py::test_a_copy_is_settled_and_another_one_of_the_same_leaves_it_alone",
    ),
    Mutant(
        says="commit: manifest gone by a pruning is not put again",
        file="storage/protocol/commit.py",
        old="        if await _is_kept(driver, data, {before, attempt.id}):\n            return obsolete\n",
        new="        return obsolete\n",
        tests="tests/simulation/test_simulator.py::test_a_rare_schedule_catches_the_engine_that_it_was_found_for",
    ),
    Mutant(
        says="commit: the manifest of the checkpoint before counts as the one that was put",
        file="storage/protocol/commit.py",
        old="        if await _is_kept(driver, data, {before, attempt.id}):\n",
        new="        if await _is_kept(driver, data, {attempt.id}):\n",
        tests="tests/unit/test_storage_preflight.py::test_a_storage_that_never_keeps_the_manifest_fails_the_save",
    ),
    Mutant(
        says="delete_manifest: no second look after the lock",
        file="storage/protocol/prune_lock.py",
        old=(
            "    is_current = False\n"
            "    try:\n"
            "        is_current = await current_attempt(driver) == attempt.id\n"
        ),
        new=("    is_current = True\n    try:\n        pass\n"),
        tests="tests/simulation/test_simulator.py::test_promises_hold_in_known_and_in_fresh_schedules",
    ),
    Mutant(
        says="two saves of one process to one URI do not take turns",
        file="storage/operations/saving/start_save.py",
        old=(
            "        if before is not None:\n"
            "            await asyncio.wait([asyncio.wrap_future(before)])\n"
            "        if self._queued.events:\n"
        ),
        new="        if self._queued.events:\n",
        tests="tests/unit/test_storage_atomicity.py::test_two_saves_of_one_process_to_one_uri_take_turns",
    ),
    Mutant(
        says="delete_attempt: marker last",
        file="storage/protocol/attempt.py",
        old=(
            "        await driver.delete(attempt.marker_key)\n"
            "        await driver.delete_all(attempt.prefix)\n"
        ),
        new=(
            "        await driver.delete_all(attempt.prefix)\n"
            "        await driver.delete(attempt.marker_key)\n"
        ),
        tests="tests/unit/test_storage_commit_records.py::test_a_deletion_that_dies_halfway_leaves_no_marker",
    ),
    Mutant(
        says="layouts are sent each time (perf only)",
        file="storage/operations/saving/save.py",
        old="    plan.sent_layouts.update((group.layout.key for group in fragment.groups))\n",
        new="",
        tests="tests/unit/test_storage_reports_to_the_leader.py::test_a_layout_is_sent_once",
    ),
    Mutant(
        says="replaced data is never deleted",
        file="storage/operations/saving/save.py",
        old=(
            "        if self._obsolete is not None:\n"
            "            await delete_attempt(self._driver, self._obsolete)\n"
        ),
        new="",
        tests="tests/unit/test_storage_atomicity.py::test_a_checkpoint_is_a_manifest_and_one_attempt",
    ),
    Mutant(
        says="pruning deletes the marker before the manifest",
        file="storage/operations/maintenance/prune.py",
        old=(
            "    if not await delete_manifest(driver, attempt):\n"
            "        return False\n"
            "    await driver.delete(attempt.marker_key)\n"
        ),
        new=(
            "    await driver.delete(attempt.marker_key)\n"
            "    if not await delete_manifest(driver, attempt):\n"
            "        return False\n"
        ),
        tests="tests/unit/test_storage_prune.py::test_the_manifest_goes_first",
    ),
    Mutant(
        says="wait_for_prunings: never waits",
        file="storage/protocol/prune_lock.py",
        old="        if await now_s() - since_s > limits.GRACE_S:\n",
        new="        if await now_s() - since_s >= 0:\n",
        tests="tests/simulation/test_simulator.py::test_a_rare_schedule_catches_the_engine_that_it_was_found_for",
    ),
    Mutant(
        says="copy: another one that was faster is replaced / not-overwrite not asked again",
        file="storage/operations/maintenance/copy.py",
        old="        if pair.same is None and await _same(ours, pair.identity, orders) is not None:\n",
        new="        if False:\n",
        tests="tests/unit/test_storage_copy.py::test_two_copies_of_one_checkpoint_to_one_place",
    ),
    Mutant(
        says="negative index",
        file="storage/operations/reading/shares.py",
        old="    return (index % size, 1, 0, False)\n",
        new="    return (index if index >= 0 else size - index, 1, 0, False)\n",
        tests="tests/unit/test_storage_reader.py::test_an_index_means_what_it_means_to_numpy",
    ),
    Mutant(
        says="read_manifest does not check completeness",
        file="storage/protocol/current.py",
        old="        check_complete(manifest, 'the manifest')\n",
        new="",
        tests="tests/unit/test_storage_hostile.py::test_what_a_forged_manifest_claims_is_not_loaded",
    ),
    Mutant(
        says="resumed copy: size alone tells that an image is whole",
        file="storage/pipeline/image_copier.py",
        old="                    await reader.read_pages(image, starts)\n",
        new="",
        tests="tests/unit/test_storage_copy.py::test_what_is_no_whole_image_is_sent_again",
    ),
    Mutant(
        says="a copy resumes an attempt that has a commit or abort record",
        file="storage/protocol/commit.py",
        old="        is_open = not files.has_record and now_s - files.written_s < idle_s\n",
        new="        is_open = now_s - files.written_s < idle_s\n",
        tests="tests/unit/test_storage_copy.py::test_a_copy_that_fails_at_any_access_leaves_a_whole_checkpoint",
    ),
    Mutant(
        says="pruning does not ask whether the attempt is settled",
        file="storage/operations/maintenance/prune.py",
        old=(
            "    if not await is_settled(driver, attempt, partial(storage_time_s, driver)):\n"
            "        return False\n"
        ),
        new="",
        tests="tests/unit/test_storage_commit_records.py::test_a_pruning_between_the_two_deletes_nothing_that_is_named_again",
    ),
]
