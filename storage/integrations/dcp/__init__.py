"""Holdfast as the storage of torch's distributed checkpoint (DCP)::

    dcp.save(state, storage_writer=HoldfastWriter("s3://bucket/run/step-500"))
    dcp.load(state, storage_reader=HoldfastReader("s3://bucket/run/step-500"))

DCP's planners decide which rank writes and reads what; DCP's collectives coordinate the ranks. The
result is a Holdfast checkpoint like any other, and any Holdfast checkpoint can be read.

Values are stored without pickle. DCP's planners exchange values in the form of ``torch.save``, so
the reader serializes each decoded value for the planner. That form is never read from storage,
except for values that were saved as opaque, and in folders that DCP's own writer has saved
(:mod:`.stock`).
"""

from __future__ import annotations

from .reader import HoldfastReader
from .writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
