"""The connections of fsspec's file systems: how one is made, and how it ends at once. All functions
block."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem

from .kinds import Kind

__all__ = ["connected", "disconnect"]


def connected(
    cls: type[AbstractFileSystem], kind: Kind, arguments: Mapping[str, Any]
) -> AbstractFileSystem:
    """A file system that is not shared, and that caches no listings. Raises whatever its library
    raises."""
    if kind.listings:
        uncached = {"use_listings_cache": False}
    else:
        uncached = {}
    fs = cls(skip_instance_cache=True, **uncached, **arguments)
    if _is_sftp(fs):
        # paramiko waits for the answer to each 32 KiB that it writes. With Nagle's algorithm the
        # kernel keeps the end of each request back until the one before it is acknowledged: 30 ms a
        # request, 1 MB/s.
        fs.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return fs


def disconnect(fs: AbstractFileSystem) -> None:
    """Close a file system's connections now: fsspec has no word for it, and waits for the garbage
    to be collected."""
    if _is_sftp(fs):  # its connection has a thread
        fs.client.close()
    session = getattr(fs, "_s3", None) or getattr(fs, "_session", None)
    if session is not None and hasattr(fs, "close_session"):  # s3fs, gcsfs, http
        with contextlib.suppress(Exception):
            fs.close_session(fs.loop, session)


def _is_sftp(fs: AbstractFileSystem) -> bool:
    return hasattr(fs, "client") and hasattr(fs, "ftp")
