"""What a keeper is told when it begins."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KeeperOptions", "cpus_of"]


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """``run``: the id of the run. ``host``: the name of the failure domain. ``budget_nbytes``: of
    all images in memory; None: what the system can spare. ``linger_s``: after so long without a
    trainer the keeper ends. ``local``: a folder on storage of this host, to which a generation is
    written every ``local_every`` steps; None: none is. ``serve``: where what it holds can be read
    over HTTP: an interface or an address, and perhaps a port after a colon; None: nowhere.
    ``certificate`` and ``key``: files, for TLS. ``max_bytes_per_s``: what is read from other
    keepers, of all of them together; None: as much as there is. ``cpus``: the processors that it
    runs on, as :func:`cpus_of` takes them; "": any."""

    run: str
    host: str
    budget_nbytes: int | None = None
    linger_s: float = 3600.0
    local: str | None = None
    local_every: int = 1
    serve: str | None = None
    certificate: str = ""
    key: str = ""
    max_bytes_per_s: int | None = None
    cpus: str = ""


_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def cpus_of(text: str) -> frozenset[int]:
    """Processors as Linux lists them: ``0-3,8``. Raises ValueError for anything else."""
    cpus = set[int]()
    for part in text.split(","):
        match = _CPUS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no processor, and no range of them such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} ends before it begins")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)
