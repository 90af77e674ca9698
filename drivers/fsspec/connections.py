"""Connecting and disconnecting fsspec's file systems. All functions block."""

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
    """Return a new, unshared file system that does not cache listings. Raises the errors of its
    library."""
    if kind.listings:
        uncached = {"use_listings_cache": False}
    else:
        uncached = {}
    fs = cls(skip_instance_cache=True, **uncached, **arguments)
    if _is_sftp(fs):
        # paramiko waits for the reply to each 32 KiB that it writes. With Nagle's algorithm, the
        # kernel holds back the end of each request until the previous one is acknowledged: 30 ms
        # per request, 1 MB/s.
        fs.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return fs


def disconnect(fs: AbstractFileSystem) -> None:
    """Close a file system's connections immediately. fsspec has no method for this and relies on
    garbage collection."""
    if _is_sftp(fs):  # closes a thread, too
        fs.client.close()
    session = getattr(fs, "_s3", None) or getattr(fs, "_session", None)
    if session is not None and hasattr(fs, "close_session"):  # s3fs, gcsfs, http
        with contextlib.suppress(Exception):
            fs.close_session(fs.loop, session)


def _is_sftp(fs: AbstractFileSystem) -> bool:
    return hasattr(fs, "client") and hasattr(fs, "ftp")
