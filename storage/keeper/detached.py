"""A program that executes a keeper, in a session of its own, and ends: so the keeper is nobody's
child. A trainer need not wait for it, and one that ends does not take it along.

A trainer waits for this at its start, so it imports next to nothing.
"""

from __future__ import annotations

import subprocess
import sys


def main(options: str) -> None:
    """``options``: those of the keeper, as JSON."""
    subprocess.Popen(
        [sys.executable, "-m", "holdfast.storage.keeper.process", options],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
