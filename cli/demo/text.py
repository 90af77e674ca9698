"""Real text without a download: the sources of Python's standard library, as bytes.

The batch of a step depends only on the step. So a job that resumes at step 20 with
another number of ranks reads on exactly where the first one stopped, and needs no loader state.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import UsageError

SEQUENCES = 16  # in a batch, over all ranks
LENGTH = 64  # bytes of text in a sequence


def read_text(folder: Path | None = None) -> npt.NDArray[np.uint8]:
    """Return the modules in ``folder``, in name order, as one array of shape (N,).

    The default folder is the running interpreter's standard library. Raises UsageError if there are
    no modules.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise UsageError(
            f"this Python keeps no sources in {folder}",
            advice="Use one that does; it is what the demo reads.",
        )
    return np.frombuffer(text, np.uint8)


def batch(text: npt.NDArray[np.uint8], step: int) -> npt.NDArray[np.int64]:
    """Return the windows of one step, of shape (SEQUENCES, LENGTH + 1): inputs and next bytes."""
    random = np.random.Generator(np.random.Philox(key=step))
    starts = random.integers(0, len(text) - LENGTH, SEQUENCES)
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)
    return windows[starts].astype(np.int64)


def part_of(windows: npt.NDArray[np.int64], rank: int, world: int) -> npt.NDArray[np.int64]:
    """Return the rows of one rank. Raises UsageError unless all ranks get equally many, so that the
    mean over ranks is the mean of the batch."""
    if len(windows) % world:
        raise UsageError(f"{len(windows)} sequences cannot be shared evenly by {world} ranks")
    rows = len(windows) // world
    return windows[rank * rows : (rank + 1) * rows]
