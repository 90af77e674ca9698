"""Run a command against a server of the tests: boots it, puts its URI in place of ``{uri}``, and
stops it afterwards.

    python tests/servers/with_server.py s3 holdfast demo {uri}

What ``make demo SERVER=s3`` does. The servers come with ``make test-servers``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests find what they share

from support.servers.azurite import Azurite, find_azurite
from support.servers.fake_gcs import FakeGcs, find_fake_gcs
from support.servers.hadoop import Hadoop, find_hadoop
from support.servers.radosgw import Radosgw, find_ceph

Served = tuple[str, Mapping[str, str]]
"""A URI, and the environment in which it can be used."""


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Served]:
    """A radosgw with an empty bucket."""
    if find_ceph() is None:
        sys.exit("radosgw is not installed: make test-servers")
    server = Radosgw(folder)
    server.start()
    try:
        server.client().create_bucket(Bucket="holdfast")
        yield f"s3://holdfast?endpoint={server.endpoint}", server.environment()
    finally:
        server.stop()


@contextlib.contextmanager
def hdfs(folder: Path) -> Iterator[Served]:
    """A Hadoop of one name node and two DataNodes."""
    if find_hadoop() is None:
        sys.exit("Hadoop is not installed: make test-servers")
    server = Hadoop(folder)
    server.start()
    try:
        yield server.uri, {}
    finally:
        server.stop()


@contextlib.contextmanager
def az(folder: Path) -> Iterator[Served]:
    """An Azurite with an empty container."""
    if find_azurite() is None:
        sys.exit("Azurite is not installed: make test-servers, with npm")
    server = Azurite(folder)
    try:
        server.start()
        yield server.uri, server.environment()
    finally:
        server.stop()


@contextlib.contextmanager
def gs(folder: Path) -> Iterator[Served]:
    """A fake-gcs-server with an empty bucket."""
    if find_fake_gcs() is None:
        sys.exit("fake-gcs-server is not installed: make test-servers")
    server = FakeGcs(folder)
    try:
        server.start()
        yield server.uri, server.environment()
    finally:
        server.stop()


SERVERS = {"s3": s3, "hdfs": hdfs, "az": az, "gs": gs}


def main(arguments: Sequence[str]) -> int:
    """The exit status of the command."""
    if len(arguments) < 2 or arguments[0] not in SERVERS:
        print(
            f"usage: with_server.py {'|'.join(SERVERS)} COMMAND… with {{uri}} among its words",
            file=sys.stderr,
        )
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        SERVERS[arguments[0]](Path(folder)) as (uri, environment),
    ):
        command = [word.replace("{uri}", uri) for word in arguments[1:]]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
