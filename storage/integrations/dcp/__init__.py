"""Holdfast as the storage of torch's distributed checkpoint (DCP)::

    dcp.save(state, storage_writer=HoldfastWriter("s3://bucket/run/step-500"))
    dcp.load(state, storage_reader=HoldfastReader("s3://bucket/run/step-500"))

DCP's planners decide which rank writes and reads what; DCP's collectives coordinate the ranks. What
is written is a Holdfast checkpoint like any other, and any Holdfast checkpoint can be read.

Values are stored without pickle. DCP's planners take and hand out values as ``torch.save`` has
serialized them; so a value is serialized here as it is handed to a planner, from what Holdfast has
decoded, and is never read from storage in that form, except for what was kept as opaque.
"""

from __future__ import annotations

from .reader import HoldfastReader
from .writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
