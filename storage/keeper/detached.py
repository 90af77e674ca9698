"""Launcher: starts a keeper in a session of its own, and exits.

So the keeper is no child of the trainer: the trainer need not wait for it, and its end does not
take the keeper along. Trainers wait for this program at their start, so it imports next to nothing.
"""

from __future__ import annotations

import subprocess
import sys

TAKE_OVER = "--take-over"
UPGRADE = "--upgrade"


def main(arguments: list[str]) -> None:
    """Start a keeper with these ``arguments``: its options as JSON, and perhaps TAKE_OVER
    or UPGRADE."""
    subprocess.Popen(
        [sys.executable, "-m", "holdfast.storage.keeper.process", *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
