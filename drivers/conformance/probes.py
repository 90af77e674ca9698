"""Probes: direct access to the storage below a driver, to set up trials and to verify results."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Protocol, cast

from ...errors import UriError
from .. import memory
from ..schemes import SCHEMES
from ..uri import Uri, root_key


class Probe(Protocol):
    """Raw objects below one root. Methods block. Keys are the driver's, relative to the same
    root."""

    def write(self, key: str, data: bytes) -> None:
        """Store an object that the driver will find, replacing any with the same key."""

    def read(self, key: str) -> bytes:
        """Return the content of an object. Raises LookupError or OSError if it does not exist."""

    def list(self) -> list[str]:
        """Return everything that uses space below the root, except folders.

        Objects are listed by key. Data of unfinished or dead uploads (temporary files, dangling
        parts) may have any name. An empty or missing root is not an error.
        """


class ProbeClass(Protocol):
    """The class named by ``--driver-probe``."""

    def __call__(self, uri: Uri) -> Probe:
        """Return the probe for the root ``uri``, on which the trial's driver was opened."""


class FolderProbe:
    """Files below the folder that the URI names."""

    def __init__(self, uri: Uri) -> None:
        self._folder = Path(uri.location)

    def write(self, key: str, data: bytes) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def read(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def list(self) -> list[str]:
        return sorted(
            str(path.relative_to(self._folder))
            for path in self._folder.rglob("*")
            if not path.is_dir()
        )


class MemoryProbe:
    """The dict that ``memory://name/prefix`` refers to."""

    def __init__(self, uri: Uri) -> None:
        name, _, prefix = uri.location.partition("/")
        self._objects = memory.STORES.setdefault(name, {})
        self._prefix = root_key(prefix, uri) + "/"

    def write(self, key: str, data: bytes) -> None:
        self._objects[self._prefix + key] = (data, time.time())

    def read(self, key: str) -> bytes:
        return self._objects[self._prefix + key][0]

    def list(self) -> list[str]:
        return sorted(
            key.removeprefix(self._prefix) for key in self._objects if key.startswith(self._prefix)
        )


def probe_class(scheme: str, name: str | None) -> ProbeClass | None:
    """Return the class named ``module:Class``, or the built-in probe of ``scheme`` if no name is
    given.

    Returns None if there is no built-in probe. Raises UriError if the name cannot be imported.
    """
    if name is None:
        built_in = SCHEMES.get(scheme)
        if built_in is None or not built_in.probe:
            return None
        name = built_in.probe
    module, _, attribute = name.partition(":")
    try:
        return cast(ProbeClass, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UriError(
            f"no probe {name}: {error}", advice="Write --driver-probe module:Class."
        ) from error
