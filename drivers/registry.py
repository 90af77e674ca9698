"""From a URI to its driver. Built-in schemes (:mod:`.schemes`) first, then the entry points of
group ``holdfast.drivers``.

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
from .configuration.tuned import Place, place_of
from .contract import Driver
from .layers.stack import common_options, stacked
from .local.mounts import fs_type, mount_of
from .options import Option
from .schemes import SCHEMES, check_installed
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
    "tuned_place",
]

GROUP = "holdfast.drivers"
"""The entry point group."""


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

    Options come from the URI, else from ``options``, the environment, ``holdfast.toml``, or a
    profile of ``tuned.toml`` (:mod:`.configuration`). Storage is not touched: that it cannot be
    reached is found out at the first operation. Raises UriError for an unknown scheme or option,
    naming the known ones, and for a driver that cannot be imported; UsageError for a broken
    ``holdfast.toml`` or ``tuned.toml``.

    ``writers``: how many processes are going to write at the same time. A driver that has an option
    of this name is given it, unless the option is given elsewhere.
    """
    if not isinstance(uri, Uri):
        uri = parse(uri)
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
    return resolve(
        uri,
        options,
        cls.OPTIONS,
        common_options(remote=cls.remote),
        schemes,
        mount_of=mount_of,
    )


def tuned_place(uri: Uri, /, **options: object) -> Place:
    """The place that a profile of ``uri`` is for (:mod:`.configuration.tuned`). Raises as
    open_driver."""
    resolved = resolved_options(uri, **options)
    texts = {name: found.text for name, found in resolved.items() if found.text is not None}
    return place_of(uri, texts, os.environ, tuple(resolved), mount_of)


def serving(uri: Uri, fs_type: Callable[[str], str] = fs_type) -> str:
    """The scheme whose driver serves ``uri``: its own; but for a ``file`` URI of a folder on Lustre
    it is ``lustre``. ``fs_type`` tells the type of the file system that holds a path."""
    if uri.scheme != "file":
        return uri.scheme
    found = fs_type(uri.location)
    claiming = (name for name, scheme in SCHEMES.items() if found in scheme.fs_types)
    return next(claiming, uri.scheme)


def driver_class(scheme: str) -> DriverClass:
    """The class that serves ``scheme``. Raises UriError where there is none, or where it cannot be
    imported."""
    if scheme.startswith("fsspec+"):
        return _fsspec_class(scheme)
    built_in = SCHEMES.get(scheme)
    if built_in is None:
        target = schemes().get(scheme)
    else:
        target = built_in.driver
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
    check_installed("fsspec", f"{scheme}://")
    from .fsspec.driver import driver_class_of

    return cast(DriverClass, driver_class_of(scheme.removeprefix("fsspec+")))


def schemes() -> dict[str, str]:
    """Every scheme that can be opened, with the ``module:Class`` that serves it."""
    # Our own metadata is not relied on: in a checkout it is as old as the last installation. And it
    # is slow to import, and not needed to open a built-in scheme.
    from importlib.metadata import entry_points

    registered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return registered | {name: scheme.driver for name, scheme in SCHEMES.items()}


def packages() -> dict[str, str]:
    """By scheme, the installed package that serves it, with its version; empty where that cannot be
    told."""
    from importlib.metadata import entry_points

    found = {
        e.name: f"{e.dist.name} {e.dist.version}" if e.dist else ""
        for e in entry_points(group=GROUP)
    }
    return found | dict.fromkeys(SCHEMES, "holdfast")
