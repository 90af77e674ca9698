"""The table of built-in schemes. To add a scheme, add a row.

A column holds everything that differs between schemes and must be known without importing their
drivers. ``pyproject.toml`` repeats names and classes as entry points for tools that read those; a
test compares the two.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UriError


@dataclass(frozen=True, slots=True)
class Scheme:
    """Properties of one scheme."""

    driver: str
    """Driver class as ``module:Class``."""
    example: str = ""
    """Example URI, if ``scheme://example`` is not valid."""
    is_path: bool = False
    """True if the location is an absolute path on this host."""
    fs_types: frozenset[str] = frozenset()
    """File system types on which this driver also serves ``file`` URIs."""
    modules: tuple[str, ...] = ()
    """Modules that the driver imports. Each module's package has the same name, with hyphens."""
    probe: str = ""
    """``module:Class`` of the probe with which the conformance kit bypasses the driver; empty if
    there is none."""


_FOLDER_PROBE = "holdfast.drivers.conformance.probes:FolderProbe"

SCHEMES: Mapping[str, Scheme] = {
    "file": Scheme(
        "holdfast.drivers.local.driver:LocalDriver",
        example="file:///",
        is_path=True,
        probe=_FOLDER_PROBE,
    ),
    "lustre": Scheme(
        "holdfast.drivers.lustre.driver:LustreDriver",
        example="lustre:///",
        is_path=True,
        fs_types=frozenset({"lustre", "lustre_lite"}),
        probe=_FOLDER_PROBE,
    ),
    # Also serves fsspec+X for any X.
    "fsspec": Scheme(
        "holdfast.drivers.fsspec.driver:FsspecDriver",
        example="fsspec+memory://example",
        modules=("fsspec",),
    ),
    "hdfs": Scheme(
        "holdfast.drivers.hdfs.driver:HdfsDriver",
        example="hdfs://example:8020/",
        modules=("hdfs_native",),
    ),
    "memory": Scheme(
        "holdfast.drivers.memory:MemoryDriver",
        probe="holdfast.drivers.conformance.probes:MemoryProbe",
    ),
    "s3": Scheme("holdfast.drivers.objects.s3:S3Driver", modules=("obstore", "botocore")),
    "gs": Scheme("holdfast.drivers.objects.gs:GcsDriver", modules=("obstore",)),
    "az": Scheme("holdfast.drivers.objects.az:AzureDriver", modules=("obstore",)),
    "peer": Scheme("holdfast.drivers.peer.driver:PeerDriver", example="peer://example:8700/"),
    "http": Scheme("holdfast.drivers.objects.http:HttpDriver", modules=("obstore",)),
    "https": Scheme("holdfast.drivers.objects.http:HttpDriver", modules=("obstore",)),
}


def scheme_of(name: str) -> Scheme | None:
    """Return the entry for a scheme, including ``fsspec+X``; None if it is not built in."""
    return SCHEMES.get(name.partition("+")[0] if name.startswith("fsspec+") else name)


def check_installed(name: str, uri: str, *more: str) -> None:
    """Raise UriError if a module needed by the built-in scheme ``name`` is not installed.

    ``more`` lists modules that only some uses need. ``uri``, redacted, appears in the message.
    """
    modules = (*SCHEMES[name].modules, *more)
    missing = [module for module in modules if not _is_installed(module)]
    if missing:
        packages = [re.sub("[._]", "-", module) for module in missing]
        raise UriError(
            f"{name}:// needs {' and '.join(missing)}",
            uri=uri,
            advice=f"pip install {' '.join(packages)}",
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
