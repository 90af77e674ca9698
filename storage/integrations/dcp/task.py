"""The tasks that the coordinator of a save sends to all ranks through DCP: the attempt, and the
rank's number.

DCP sends them with the plans. But a planner that caches plans (``enable_plan_caching``) ignores the
plan that arrives, and returns the first save's plan, with the attempt of that save. So a task is
also stored when it is unpickled, by the thread that saves, and taken from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass

from ....errors import SaveError, UsageError

__all__ = ["COORDINATOR", "Task"]

COORDINATOR = 0
"""The number of the coordinating rank."""

_arrived = threading.local()


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a save.

    ``attempt``: its id; empty for a rank without peers, which begins the attempt itself.
    """

    uri: str
    attempt: str
    rank: int
    world: int
    created_s: float

    def __reduce__(self) -> tuple[Callable[..., Task], tuple[object, ...]]:
        return _arriving, astuple(self)

    def deliver(self) -> None:
        """Store the task for this thread."""
        _arrived.task = self

    @classmethod
    def delivered(cls, uri: str) -> Task:
        """Return the task that has arrived for a save to ``uri``.

        Raises SaveError if none has arrived, UsageError if the coordinator saves elsewhere.
        """
        task: Task | None = _arrived.__dict__.pop("task", None)
        if task is None:
            raise SaveError(
                "no plan has arrived from the coordinator",
                uri=uri,
                advice="Save with torch.distributed.checkpoint.save or async_save.",
            )
        if task.uri != uri:
            raise UsageError(
                f"rank {task.rank} saves to {uri}, the coordinator to {task.uri}", rank=task.rank
            )
        return task


def _arriving(uri: str, attempt: str, rank: int, world: int, created_s: float) -> Task:
    task = Task(uri, attempt, rank, world, created_s)
    task.deliver()
    return task
