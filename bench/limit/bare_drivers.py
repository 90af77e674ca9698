"""A driver without its layers, which tells other clients how to connect to its storage.

A client that finds its own way might use another endpoint, other credentials or another signature.
It would then measure the limit of something else.
"""

from __future__ import annotations

from typing import Any

from ...drivers.contract import Driver
from ...drivers.registry import driver_class, resolved_options, serving
from ...drivers.uri import Uri

__all__ = ["bare_driver"]


def bare_driver(uri: Uri) -> Any:
    """Return the driver that serves ``uri``, with the options that it would have in a save.

    Only its connection settings are used, not its operations. It performs no I/O. Raises what
    :func:`...drivers.registry.open_driver` raises.
    """
    cls = driver_class(serving(uri))
    own = {
        name: found.text
        for name, found in resolved_options(uri).items()
        if name in cls.OPTIONS and found.text is not None
    }
    driver: Driver = cls.open(Uri(uri.scheme, uri.location, own))
    return driver
