"""A training job with a keeper, alone or under torchrun, that has an accident.

Arguments: where to save, a folder for results, and a JSON description of the job.

Each rank writes a line for each step: the step and the exact loss. The state depends on the step
alone, so a job that resumes from any step has to reach the same losses.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.storage.arenas.arena import Arena
from holdfast.storage.arenas.client import status_of
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder
from holdfast.storage.arenas.messages import Enter, Inventory
from holdfast.storage.pipeline.capture import TensorChunks

POINTS: dict[str, tuple[type, str]] = {
    "slot": (Arena, "fill"),
    "copy": (TensorChunks, "copy_range"),
    "label": (Arena, "captured"),
}
"""Stages of a capture, in order: get a slot, copy, hand over the label."""


@dataclass(frozen=True)
class Accident:
    """Accident ``what`` at ``step`` on ``rank`` (-1: on all).

    ``kill``: once the step is agreed. ``kill before POINT``, one of :data:`POINTS`: during its
    capture. ``die``: at once, while the others compute for a minute. ``stop keeper`` and ``kill
    keeper``: send that signal to the keeper. ``sigterm``: send it to the keeper and to
    this process.
    """

    step: int
    what: str
    rank: int = -1


@dataclass(frozen=True)
class Job:
    """Description of a job.

    ``every``: steps between saves to storage, None for none. ``hosts``: names of hosts with equally
    many ranks, a keeper and a loopback address each; empty for this host alone, whose keeper serves
    nobody. ``guards``: also wait for the parity of each step. ``late_s``: delay before the last rank
    starts to resume. ``patience_s``: how long ranks wait for each other. ``rate``: bytes a second
    that a keeper started by this job may read from other keepers. ``enter_s``: how long
    ranks take from entering an epoch to handing their images to a new keeper. ``grace_s``: the
    grace period after SIGTERM. ``waits``: whether to wait until each step is agreed or durable.
    ``grows_at``: the step at which ``grows_on`` (-1: all ranks) adds a tensor to its state.
    ``gives_up_after``: how long a resume waits for keepers that may hold a newer step.
    """

    steps: int
    every: int | None = None
    accident: Accident | None = None
    local: str | None = None
    local_every: int = 1
    deadline_s: float = 10.0
    numel: int = 1 << 16
    forks: bool = False
    pause_s: float = 0.0
    starts: bool = True
    hosts: tuple[str, ...] = ()
    protect: str = "auto"
    guards: bool = False
    late_s: float = 0.0
    patience_s: float = 30.0
    rate: str | None = None
    enter_s: float = 0.0
    grace_s: float = 5.0
    waits: bool = True
    gives_up_after: str = "2min"
    grows_at: int = 0
    grows_on: int = -1

    def host_of(self, rank: int, world: int) -> int:
        """Return the index in ``hosts`` of the host that runs ``rank``."""
        return rank * len(self.hosts) // world

    def encode(self) -> str:
        """Return the job as JSON for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Job:
        """Decode the JSON of :meth:`encode`."""
        given = json.loads(text)
        accident = given.pop("accident")
        given["hosts"] = tuple(given["hosts"])
        return cls(**given, accident=None if accident is None else Accident(**accident))


def main() -> None:
    """Train, on each rank."""
    faulthandler.register(signal.SIGUSR1)  # prints all stacks
    uri, out, job = sys.argv[1], Path(sys.argv[2]), Job.decode(sys.argv[3])
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    state = new_state(job, rank)
    keeper = holdfast.Keeper(
        deadline_s=job.deadline_s,
        linger="120s",
        starts=job.starts,
        gives_up_after=job.gives_up_after,
        local=job.local,
        local_every=job.local_every,
        **(on_host(job, rank, world) if job.hosts else {}),
    )
    log = (out / f"losses {rank}").open("a", buffering=1)
    with holdfast.Checkpointer(
        uri, every=job.every, keeper=keeper, deadline_s=job.patience_s, grace_s=job.grace_s
    ) as run:
        note_looks(out / f"looks {rank}")
        slow_down_entries(job.enter_s)
        if rank == world - 1:
            time.sleep(job.late_s)
        (out / f"resuming {rank}").touch()
        at = run.resume(state)
        assert run.resumed is not None
        found = {"step": run.resumed.step, "tier": run.resumed.tier}
        if run.resumed.problem:
            found["problem"] = run.resumed.problem
        if job.hosts:
            found["tiers"] = dict(run.resumed.tiers)
            found["seconds"] = run.resumed.seconds
        (out / f"resumed {rank}").write_text(json.dumps(found))
        if job.forks and os.fork() == 0:
            time.sleep(60)  # as a worker of a data loader may outlive its trainer
            os._exit(0)
        for step in range(at + 1, job.steps + 1):
            if world > 1:
                dist.barrier()  # as gradients keep ranks together
            loss = take_step(state, step)
            grow(state, job, step, rank)
            if job.accident is not None and job.accident.step == step:
                arm(job.accident, rank)
            log.write(f"{step} {loss}\n")
            handle = run.step(step, state)
            if job.accident is not None and job.accident.step == step:
                happen(job.accident, rank, handle, uri)
            if handle is not None and job.waits:
                wait_for(handle)
            if job.guards:
                wait_for_guard(uri, step)
            time.sleep(job.pause_s)
        run.wait()
        (out / f"counters {rank}").write_text(json.dumps(asdict(run.counters)))
    if world > 1:
        dist.destroy_process_group()


def note_looks(to: Path) -> None:
    """Write a line for each query of the keeper's inventory: its start and end.

    Both times come from a clock that all processes share.
    """
    real = Arena.look_up

    async def noted(self: Arena) -> Inventory | None:
        began_s = time.monotonic()
        found = await real(self)
        with to.open("a") as file:
            file.write(f"{began_s} {time.monotonic()}\n")
        return found

    Arena.look_up = noted  # type: ignore[method-assign]


def slow_down_entries(seconds: float) -> None:
    """Have each rank pause after it has entered an epoch."""
    real = Arena.enter

    async def slow(self: Arena, enters: Enter) -> bool:
        accepted = await real(self, enters)
        await asyncio.sleep(seconds)
        return accepted

    Arena.enter = slow  # type: ignore[method-assign]


def on_host(job: Job, rank: int, world: int) -> dict[str, Any]:
    """Return the keeper's options for a rank's host, and set its folder in the environment."""
    place = job.host_of(rank, world)
    base = Path(os.environ[KEEPER_DIR_VARIABLE]) / job.hosts[place]
    base.mkdir(mode=0o700, exist_ok=True)
    os.environ[KEEPER_DIR_VARIABLE] = str(base)
    return {
        "domain": job.hosts[place],
        "serve": f"127.0.0.{place + 2}",
        "protect": job.protect,
        "max_bytes_per_s": job.rate,
    }


def wait_for_guard(uri: str, step: int) -> None:
    """Wait for parity of the step, which may be complete later than the vote."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        if (status_of(keeper_folder(uri)) or {}).get("protected_step") == step:
            return
        time.sleep(0.01)
    print(f"no parity of step {step}", file=sys.stderr)


def new_state(job: Job, rank: int) -> dict[str, Any]:
    """Return a state of a plain tensor that is equal on all ranks, one of each rank's own, and
    values."""
    return {
        "w": torch.zeros(job.numel),
        "own": holdfast.PerRank(torch.full((5,), float(rank))),
        "step": 0,
    }


def take_step(state: dict[str, Any], step: int) -> float:
    """Compute the next state from the previous one, so that a skipped step changes the losses."""
    holdfast.fence()
    weights = state["w"]
    weights.mul_(0.5).add_(step)
    state["step"] = step
    return float(weights.double().mean())


def grow(state: dict[str, Any], job: Job, step: int, rank: int) -> None:
    """Add a tensor to the state, if the job says so."""
    if step == job.grows_at and job.grows_on in (-1, rank):
        state["more"] = holdfast.PerRank(torch.zeros(1000))


def wait_for(handle: holdfast.SaveHandle) -> None:
    """Wait until the step is safe, or cannot become safe."""
    try:
        handle.wait(10)
    except holdfast.HoldfastError as error:
        print(f"step not kept: {error}", file=sys.stderr)


def arm(accident: Accident, rank: int) -> None:
    """Kill this process when the step reaches the point that ``accident`` names."""
    if accident.rank not in (-1, rank) or not accident.what.startswith("kill before "):
        return
    kind, name = POINTS[accident.what.removeprefix("kill before ")]

    async def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, killed)


def happen(accident: Accident, rank: int, handle: Any, uri: str) -> None:
    """Cause the accident."""
    if accident.what == "die":
        if rank != accident.rank:
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    if accident.rank not in (-1, rank):
        return
    if accident.what == "kill":
        wait_for(handle)
        if dist.is_initialized() and accident.rank == -1:
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if accident.what == "sigterm":
        os.kill(keeper_pid(uri), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    if accident.what in ("kill keeper", "stop keeper"):
        wait_for(handle)
        number = signal.SIGKILL if accident.what == "kill keeper" else signal.SIGSTOP
        os.kill(keeper_pid(uri), number)


def keeper_pid(uri: str) -> int:
    """Return the process id of the run's keeper on the host of this rank."""
    status = status_of(keeper_folder(uri))
    assert status is not None
    pid = status["pid"]
    assert isinstance(pid, int)
    return pid


def keeper_folder(uri: str) -> KeeperFolder:
    """Return the folder of the run's keeper on the host of this rank."""
    return KeeperFolder.of(json.loads((Path(uri) / "run.json").read_text())["run"])


if __name__ == "__main__":
    main()
