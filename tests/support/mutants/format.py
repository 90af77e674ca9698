"""Mutants of the format, and what readers believe: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("check_complete: two shards may share bytes of an image", "storage/format/manifest.py", '    _check_disjoint(m, what)\n\n\ndef', '\n\ndef', "tests/unit/test_storage_hostile.py::test_what_a_forged_manifest_claims_is_not_loaded"),
    Mutant("join: images of joined groups misnumbered where a group has none or several", "storage/format/fragment.py", '    before = np.repeat(np.cumsum(counts) - counts, [len(group.shards) for group in groups])\n', '    before = np.repeat(np.cumsum(counts) - 1, [len(group.shards) for group in groups])\n', "tests/unit/test_storage_way.py::test_layouts_are_told_once"),
    Mutant("damaged_blocks does not look at the last block", "storage/format/digest.py", '    n = len(expected) // DIGEST_NBYTES\n', '    n = max(1, len(expected) // DIGEST_NBYTES - 1)\n', "tests/unit/test_storage_damage.py::test_a_slice_is_verified_on_its_own"),
    Mutant("vouched: a tensor that is wanted twice has its shards twice", "storage/format/vouched.py", '        rows = np.unique(tensors)\n', '        rows = np.sort(tensors)\n', "tests/property/test_storage_manifest.py::test_who_takes_a_manifest_as_checked_sees_of_wanted_tensors_what_is_in_it"),
]
