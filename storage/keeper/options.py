"""Options of a keeper."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from ..arenas.numa import cpus_of

RATE_VARIABLE = "HOLDFAST_PEER_MAX_BYTES_PER_S"
"""Environment variable that tells drivers how fast they may read from other keepers."""
FIXED = ("serve", "certificate", "key")
"""Options that a running keeper cannot change."""


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
    history: int = 0
    """Number of older generations to retain, at widening distances."""
    every: int = 1
    """Steps between generations, from which the distances follow."""

    @property
    def limits(self) -> tuple[int | None, int, int]:
        """``budget_nbytes``, ``history`` and ``every``."""
        return self.budget_nbytes, self.history, self.every


def wanted_options(text: str, current: KeeperOptions) -> tuple[KeeperOptions, tuple[str, ...]]:
    """Return the options that a running keeper is to have, given those that a trainer wants as JSON
    ("" for the ``current`` ones), and the names of wanted options that it cannot change. Raises
    TypeError, ValueError."""
    wanted = KeeperOptions(**json.loads(text)) if text else current
    kept = {name: getattr(current, name) for name in ("run", *FIXED)}
    differing = [name for name in FIXED if getattr(wanted, name) != kept[name]]
    return replace(wanted, **kept), tuple(differing)


def confine(options: KeeperOptions, before: KeeperOptions | None = None) -> None:
    """Limit this process to the CPUs and the rate of reading in ``options``; ``before``: those that
    applied until now. Raises OSError if it may not use these CPUs."""
    if options.cpus:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cpus_of(options.cpus))
    if options.max_bytes_per_s is not None:
        os.environ[RATE_VARIABLE] = str(options.max_bytes_per_s)
    elif before is not None and before.max_bytes_per_s is not None:
        del os.environ[RATE_VARIABLE]
