"""Processes that are the ranks of jobs. They start once, and run one job after the other."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 60.0

PRELOAD = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict",
    "torch._dynamo", "holdfast.drivers.local.driver", "holdfast.storage.api",
]  # fmt: skip
"""Modules that every process needs, imported once. (None below tests/: the server does not have
that path.)"""


class Failed(Exception):
    """An error of a rank, with its traceback as text; ``error`` is the exception."""

    def __init__(self, rank: int, error: BaseException, text: str) -> None:
        super().__init__(rank, error, text)
        self.rank, self.error = rank, error

    def __str__(self) -> str:
        return f"rank {self.args[0]}:\n{self.args[2]}"


class Gone:
    """The result of a dead rank."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gone)

    __hash__ = None  # type: ignore[assignment]


class RankProcesses:
    """``size`` rank processes; a context manager. ``run`` takes importable functions."""

    def __init__(
        self, size: int, preload: Sequence[str] = (), *, with_children: bool = False
    ) -> None:
        """``preload``: further modules to import. ``with_children``: whether they may start
        processes."""
        import torch.distributed as dist

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *preload])
        self._store = dist.TCPStore(
            "127.0.0.1", 0, None, True, datetime.timedelta(seconds=30), wait_for_workers=False
        )
        self._jobs = 0
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._store.port), daemon=not with_children
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, function: Callable[..., Any], *args: Any, world: int | None = None) -> int:
        """Give the first ``world`` ranks a job; return their number."""
        world = len(self.processes) if world is None else world
        self._jobs += 1
        for rank in range(world):
            self._pipes[rank].send((f"job{self._jobs}", rank, world, function, args))
        return world

    def outcomes(self, world: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Return each rank's result, Failed or Gone. On a timeout, end all and raise TimeoutError."""
        end = time.monotonic() + timeout_s
        results: list[Any] = []
        for rank in range(world):
            try:
                if not self._pipes[rank].poll(max(0.0, end - time.monotonic())):
                    for process in self.processes:
                        os.kill(process.pid, signal.SIGUSR1)  # they print their stacks
                    time.sleep(0.5)
                    self.close()
                    raise TimeoutError(f"rank {rank} has not answered within {timeout_s:g} s")
                results.append(self._pipes[rank].recv())
            except (EOFError, ConnectionError):
                results.append(Gone())
        return results

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        """Run a job; return the results of all ranks, or raise the first Failed."""
        results = self.outcomes(self.begin(function, *args, world=world), timeout_s)
        for result in results:
            if isinstance(result, Failed):
                raise result
        return results

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes; those that may have children end by themselves."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            if not process.daemon:
                process.join(10)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join(10)


def errors(outcomes: Sequence[Any]) -> list[BaseException | None]:
    """Return the error of each rank, or None."""
    return [outcome.error if isinstance(outcome, Failed) else None for outcome in outcomes]


def _serve(pipe: Connection, port: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = (
        "lo"  # otherwise gloo asks a name server for this host's address, perhaps in vain
    )
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    patience = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, None, False, patience)
    while True:
        try:
            name, rank, world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(name, store),
                rank=rank,
                world_size=world,
                timeout=patience,
            )
            # A rank with little to do could otherwise end before another has found it: gloo
            # connects all pairs.
            if store.add(f"{name}/here", 1) == world:
                store.set(f"{name}/all", "")
            store.wait([f"{name}/all"], patience)
            result = function(*args)
        except BaseException as error:
            result = Failed(rank, error, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(result)
