"""What a keeper is told when it begins."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KeeperOptions"]


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """``run``: the id of the run. ``host``: the name of the failure domain. ``budget_nbytes``: of
    all images in memory; None: what the system can spare. ``linger_s``: after so long without a
    trainer the keeper ends. ``local``: a folder on storage of this host, to which a generation is
    written every ``local_every`` steps; None: none is. ``serve``: where what it holds can be read
    over HTTP: an interface or an address, and perhaps a port after a colon; None: nowhere.
    ``certificate`` and ``key``: files, for TLS."""

    run: str
    host: str
    budget_nbytes: int | None = None
    linger_s: float = 3600.0
    local: str | None = None
    local_every: int = 1
    serve: str | None = None
    certificate: str = ""
    key: str = ""
