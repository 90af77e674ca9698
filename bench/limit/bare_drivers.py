"""A driver without its layers, for what it knows: where its storage is, and how to connect to it.

A bare client that finds its own way would talk to another endpoint, with other credentials, or sign
otherwise, and would then be the limit of something else.
"""

from __future__ import annotations

from typing import Any

from ...drivers.contract import Driver
from ...drivers.registry import driver_class, resolved_options, serving
from ...drivers.uri import Uri

__all__ = ["bare_driver"]


def bare_driver(uri: Uri) -> Any:
    """The driver that serves ``uri``, with the options that it would have in a save. It touches
    nothing, and its operations are not used: only what it is connected by. Raises what
    :func:`...drivers.registry.open_driver` raises."""
    cls = driver_class(serving(uri))
    own = {
        name: found.text
        for name, found in resolved_options(uri).items()
        if name in cls.OPTIONS and found.text is not None
    }
    driver: Driver = cls.open(Uri(uri.scheme, uri.location, own))
    return driver
