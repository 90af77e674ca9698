"""Mutants of between torch and bytes: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="numpy arrays are not copied at the call",
        file="storage/state/capture/lazy.py",
        old="    if flat.tree.arrays:\n",
        new="    if False:\n",
        tests="tests/unit/test_lazy.py::test_call_returns_before_large_tensors_are_copied",
    ),
    Mutant(
        says="plan kept by layout only, not by what was agreed on",
        file="storage/state/plan.py",
        old="    key = (rank, flat.layout_id, agreed)\n",
        new="    key = (rank, flat.layout_id)\n",
        tests="tests/unit/test_storage_reports_to_the_leader.py::test_the_ranks_of_a_host_report_to_the_leader_as_one",
    ),
    Mutant(
        says="tensors whose elements share memory are filled",
        file="storage/state/filling/targets.py",
        old="            problem = _unfillable(local)\n",
        new="            problem = None\n",
        tests="tests/unit/test_storage_load.py::test_expanded_targets_are_refused",
    ),
    Mutant(
        says="a signature without ties",
        file="storage/state/flattening/signature.py",
        old="        self._signature.append((id(layout), row - first, item.shape, strides, item.dtype, item.device, item.is_conj(), item.is_neg()))\n",
        new="        self._signature.append((id(layout), item.shape, strides, item.dtype, item.device, item.is_conj(), item.is_neg()))\n",
        tests="tests/property/test_storage_signature.py::test_no_two_leaves_are_taken_for_each_other",
    ),
    Mutant(
        says="a negated view is filled bit by bit",
        file="storage/state/filling/scatter.py",
        old="    if window.dtype == dtype and (not window.is_conj()) and (not window.is_neg()):\n",
        new="    if window.dtype == dtype and (not window.is_conj()):\n",
        tests="tests/unit/test_storage_tensors.py::test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean",
    ),
]
