"""Probes: the storage below a driver, reached by other means, to set up and to read back what a
trial is about."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Protocol, cast

from ...errors import UriError
from .. import memory
from ..schemes import SCHEMES
from ..uri import Uri, root_key

__all__ = ["FolderProbe", "MemoryProbe", "Probe", "ProbeClass", "probe_class"]


class Probe(Protocol):
    """Raw objects below one root. Methods block. Keys are those that the driver uses, relative to
    the same root."""

    def write(self, key: str, data: bytes) -> None:
        """Make an object that the driver will find, replacing one of the same key."""

    def read(self, key: str) -> bytes:
        """All bytes of an object. Raises a LookupError or an OSError where there is none."""

    def list(self) -> list[str]:
        """Whatever takes room below the root: objects by their key, and by any name what uploads
        keep there, unfinished or dead (temporary files, dangling parts). Without folders. Nothing
        there is no error."""


class ProbeClass(Protocol):
    """What ``--driver-probe`` names."""

    def __call__(self, uri: Uri) -> Probe:
        """The probe of the root ``uri``. The trial's driver was opened on the same."""


class FolderProbe:
    """Files below a folder: the location of the URI."""

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
    """The dict below ``memory://name/prefix``."""

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
    """The class that ``module:Class`` names; without a name the built-in one for ``scheme``, if
    there is one.

    Raises UriError where the name leads nowhere.
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
