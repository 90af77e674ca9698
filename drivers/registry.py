"""From a URI to its driver. Built-in schemes first, then the entry points of group
``holdfast.drivers``.

A third party registers ``scheme = "module:Driver"``; it cannot take a built-in scheme. The class
offers ``OPTIONS`` and ``open``, see :class:`DriverClass`. Importing this module imports no driver.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, cast

from ..errors import UriError
from .configuration.resolution import Resolved, resolve
from .contract import Driver
from .layers.stack import common_options, stacked
from .local.mounts import LUSTRE_TYPES, fs_type
from .options import Option
from .uri import Uri, parse, redact

__all__ = [
    "GROUP",
    "DriverClass",
    "driver_class",
    "open_driver",
    "packages",
    "resolved_options",
    "schemes",
    "serving",
]

GROUP = "holdfast.drivers"
"""The entry point group."""

# Not read from our own metadata: that is stale in a checkout that was installed before a driver was
# added.
_BUILT_IN = {
    "file": "holdfast.drivers.local.driver:LocalDriver",
    "lustre": "holdfast.drivers.lustre.driver:LustreDriver",
    "fsspec": "holdfast.drivers.fsspec.driver:FsspecDriver",  # of fsspec+X, for any X
    "hdfs": "holdfast.drivers.hdfs.driver:HdfsDriver",
    "memory": "holdfast.drivers.memory:MemoryDriver",
    "s3": "holdfast.drivers.objects.s3:S3Driver",
    "gs": "holdfast.drivers.objects.clouds:GcsDriver",
    "az": "holdfast.drivers.objects.clouds:AzureDriver",
    "http": "holdfast.drivers.objects.http:HttpDriver",
    "https": "holdfast.drivers.objects.http:HttpDriver",
}


class DriverClass(Protocol):
    """What a registered name leads to, besides being a :class:`Driver`."""

    OPTIONS: ClassVar[Mapping[str, Option]]
    """Every option of this scheme, besides those that every scheme has
    (:func:`.layers.stack.common_options`)."""
    remote: ClassVar[bool]
    """See :class:`Driver`."""

    def open(self, uri: Uri) -> Driver:
        """The driver for ``uri``, whose options are known and valid. Called on the class; leaves
        the storage alone."""


def open_driver(
    uri: str | os.PathLike[str] | Uri, writers: int | None = None, /, **options: object
) -> Driver:
    """The driver for ``uri``, within the layers that its options ask for (:mod:`.layers`).

    Options come from the URI, else from ``options``, the environment, or ``holdfast.toml``
    (:mod:`.config`). Storage is not touched: that it cannot be reached is found out at the first
    operation. Raises UriError for an unknown scheme or option, naming the known ones, and for a
    driver that cannot be imported; UsageError for a broken ``holdfast.toml``.

    ``writers``: how many processes are going to write at the same time. A driver that has an option
    of this name is told, where nobody says otherwise.
    """
    uri = uri if isinstance(uri, Uri) else parse(uri)
    cls = driver_class(serving(uri))
    resolved = _resolved(cls, uri, options)
    own = {
        name: found.text
        for name, found in resolved.items()
        if name in cls.OPTIONS and found.text is not None
    }
    if writers is not None and "writers" in cls.OPTIONS:
        own.setdefault("writers", str(writers))
    driver = cls.open(Uri(uri.scheme, uri.location, own))
    values = {name: found.value for name, found in resolved.items() if name not in cls.OPTIONS}
    return stacked(driver, values, store=f"{uri.scheme}://{redact(uri.location).partition('/')[0]}")


def resolved_options(uri: Uri, /, **options: object) -> dict[str, Resolved]:
    """Every option of the driver for ``uri`` and of its layers: value, and where it comes from.
    Raises as open_driver."""
    return _resolved(driver_class(serving(uri)), uri, options)


def _resolved(cls: DriverClass, uri: Uri, options: Mapping[str, object]) -> dict[str, Resolved]:
    return resolve(uri, options, cls.OPTIONS, common_options(remote=cls.remote), schemes)


def serving(uri: Uri, fs_type: Callable[[str], str] = fs_type) -> str:
    """The scheme whose driver serves ``uri``: its own; but ``lustre`` for a ``file`` URI of a
    folder on Lustre. ``fs_type`` tells the type of the file system that holds a path."""
    on_lustre = uri.scheme == "file" and fs_type(uri.location) in LUSTRE_TYPES
    return "lustre" if on_lustre else uri.scheme


def driver_class(scheme: str) -> DriverClass:
    """The class that serves ``scheme``. Raises UriError where there is none, or where it cannot be
    imported."""
    if scheme.startswith("fsspec+"):
        return _fsspec_class(scheme)
    target = _BUILT_IN.get(scheme) or schemes().get(scheme)
    if target is None:
        raise UriError(
            f"no driver for {scheme}://", advice=f"Known schemes: {', '.join(sorted(schemes()))}."
        )
    module_name, _, name = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UriError(
            f"the driver of {scheme}://, {target}, cannot be imported: {error}"
        ) from error
    if not (
        isinstance(cls, type)
        and issubclass(cls, Driver)
        and hasattr(cls, "OPTIONS")
        and hasattr(cls, "open")
    ):
        raise UriError(f"the driver of {scheme}://, {target}, is no Driver with OPTIONS and open()")
    if taken := sorted(cls.OPTIONS.keys() & common_options(remote=True).keys()):
        raise UriError(
            f"the driver of {scheme}://, {target}, declares what every scheme has: "
            f"{', '.join(taken)}"
        )
    return cast(DriverClass, cls)


def _fsspec_class(scheme: str) -> DriverClass:
    try:
        from .fsspec.driver import driver_class_of
    except ImportError as error:
        raise UriError(
            f"{scheme}:// needs fsspec: {error}",
            advice="pip install 'holdfast-checkpoint[fsspec]'.",
        ) from error
    return cast(DriverClass, driver_class_of(scheme.removeprefix("fsspec+")))


def schemes() -> dict[str, str]:
    """Every scheme that can be opened, with the ``module:Class`` that serves it."""
    from importlib.metadata import (
        entry_points,
    )  # slow to import, and not needed for a built-in scheme

    return {entry.name: entry.value for entry in entry_points(group=GROUP)} | _BUILT_IN


def packages() -> dict[str, str]:
    """By scheme, the installed package that serves it, with its version; empty where that cannot be
    told."""
    from importlib.metadata import entry_points

    found = {
        e.name: f"{e.dist.name} {e.dist.version}" if e.dist else ""
        for e in entry_points(group=GROUP)
    }
    return found | dict.fromkeys(_BUILT_IN, "holdfast")
