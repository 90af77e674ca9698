"""Options of a keeper."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KeeperOptions", "cpus_of"]


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Options of a keeper."""

    run: str
    """Id of the run."""
    host: str
    """Name of the failure domain."""
    budget_nbytes: int | None = None
    """Limit of all images in memory. None: all memory that the system can spare."""
    linger_s: float = 3600.0
    """The keeper exits after this time without a trainer."""
    local: str | None = None
    local_every: int = 1
    """Steps between generations written to ``local``, a folder on storage of this host. None: no
    local level."""
    serve: str | None = None
    """Interface or address, with an optional port after a colon, that serves the memory over HTTP.
    None: not served."""
    certificate: str = ""
    key: str = ""
    """Files for TLS, with ``certificate``."""
    max_bytes_per_s: int | None = None
    """Limit of all reads from other keepers. None: no limit."""
    cpus: str = ""
    """CPUs to run on, in the format of :func:`cpus_of`. Empty: any."""


_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def cpus_of(text: str) -> frozenset[int]:
    """Parse a list of CPUs in the format of Linux, such as ``0-3,8``. Raises ValueError."""
    cpus = set[int]()
    for part in text.split(","):
        match = _CPUS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} ends before it begins")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)
