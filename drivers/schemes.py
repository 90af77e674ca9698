"""The built-in schemes: the one table that a new one is added to.

Whatever differs between schemes, and has to be known without importing their drivers, is a column
here. ``pyproject.toml`` repeats names and classes as entry points, for tools that read these; a
test compares the two.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UriError

__all__ = ["SCHEMES", "Scheme", "check_installed", "scheme_of"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is known of one scheme."""

    driver: str
    """``module:Class``."""
    example: str = ""
    """A URI to ask about, where ``scheme://example`` will not do."""
    is_path: bool = False
    """The location is an absolute path of this host."""
    fs_types: frozenset[str] = frozenset()
    """Types of file systems on which folders with a ``file`` URI are this driver's, too."""
    modules: tuple[str, ...] = ()
    """Modules that the driver imports. The package of each has its name, with hyphens."""
    probe: str = ""
    """``module:Class`` by which the conformance kit looks past the driver; empty where it has
    none."""


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
    # Serves fsspec+X, for any X.
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
    """The row of a scheme, also of ``fsspec+X``; None where it is not built in."""
    return SCHEMES.get(name.partition("+")[0] if name.startswith("fsspec+") else name)


def check_installed(name: str, uri: str, *more: str) -> None:
    """Raise UriError where a module that the built-in scheme ``name`` needs is not installed.

    ``more`` are modules that only some uses need; ``uri``, redacted, is for the message.
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
    except ModuleNotFoundError:  # the package above it is not installed
        return False
