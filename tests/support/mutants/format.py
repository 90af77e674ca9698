"""Mutants of the format, and what readers believe: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="check_complete: two shards may share bytes of an image",
        file="storage/format/manifest.py",
        old="    _check_disjoint(m, what)\n",
        new="",
        tests="tests/unit/test_storage_hostile.py::test_what_a_forged_manifest_claims_is_not_loaded",
    ),
    Mutant(
        says="join: images of joined groups misnumbered where a group has none or several",
        file="storage/format/fragment.py",
        old="    before = np.repeat(np.cumsum(counts) - counts, [len(group.shards) for group in groups])\n",
        new="    before = np.repeat(np.cumsum(counts) - 1, [len(group.shards) for group in groups])\n",
        tests="tests/unit/test_storage_reports_to_the_leader.py::test_a_layout_is_sent_once",
    ),
    Mutant(
        says="damaged_ranges does not look at the last block",
        file="storage/format/chunks.py",
        old="(found != stored).any(axis=1)",
        new="(found != stored)[:max(1, len(found) - 1)].any(axis=1)",
        tests="tests/unit/test_storage_damage.py::test_a_slice_is_verified_on_its_own",
    ),
    Mutant(
        says="verified manifest: a tensor that is wanted twice has its shards twice",
        file="storage/format/manifest.py",
        old="        rows = np.unique(tensors)\n",
        new="        rows = np.sort(tensors)\n",
        tests="tests/property/test_storage_manifest.py::test_who_takes_a_manifest_as_checked_sees_of_wanted_tensors_what_is_in_it",
    ),
]
