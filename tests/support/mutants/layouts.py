"""Mutants of what recognises layouts, and of the checks of boxes: one line each."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("manifest: boxes may stick out", "storage/format/manifest.py", "bool(((s.lengths > 0) & (s.lengths <= t.shape[s.tensor]) & (s.offsets <= t.shape[s.tensor] - s.lengths)).all()),", "bool(((s.lengths > 0) & (s.lengths <= t.shape[s.tensor])).all()),", "tests/unit/test_storage_boxes.py"),
    Mutant("manifest: shards may be unaligned", "storage/format/manifest.py", '    yield bool((s.start % t.itemsize[s.tensor] == 0).all()), "alignment of shards"\n', "", "tests/unit/test_storage_boxes.py"),
    Mutant("load: overlapping shards of a wanted tensor are not refused", "storage/pipeline/image_reader.py", "    _check_coverage(m, targets)\n    return plan_load(", "    return plan_load(", "tests/unit/test_storage_boxes.py"),
    Mutant("merge: an alias that somebody stored stays an alias", "storage/format/merge.py", "    tensors.alias[stored] = -1\n", "", "tests/unit/test_storage_boxes.py"),
    Mutant("a local tensor of another shape than its placements imply is taken", "storage/state/adapters/dtensor.py", "    if local.shape != part.local_shape and (part.pieces or local.numel()):\n", "    if False:\n", "tests/distributed/test_foreign.py"),
    Mutant("hooks of a DTensor are not compared with its placements", "storage/state/adapters/dtensor.py", "    if told != implied:\n", "    if False:\n", "tests/distributed/test_foreign.py"),
    Mutant("a rank alone decides that a state is hollow", "storage/state/placeholders.py", "set.intersection(*(set(opinion) for opinion in told))", "set.union(*(set(opinion) for opinion in told))", "tests/distributed/test_foreign.py"),
    Mutant("placeholders beside whole tensors are saved", "storage/state/placeholders.py", "    found |= _without_weights(flat, placeholders)\n", "", "tests/unit/test_foreign.py"),
    Mutant("buffers of modules that differ are warned of", "storage/state/apart.py", "        if container in parameters and text not in parameters[container]:\n", "        if False:\n", "tests/distributed/test_foreign.py"),
]
