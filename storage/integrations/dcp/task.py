"""What the coordinator of a save tells every rank, by way of DCP: which attempt it is, and which
number the rank has in it.

DCP sends it with the plans. But a planner that caches plans (``enable_plan_caching``) does not hand
on the plan that has come in: it hands on the one of the first save, with the attempt of that save.
So a task is also noted where it arrives, that is, where it is unpickled, by the thread that saves;
and it is taken from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass

from ....errors import SaveError, UsageError

__all__ = ["COORDINATOR", "Task"]

COORDINATOR = 0
"""The number of the rank that coordinates."""

_arrived = threading.local()


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a save. ``attempt``: its id; empty for a rank without peers, which begins
    it itself."""

    uri: str
    attempt: str
    rank: int
    world: int
    created_s: float

    def __reduce__(self) -> tuple[Callable[..., Task], tuple[object, ...]]:
        return _arriving, astuple(self)

    def deliver(self) -> None:
        """Note the task for this thread."""
        _arrived.task = self

    @classmethod
    def delivered(cls, uri: str) -> Task:
        """The task that has arrived, which is for a save to ``uri``. Raises UsageError where the
        coordinator saves elsewhere."""
        task: Task | None = _arrived.__dict__.pop("task", None)
        if task is None:
            raise SaveError(
                "no plan has come from the coordinator",
                uri=uri,
                advice="Save with torch.distributed.checkpoint.save or async_save.",
            )
        if task.uri != uri:
            raise UsageError(
                f"rank {task.rank} saves to {uri}, the coordinator to {task.uri}", rank=task.rank
            )
        return task


def _arriving(uri: str, attempt: str, rank: int, world: int, created_s: float) -> Task:
    """Makes a task that is unpickled, and delivers it."""
    task = Task(uri, attempt, rank, world, created_s)
    task.deliver()
    return task
