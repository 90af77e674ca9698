"""The processes that measure together: this one alone, or the ranks of a job.

They meet before each run, so that all load the storage at the same time. They exchange findings as
JSON through the store of the job.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import CoordinationError, RankFailedError, UsageError

JOIN_S = 60.0
"""Time limit for the other ranks to join."""
MEET_S = 1800.0
"""Time that a rank waits for slower ones after a run."""
LEAVE_S = 10.0
"""Time that ranks get to stop writing before everything is deleted."""
_KEYS = "holdfast/bench"

# Open MPI and MPICH's descendants name a process's rank in their own variables; torchrun and most
# launchers use torch's.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Ranks:
    """This process alone. ``host_ranks`` holds the number of ranks of each host."""

    rank = 0
    world = 1
    host_ranks: tuple[int, ...] = (1,)

    def meet(self) -> None:
        """Wait until all ranks are here. Raises CoordinationError if one is gone."""

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank. Every rank calls it. Raises as
        :meth:`meet`."""
        return [value]

    def agree(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks."""
        return self.gather(value)[0]

    def all_or_none(self, error: Exception | None) -> None:
        """Raise ``error`` if there is one. The other ranks raise a RankFailedError with its
        message."""
        if error is not None:
            raise error

    def leave(self) -> None:
        """Report that this rank has stopped writing, for whatever reason. Rank 0 waits a limited
        time for the others."""


class _Job(Ranks):
    """One rank of several."""

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.world = world
        self._dist = dist
        self._store = dist.PrefixStore(_KEYS, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        self._store.set_timeout(datetime.timedelta(seconds=MEET_S))
        self._calls = 0
        self.host_ranks = tuple(Counter(self.gather(socket.gethostname())).values())

    def meet(self) -> None:
        try:
            self._dist.barrier()
        except RuntimeError as error:
            raise self._gone() from error

    def _gone(self) -> CoordinationError:
        return CoordinationError("a rank ended while others waited for it", rank=self.rank)

    def gather(self, value: Any) -> list[Any]:
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], json.dumps(value))
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise self._gone() from error

    def all_or_none(self, error: Exception | None) -> None:
        said = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, message in enumerate(said):
            if message is not None:
                raise RankFailedError(message, rank=rank)

    def leave(self) -> None:
        # The store may be gone with the rank that held it; then nobody is left to notify.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                names = [f"left/{rank}" for rank in range(self.world)]
                self._store.wait(names, datetime.timedelta(seconds=LEAVE_S))


def job_of(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) outside a job. Raises UsageError
    if the variables are inconsistent, or do not give rank 0's address."""
    for rank_name, world_name in _VARIABLES:
        if rank_name in environment and world_name in environment:
            rank = _number(environment, rank_name)
            world = _number(environment, world_name)
            if not 0 <= rank < world:
                raise UsageError(
                    f"{rank_name}={rank} and {world_name}={world} contradict each other"
                )
            if world > 1:
                _check_address(environment)
            return rank, world
    return 0, 1


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError as error:
        raise UsageError(f"{name}={environment[name]!r} is not a number") from error


def _check_address(environment: Mapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise UsageError(
            f"this process is one of several, and {' and '.join(missing)} do not say where rank 0 "
            "is",
            advice="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29400 holdfast bench …, or torchrun. "
            "On one host: holdfast bench --ranks N.",
        )


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that the environment describes, and yield them. Raises UsageError as
    :func:`job_of`, and CoordinationError if the others do not join in time."""
    rank, world = job_of()
    if world == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=JOIN_S))
    except (RuntimeError, ValueError) as error:
        raise CoordinationError(
            f"the other {world - 1} ranks did not join within {JOIN_S:.0f} s",
            rank=rank,
            advice="To measure with this process alone, unset RANK and WORLD_SIZE.",
        ) from error
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=MEET_S))
    try:
        yield _Job(rank, world)
    finally:
        dist.destroy_process_group()
