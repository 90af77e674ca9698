"""DCP's storage writer for Holdfast checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....errors import SaveError, UsageError
from ...format.dcp_metadata import DCP_METADATA_KEY
from ...format.fragment import Fragment, Group, decode_fragment
from ...format.packed import Compression, checked_compression
from ...format.tree import ROOT, ByRank
from ...operations.call_errors import announcing_errors_of_call, closing, printed_uri
from ...operations.location import UriLike
from ...operations.options import BUDGET_NBYTES, DEADLINE_S, check_budget
from ...operations.rounds import Division
from ...operations.saving.save_job import SaveJob
from ...operations.saving.steps import commit_together, divide, write_image
from ...protocol.attempt import Attempt
from ...protocol.collect import give_up
from ...protocol.commit import begin, commit_attempt, refuse_existing
from ...ranks.calls import Call
from ...ranks.process_group import current_rank, current_team, current_world
from ...ranks.team import Team
from ...runtime.engine import offload, run
from ...state.device import Queued, devices_of
from ...state.flat_state import FlatState
from .at_uri import AtUri, new_id
from .pieces import flat_state_of

__all__ = ["HoldfastWriter"]

_REPORT = ""
"""The name under which a rank sends its fragment to the coordinator."""
_DIVIDE = "division of a save to"
_COMMIT = "commit of a save to"
_COORDINATOR = 0
"""The number of the coordinating rank."""
_arrived = threading.local()


class HoldfastWriter(AtUri, StorageWriter):
    """Writes a Holdfast checkpoint for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Works in threads and processes, with any planner. ``uri`` names one checkpoint; a
    ``checkpoint_id`` in the call takes precedence. DCP's coordinator begins an attempt, all ranks
    write their images, and the coordinator commits atomically in ``finish``, once all images are
    durable. A failed save changes nothing.

    With ``overwrite=False`` a save raises ExistsError if there is a checkpoint, also one of DCP's
    own writer: before anything is written, and again at the commit. All ranks give the same value.

    Values are stored without pickle, as by :func:`~holdfast.save`. A value that cannot be stored
    raises StateError with its name, before this rank writes anything; with ``allow_opaque`` the
    planner's bytes are stored, which Holdfast never unpickles. ``step`` is recorded in the
    checkpoint (default: ``state["step"]`` if that is an int). ``storage_options``,
    ``budget_nbytes`` and ``compression`` as in :func:`~holdfast.save`.

    With ``use_collectives=False`` the ranks coordinate through the job's store, as in
    :func:`~holdfast.save`. All ranks of the job then take part, and the result is still one
    checkpoint. ``deadline_s`` is how long they wait for a rank that shows no sign of life;
    otherwise DCP's own timeouts apply.
    """

    def __init__(
        self,
        uri: UriLike,
        *,
        step: int | None = None,
        allow_opaque: bool = False,
        storage_options: Mapping[str, object] | None = None,
        budget_nbytes: int = BUDGET_NBYTES,
        compression: Compression | None = None,
        overwrite: bool = True,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        check_budget(budget_nbytes)
        super().__init__(uri)
        self._step = step
        self._allow_opaque = allow_opaque
        self._storage_options = dict(storage_options or {})
        self._budget_nbytes = budget_nbytes
        self._compression = checked_compression(compression)
        self._overwrite = overwrite
        self._deadline_s = deadline_s
        self.save_id = new_id()
        self._is_coordinator = False
        self._meets = False
        """True if the ranks coordinate without DCP."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save of ``checkpoint_id``, if given."""
        super().reset(checkpoint_id)
        self.save_id = new_id()

    def storage_meta(self) -> StorageMeta:
        """Return the location of the checkpoint, and the id of the save."""
        return StorageMeta(self._uri, self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Record the role of this rank.

        Raises UsageError if the ranks coordinate without DCP and are not all ranks of the job.
        """
        self._is_coordinator = is_coordinator
        self._meets = not kwargs.get("use_collectives", True) and current_world() > 1
        if self._meets and kwargs.get("rank") != current_rank():
            raise UsageError(
                "with use_collectives=False all ranks of the job save together",
                uri=printed_uri(self._uri),
                advice="Leave it out, or leave out process_group= and no_dist=True.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. With ``overwrite=False`` raises ExistsError for a folder that
        DCP's own writer has saved.
        """
        if not self._overwrite:
            run(self._refuse_stock())
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt on the coordinator, and assign every rank its task.

        A rank without peers begins the attempt later, once it knows that everything can be saved.
        If ranks coordinate without DCP, each calls this with its own plan.
        """
        if self._meets:
            return [self._divided(plan) for plan in plans]
        world = len(plans)
        uri = printed_uri(self._uri)
        attempt = ""
        if world > 1:
            attempt = run(self._begin(world)).id
        tasks = [
            _Task(uri, attempt, rank, world, time.time(), self._overwrite) for rank in range(world)
        ]
        tasks[_COORDINATOR].deliver()  # without peers, no task is unpickled
        return [replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items as one image.

        Raises StateError before anything is written; StorageError.
        """
        with self._announcing_errors():
            fragment = self._written(plan, planner)
        results = [
            WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items
        ]
        # A rank without items reports as well.
        report = WriteResult(MetadataIndex(_REPORT), 0, fragment.encode())
        written: Future[list[WriteResult]] = Future()
        written.set_result([report, *results])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the images of all ranks, on the coordinator.

        Raises CoverageError if an element is stored twice or not at all; SaveError, StorageError.
        """
        fragments = [
            decode_fragment(result.storage_data, f"the report of rank {rank}", {})
            for rank, of_rank in enumerate(results)
            for result in of_rank
            if result.index.fqn == _REPORT
        ]
        team = None
        if self._meets:
            team = self._team(_COMMIT)
        run(self._commit(team, fragments))
        self.save_id = fragments[0].head[0]  # as it can be read from the checkpoint
        metadata.storage_meta = self.storage_meta()

    def _written(self, plan: SavePlan, planner: SavePlanner) -> Fragment:
        task = _Task.delivered(printed_uri(self._uri), self._overwrite)
        flat = flat_state_of(plan, planner, task.world, allow_opaque=self._allow_opaque)
        queued = Queued.now(devices_of(flat.locals))
        step = self._step
        if step is None:
            step = _step_in(flat)
        job = SaveJob(
            flat, step, self._budget_nbytes, created_s=task.created_s, compression=self._compression
        )
        return run(self._write(task, job, queued))

    def _divided(self, plan: SavePlan) -> SavePlan:
        """Return ``plan`` with just this rank's items, as agreed without DCP."""
        team = self._team(_DIVIDE)
        names = [f"{item.index.fqn} {item.index.offset}" for item in plan.items]
        sizes = [item.tensor_storage_size() or 1 for item in plan.items]
        division = run(self._divide(team, dict(zip(names, sizes, strict=True))))
        task = _Task(
            printed_uri(self._uri),
            division.attempt,
            team.rank,
            team.world,
            division.created_s,
            self._overwrite,
        )
        task.deliver()
        items = [
            item
            for item, name in zip(plan.items, names, strict=True)
            if division.writers.get(name, team.rank) == team.rank
        ]
        return replace(plan, items=items, storage_data=task)

    def _team(self, kind: str) -> Team:
        call = Call(kind, printed_uri(self._uri))
        return current_team(call, self._deadline_s, saving=True)

    def _announcing_errors(self) -> contextlib.AbstractContextManager[None]:
        """Report an error of this rank to the others, which wait for it if they coordinate without
        DCP.
        """
        if not self._meets:
            return contextlib.nullcontext()
        return announcing_errors_of_call(_COMMIT, self._uri, None, self._deadline_s)

    async def _divide(self, team: Team, nbytes: Mapping[str, int]) -> Division:
        async with closing(self._driver(team.world)) as driver:
            return await divide(team, driver, nbytes, overwrite=self._overwrite)

    async def _refuse_stock(self) -> None:
        async with closing(self._driver(current_world())) as driver:
            await refuse_existing(driver, DCP_METADATA_KEY)
            await refuse_existing(driver, f"__0{DCP_METADATA_KEY}")  # saved without collectives

    async def _begin(self, world: int) -> Attempt:
        async with closing(self._driver(world)) as driver:
            return await begin(driver, overwrite=self._overwrite)

    async def _write(self, task: _Task, job: SaveJob, queued: Queued) -> Fragment:
        async with closing(self._driver(task.world)) as driver:
            if queued.events:
                await offload(queued.wait)
            if task.attempt:
                attempt = Attempt(task.attempt)
            else:
                attempt = await begin(driver, overwrite=self._overwrite)
            try:
                return await write_image(driver, attempt, task.rank, job)
            except BaseException:
                if self._is_coordinator:
                    await give_up(driver, attempt)
                raise

    async def _commit(self, team: Team | None, fragments: Sequence[Fragment]) -> None:
        async with closing(self._driver(len(fragments))) as driver:
            if team is not None:
                (own,) = fragments
                await commit_together(
                    team,
                    driver,
                    own,
                    _for_all_ranks,
                    self._compression,
                    overwrite=self._overwrite,
                )
                return
            attempt = Attempt(fragments[0].head[0])
            await commit_attempt(
                driver,
                attempt,
                _for_all_ranks(fragments),
                self._compression,
                overwrite=self._overwrite,
            )

    def _driver(self, world: int) -> Driver:
        return open_driver(self._uri, world, **self._storage_options)


@dataclass(frozen=True, slots=True)
class _Task:
    """One rank's part of a save, which the coordinator sends to all ranks through DCP.

    ``attempt``: its id; empty for a rank without peers, which begins the attempt itself. DCP sends
    tasks with the plans. But a planner that caches plans (``enable_plan_caching``) ignores the plan
    that arrives, and returns the first save's plan, with the attempt of that save. So a task is
    also stored when it is unpickled, by the thread that saves, and taken from there.
    """

    uri: str
    attempt: str
    rank: int
    world: int
    created_s: float
    overwrite: bool

    def __reduce__(self) -> tuple[Callable[..., _Task], tuple[object, ...]]:
        return _arriving, astuple(self)

    def deliver(self) -> None:
        """Store the task for this thread."""
        _arrived.task = self

    @classmethod
    def delivered(cls, uri: str, overwrite: bool) -> _Task:
        """Return the task that has arrived for a save to ``uri``.

        Raises SaveError if none has arrived, UsageError if the coordinator saves elsewhere or with
        another value of ``overwrite``.
        """
        task: _Task | None = _arrived.__dict__.pop("task", None)
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
        if task.overwrite != overwrite:
            raise UsageError(
                f"rank {task.rank} saves with overwrite={overwrite}, the coordinator with "
                f"{task.overwrite}",
                rank=task.rank,
            )
        return task


def _arriving(*fields: Any) -> _Task:
    task = _Task(*fields)
    task.deliver()
    return task


def _step_in(flat: FlatState) -> int | None:
    """Return ``state["step"]``, if it is an int among this rank's values."""
    for value in flat.tree.values:
        if (value.container, value.key) == (ROOT, "step"):
            step = value.of(0)
            if type(step) is int:
                return step
    return None


def _for_all_ranks(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Assign all values to all ranks, and the step to all fragments.

    DCP has only one rank write each value, and only one of them knows the step.
    """
    attempt, _, created_s = fragments[0].head
    step = next((f.head[1] for f in fragments if f.head[1] is not None), None)
    everybody = list(range(len(fragments)))
    return [
        Fragment((attempt, step, created_s), [_of_ranks(g, everybody) for g in fragment.groups])
        for fragment in fragments
    ]


def _of_ranks(group: Group, ranks: list[int]) -> Group:
    values: list[ByRank] = [
        [(ranks, encoded) for _, encoded in by_rank] for by_rank in group.values
    ]
    return replace(group, values=values)
