"""Mutants of drivers and the layers around them: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="a listing that began anew shows entries twice",
        file="drivers/layers/retry.py",
        old="                return await next_batch(entries, shown)\n",
        new="                return await next_batch(entries, set())\n",
        tests="tests/unit/test_layer_retry.py::test_a_listing_that_breaks_goes_on_without_showing_anything_twice",
    ),
    Mutant(
        says="commit of an upload is tried again",
        file="drivers/layers/retry.py",
        old="_CHANGING = {'put', 'create', 'delete', 'delete_all', 'sweep'}\n",
        new="_CHANGING = {'put', 'create', 'delete', 'delete_all', 'sweep', 'commit'}\n",
        tests="tests/unit/test_layer_retry.py::test_neither_a_part_nor_a_commit_is_sent_again",
    ),
    Mutant(
        says="a local disk's put is tried again",
        file="drivers/layers/retry.py",
        old="        self._again = _READING | (_CHANGING if inner.remote else set())\n",
        new="        self._again = _READING | _CHANGING\n",
        tests="tests/unit/test_layer_retry.py::test_local_storage_is_never_changed_twice",
    ),
    Mutant(
        says="an exclusive put that finds its bytes there at the first try takes them for its own",
        file="drivers/layers/retry.py",
        old="                if not (failed and await self._is_ours(key, data)):\n",
        new="                if not await self._is_ours(key, data):\n",
        tests="tests/unit/test_layer_retry.py::test_an_exclusive_put_whose_first_try_finds_the_key_taken_is_refused",
    ),
    Mutant(
        says="write of a part is tried again",
        file="drivers/layers/retry.py",
        old="_CHANGING = {'put', 'create', 'delete', 'delete_all', 'sweep'}\n",
        new="_CHANGING = {'put', 'create', 'delete', 'delete_all', 'sweep', 'write'}\n",
        tests="tests/unit/test_layer_retry.py::test_neither_a_part_nor_a_commit_is_sent_again",
    ),
    Mutant(
        says="an exclusive put never recognises its own earlier try",
        file="drivers/layers/retry.py",
        old="                failed = True\n",
        new="",
        tests="tests/unit/test_layer_retry.py::test_an_exclusive_put_that_finds_its_own_earlier_try_has_succeeded",
    ),
    Mutant(
        says="an open file that was replaced is read on",
        file="drivers/local/files.py",
        old=("        if file.is_deleted():\n            return False\n"),
        new="",
        tests="tests/unit/test_driver_local.py::test_an_object_that_is_replaced_when_it_was_just_opened_is_read_anew",
    ),
    Mutant(
        says="cached attributes of an open file are believed",
        file="drivers/local/files.py",
        old="            return not self._look_up or _identity(self._tree.status(key)) == file.identity\n",
        new="            return True or _identity(self._tree.status(key)) == file.identity\n",
        tests="tests/unit/test_driver_local_network.py::test_an_object_that_another_host_deletes_is_gone",
    ),
    Mutant(
        says="a leftover is locked for reading",
        file="drivers/local/tree.py",
        old="        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)\n",
        new="        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)\n",
        tests="tests/unit/test_driver_local_network.py::test_a_live_upload_is_not_swept_where_a_lock_needs_a_writer",
    ),
    Mutant(
        says="a bound is taken for a size",
        file="drivers/local/files.py",
        old="        if nbytes < ASKED_MIN_NBYTES or isinstance(nbytes, AtMost):\n",
        new="        if nbytes < ASKED_MIN_NBYTES:\n",
        tests="tests/unit/test_driver_local.py::test_a_file_that_ends_early_is_cut_before_it_is_durable",
    ),
    Mutant(
        says="hedged read: the last byte of the second read is lost",
        file="drivers/layers/hedge.py",
        old="            into[:] = data\n",
        new="            into[:len(data) - 1] = data[:-1]\n",
        tests="tests/unit/test_layer_kinds.py::test_a_slow_read_gets_a_second_one_and_the_faster_is_used",
    ),
    Mutant(
        says="a folder that another process has just made is not fsynced",
        file="drivers/local/tree.py",
        old="            sync_folder(above)\n",
        new="                sync_folder(above)\n",
        tests="tests/unit/test_driver_durability.py::test_folders_of_others_are_synced_once",
    ),
    Mutant(
        says="S3: parts are not cut at multiples",
        file="drivers/objects/uploads.py",
        old="            start = self.reached - self.reached % self.part_nbytes\n",
        new="            start = self.reached\n",
        tests="tests/unit/test_objects_upload.py::test_whatever_is_written_comes_out_once_and_in_order",
    ),
    Mutant(
        says="an EIO of a folder's fsync is ignored",
        file="drivers/local/tree.py",
        old="        if error.errno != errno.EINVAL:\n",
        new="        if error.errno not in (errno.EINVAL, errno.EIO):\n",
        tests="tests/unit/test_driver_durability.py::test_a_failed_step_leaves_nothing_visible",
    ),
    Mutant(
        says="an exclusive put does not fsync its folder",
        file="drivers/local/files.py",
        old="            self._sync_name(file, take_back=was_free)\n",
        new=(
            "            if not exclusive:\n"
            "                self._sync_name(file, take_back=was_free)\n"
        ),
        tests="tests/unit/test_driver_durability.py::test_an_exclusive_put_is_durable_when_it_returns",
    ),
    Mutant(
        says="the parent of the root is not fsynced",
        file="drivers/local/tree.py",
        old=("    try:\n        sync_folder(fd)\n    finally:\n        os.close(fd)\n"),
        new="    os.close(fd)\n",
        tests="tests/unit/test_driver_durability.py::test_a_put_is_durable_when_it_returns",
    ),
    Mutant(
        says="after a short direct write it goes on within a block",
        file="drivers/local/io.py",
        old="        done += count - count % ALIGN_NBYTES\n",
        new="        done += count\n",
        tests="tests/unit/test_driver_local.py::test_a_direct_write_that_stops_within_a_block_goes_on_at_its_start",
    ),
]
