"""Run a command with the URI of a server of the tests in place of ``{uri}``.

    python tests/servers/with_server.py s3 holdfast demo {uri}

``make demo SERVER=s3`` and ``make bench-server SERVER=s3`` do this. The servers come with
``make test-servers``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of the tests' shared helpers

from support.servers.start import FINDERS, started


def main() -> int:
    """Return the exit status of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dir", type=Path, help="for the server's data, which is removed")
    parser.add_argument("--datanodes", type=int, default=2, help="of HDFS (default: 2)")
    parser.add_argument("server", choices=FINDERS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with {uri} for the URI")
    given = parser.parse_args()
    if not given.command:
        parser.error("a command is needed")
    if FINDERS[given.server]() is None:
        sys.exit(f"The server for {given.server} is not installed: make test-servers")
    with (
        tempfile.TemporaryDirectory(
            prefix="holdfast-server-", dir=given.dir, ignore_cleanup_errors=True
        ) as folder,
        started(given.server, Path(folder).resolve(), datanodes=given.datanodes) as served,
    ):
        uri, environment = served
        command = [word.replace("{uri}", uri) for word in given.command]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
