"""Serves a keeper's memory to other hosts, over HTTP.

It listens on loopback unless an interface is given. Everything but ``/health`` needs the run's
token, known only to the ranks of its job. Without a certificate there is no TLS: token and images
cross the network in clear text.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from ....errors import UsageError
from ...serving.options import ServeOptions, is_token

if TYPE_CHECKING:
    from .memory_catalog import MemoryCatalog
    from .memory_server import Hear, MemoryServer


def serve(
    catalog: MemoryCatalog, options: ServeOptions, hear: Hear | None = None
) -> AbstractAsyncContextManager[MemoryServer]:
    """Serve ``catalog`` for the body, with ``hear`` to take reports. Raises UsageError for bad
    options or if aiohttp is not installed, and OSError if the address cannot be used."""
    if not is_token(options.token):
        raise UsageError("the token of a run has 32 hexadecimal digits")
    try:
        from .memory_server import MemoryServer
    except ModuleNotFoundError as error:
        raise UsageError(
            "serving memory to other hosts needs aiohttp, which is not installed",
            advice="pip install aiohttp",
        ) from error
    return MemoryServer(catalog, options, hear)
