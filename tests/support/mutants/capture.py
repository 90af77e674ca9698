"""Mutants of between torch and bytes: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("numpy arrays are not copied at the call", "storage/state/lazy.py", '    if flat.tree.arrays:\n', '    if False:\n', "tests/unit/test_lazy.py::test_the_call_returns_before_anything_is_copied"),
    Mutant("plan kept by layout only, not by what was agreed on", "storage/state/plan.py", '    key = (rank, flat.kin, agreed)  # a plan follows from these alone\n', '    key = (rank, flat.kin)\n', "tests/unit/test_storage_way.py::test_a_host_tells_the_leader_once"),
    Mutant("tensors whose elements share memory are filled", "storage/state/targets.py", '        problem = problem or (None if local.is_contiguous() else _unfillable(local))\n', '', "tests/unit/test_storage_load.py::test_expanded_targets_are_refused"),
    Mutant("trace without ties", "storage/state/signature.py", '            (id(part), row - first, item.shape,', '            (id(part), item.shape,', "tests/property/test_storage_glance.py::test_no_two_leaves_are_taken_for_each_other"),
    Mutant("a negated view is filled bit by bit", "storage/state/scatter.py", '    if window.dtype == dtype and not window.is_conj() and not window.is_neg():\n', '    if window.dtype == dtype and not window.is_conj():\n', "tests/unit/test_storage_tensors.py::test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean"),
]
