"""Starts one of the servers by name, and stops it at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .azurite import Azurite, find_azurite
from .fake_gcs import FakeGcs, find_fake_gcs
from .hadoop import Hadoop, find_hadoop
from .radosgw import Radosgw, find_ceph

Served = tuple[str, Mapping[str, str]]
"""A URI, and the environment in which clients can use it."""

FINDERS: Mapping[str, Callable[[], object]] = {
    "s3": find_ceph,
    "hdfs": find_hadoop,
    "az": find_azurite,
    "gs": find_fake_gcs,
}
"""Functions that find a server, or return None if it is not installed."""


@contextlib.contextmanager
def started(name: str, folder: Path, *, datanodes: int = 2) -> Iterator[Served]:
    """Run a server that keeps its data below ``folder``, with an empty bucket or container.

    ``datanodes`` is only for HDFS. Raises RuntimeError if the server is not installed or does not
    come up.
    """
    make: Mapping[str, Callable[[Path], Any]] = {
        "s3": Radosgw,
        "hdfs": partial(Hadoop, datanodes=datanodes),
        "az": Azurite,
        "gs": FakeGcs,
    }
    server = make[name](folder)
    try:
        server.start()
        yield server.uri, server.environment()
    finally:
        server.stop()
