"""The ``holdfast`` command.

``holdfast --help`` answers in under 100 ms. So nothing here or in ``app`` imports torch, numpy or
rich at module level; a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its status."""
    from .app import run

    try:
        status = run(sys.argv[1:])
    except Exception:  # a bug of ours: status 1 would mean "the answer is no"
        import traceback

        traceback.print_exc()
        status = 3
    sys.exit(status)
