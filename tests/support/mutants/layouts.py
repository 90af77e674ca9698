"""Mutants of what recognises layouts, and of the checks of boxes: one line each."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="manifest: boxes may stick out",
        file="storage/format/manifest.py",
        old="    inside = (s.lengths > 0) & (s.lengths <= shape) & (s.offsets <= shape - s.lengths)\n",
        new="    inside = (s.lengths > 0) & (s.lengths <= shape)\n",
        tests="tests/unit/test_storage_boxes.py",
    ),
    Mutant(
        says="manifest: shards may be unaligned",
        file="storage/format/manifest.py",
        old="    yield (bool((s.start % t.itemsize[s.tensor] == 0).all()), 'alignment of shards')\n",
        new="",
        tests="tests/unit/test_storage_boxes.py",
    ),
    Mutant(
        says="load: overlapping shards of a wanted tensor are not refused",
        file="storage/pipeline/image_reader.py",
        old="    _check_coverage(m, targets)\n",
        new="",
        tests="tests/unit/test_storage_boxes.py",
    ),
    Mutant(
        says="merge: an alias that somebody stored stays an alias",
        file="storage/format/merge.py",
        old="    tensors.alias[stored] = -1\n",
        new="",
        tests="tests/unit/test_storage_boxes.py",
    ),
    Mutant(
        says="a local tensor of another shape than its placements imply is taken",
        file="storage/state/adapters/dtensor.py",
        old="        if local.shape != layout.local_shape and (layout.pieces or local.numel()):\n",
        new="        if False:\n",
        tests="tests/distributed/test_foreign.py",
    ),
    Mutant(
        says="hooks of a DTensor are not compared with its placements",
        file="storage/state/adapters/dtensor.py",
        old="    if reported != implied:\n",
        new="    if False:\n",
        tests="tests/distributed/test_foreign.py",
    ),
    Mutant(
        says="a rank alone decides that a state is hollow",
        file="storage/state/flattening/placeholders.py",
        old="    on_all = set.intersection(*(set(of_rank) for of_rank in found))\n",
        new="    on_all = set.union(*(set(of_rank) for of_rank in found))\n",
        tests="tests/unit/test_storage_several_ranks.py",
    ),
    Mutant(
        says="placeholders beside whole tensors are saved",
        file="storage/state/flattening/placeholders.py",
        old="    found |= _without_weights(flat, placeholders)\n",
        new="",
        tests="tests/unit/test_foreign.py",
    ),
    Mutant(
        says="buffers of modules that differ are warned of",
        file="storage/state/divergence.py",
        old="        if container in parameters and text not in parameters[container]:\n",
        new="        if False:\n",
        tests="tests/unit/test_storage_several_ranks.py",
    ),
    Mutant(
        says="the second box of a flat range is put over the first",
        file="planner/layout.py",
        old="    return Regions(row=np.array(rows, np.int64)[at], offsets=offsets, lengths=lengths, local_start=begin - start[at], local_shape=lengths)\n",
        new="    return Regions(row=np.array(rows, np.int64)[at], offsets=offsets, lengths=lengths, local_start=np.zeros_like(begin), local_shape=lengths)\n",
        tests="tests/unit/test_planner_boxes.py::test_columns_of_ranges_hold_the_boxes_of_each",
    ),
    Mutant(
        says="elements of a range that lie apart are taken to lie together",
        file="storage/state/bits.py",
        old="            step = local.stride(0)\n",
        new="            step = 1\n",
        tests="tests/unit/test_storage_shards.py",
    ),
    Mutant(
        says="ranks that hold one part are taken for one rank",
        file="storage/operations/saving/plan_leader.py",
        old="                ranks = layout.holders or (rank,)\n",
        new="                ranks = layout.holders\n",
        tests="tests/unit/test_storage_shards.py",
    ),
]
