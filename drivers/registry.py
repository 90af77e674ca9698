"""Lookup of the driver for a URI: built-in schemes (:mod:`.schemes`) first, then the entry points
of group ``holdfast.drivers``.

A third party registers ``scheme = "module:Driver"`` and cannot override a built-in scheme. The
class provides ``OPTIONS`` and ``open``; see :class:`DriverClass`. Importing this module imports no
driver.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, Protocol, cast

from ..errors import UriError
from .configuration.resolution import Resolved, resolve
from .configuration.tuned import Place, place_of
from .contract import Driver
from .layers.stack import common_options, stacked
from .mounts import fs_type
from .options import Option
from .schemes import SCHEMES, check_installed
from .uri import Uri, join, parse, redact

GROUP = "holdfast.drivers"
"""Entry point group of third-party drivers."""


class DriverClass(Protocol):
    """Interface of a registered class, in addition to :class:`Driver`."""

    OPTIONS: ClassVar[Mapping[str, Option]]
    """Every option of this scheme, apart from those common to all schemes
    (:func:`.layers.stack.common_options`)."""
    remote: ClassVar[bool]
    """See :class:`Driver`."""

    def open(self, uri: Uri) -> Driver:
        """Return the driver for ``uri``, whose options have been validated. Called on the class;
        must not touch the storage."""


def open_driver(
    uri: str | os.PathLike[str] | Uri, writers: int | None = None, /, **options: object
) -> Driver:
    """Return the driver for ``uri``, wrapped in the layers that its options ask for
    (:mod:`.layers`).

    Options come from the URI, else ``options``, the environment, ``holdfast.toml``, or a profile in
    ``tuned.toml`` (:mod:`.configuration`). Does not touch the storage: an unreachable storage fails
    at the first operation. Raises UriError for an unknown scheme or option, listing the known ones,
    and for a driver that cannot be imported. Raises UsageError for a broken ``holdfast.toml`` or
    ``tuned.toml``.

    ``writers`` is the number of processes that will write concurrently. It is passed to a driver
    that has an option of this name, unless that option is set elsewhere.
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


@asynccontextmanager
async def opened_driver(
    uri: str | os.PathLike[str] | Uri, writers: int | None = None, /, **options: object
) -> AsyncIterator[Driver]:
    """Open a driver like :func:`open_driver`, and close it at the end of the block."""
    driver = open_driver(uri, writers, **options)
    try:
        yield driver
    finally:
        await driver.close()


def opened_below(uri: Uri, key: str, /, **options: object) -> AbstractAsyncContextManager[Driver]:
    """Open a driver for ``key`` below ``uri``, or for ``uri`` itself if that is empty, like
    :func:`opened_driver`. Raises UriError for an unsafe key."""
    return opened_driver(join(uri, *key.split("/")) if key else uri, **options)


def resolved_options(uri: Uri, /, **options: object) -> dict[str, Resolved]:
    """Return every option of the driver for ``uri`` and of its layers, with value and origin.
    Raises the errors of :func:`open_driver`."""
    return _resolved(driver_class(serving(uri)), uri, options)


def _resolved(cls: DriverClass, uri: Uri, options: Mapping[str, object]) -> dict[str, Resolved]:
    return resolve(uri, options, cls.OPTIONS, common_options(remote=cls.remote), schemes)


def tuned_place(uri: Uri, /, **options: object) -> Place:
    """Return the place that a tuned profile of ``uri`` belongs to (:mod:`.configuration.tuned`).
    Raises the errors of :func:`open_driver`."""
    resolved = resolved_options(uri, **options)
    texts = {name: found.text for name, found in resolved.items() if found.text is not None}
    return place_of(uri, texts, os.environ, tuple(resolved))


def serving(uri: Uri, fs_type: Callable[[str], str] = fs_type) -> str:
    """Return the scheme whose driver serves ``uri``: ``lustre`` for a ``file`` URI on a Lustre file
    system, otherwise the URI's own. ``fs_type`` returns the file system type of a path."""
    if uri.scheme != "file":
        return uri.scheme
    found = fs_type(uri.location)
    claiming = (name for name, scheme in SCHEMES.items() if found in scheme.fs_types)
    return next(claiming, uri.scheme)


def driver_class(scheme: str) -> DriverClass:
    """Return the class that serves ``scheme``. Raises UriError if the scheme is unknown or its
    driver cannot be imported."""
    if scheme.startswith("fsspec+"):
        check_installed("fsspec", f"{scheme}://")
        from .fsspec.driver import driver_class_of

        return cast(DriverClass, driver_class_of(scheme.removeprefix("fsspec+")))
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
        raise UriError(
            f"the driver of {scheme}://, {target}, is not a Driver with OPTIONS and open()"
        )
    if taken := sorted(cls.OPTIONS.keys() & common_options(remote=True).keys()):
        raise UriError(
            f"the driver of {scheme}://, {target}, declares options that every scheme has: "
            f"{', '.join(taken)}"
        )
    return cast(DriverClass, cls)


def schemes() -> dict[str, str]:
    """Return every scheme that can be opened, with the ``module:Class`` that serves it."""
    # Built-in schemes do not come from package metadata: in a checkout it is as old as the last
    # installation. Importing it is slow, and opening a built-in scheme does not need it.
    from importlib.metadata import entry_points

    registered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    return registered | {name: scheme.driver for name, scheme in SCHEMES.items()}


def packages() -> dict[str, str]:
    """Return the installed package and version that serves each scheme; empty if unknown."""
    from importlib.metadata import entry_points

    found = {
        e.name: f"{e.dist.name} {e.dist.version}" if e.dist else ""
        for e in entry_points(group=GROUP)
    }
    return found | dict.fromkeys(SCHEMES, "holdfast")
