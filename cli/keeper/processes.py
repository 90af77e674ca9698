"""``holdfast keeper run``, ``status``, ``upgrade`` and ``stop``: the keepers of this host."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import Any

from ...core.units import size_text
from ...errors import UsageError
from ...storage.arenas import client
from ...storage.arenas.folder import KeeperFolder, keeper_folders
from ...storage.arenas.messages import VERSION
from ...storage.keeper.descriptor_store import DescriptorStore
from ...storage.keeper.detached import UPGRADE
from ...storage.keeper.process import keep
from ...storage.keeper.succession import TAKE_OVER_S, RunningError
from ...storage.operations.location import Place
from ...storage.runtime import engine
from ...storage.training.keeper_option import START_S, Keeper, launch
from ...storage.training.run_identity import known_run_id, run_id
from ..commands import complain, print_json
from ..tables import Table
from ..text import is_terminal

_WATCH_S = 1.0
_UPGRADE_LOOK_S = 0.1
_CLEAR = "\x1b[H\x1b[2J"
_TITLES = (
    "run",
    "process",
    "epoch",
    "ranks",
    "newest",
    "agreed",
    "protected",
    "hosts",
    "memory",
    "of",
    "flushed",
    "skipped",
)


def run(uri: str, *, spare_of: str | None = None, **options: Any) -> int:
    """Run the keeper of a run in the foreground, until a signal or until it is idle; return 1 if
    another one is alive. ``spare_of``: addresses of keepers, separated by commas; ``options``:
    fields of :class:`Keeper`."""
    addresses = spare_of.split(",") if spare_of else ()
    option = Keeper(**options)
    store = DescriptorStore.of_environment(os.environ)

    async def identify() -> str:
        async with Place.of(uri, None).opened() as driver:
            return await run_id(driver)

    found = engine.run(identify())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        folder = KeeperFolder.of(found)
        asyncio.run(keep(option.of_process(found), folder, store, spare_of=addresses))
    except RunningError as error:
        complain(str(error))
        return 1
    return 0


def _folders(uri: str | None) -> list[KeeperFolder]:
    """Return the folder of one run, or of all runs."""
    if uri is None:
        return keeper_folders()

    async def identify() -> str | None:
        async with Place.of(uri, None).opened() as driver:
            return await known_run_id(driver)

    run = engine.run(identify())
    if run is None:
        raise UsageError("no Checkpointer with a keeper has used this folder", uri=uri)
    return [KeeperFolder.of(run)]


def _statuses(uri: str | None) -> list[dict[str, Any]]:
    statuses = [client.status_of(folder) for folder in _folders(uri)]
    return [status for status in statuses if status is not None]


def status(uri: str | None, *, watch: bool, json_output: bool) -> int:
    """Print the status of one run's keeper, or of all; with ``watch``, every second until
    interrupted. Returns 0 even without any."""
    while True:
        statuses = _statuses(uri)
        if watch and not json_output and is_terminal():
            print(_CLEAR, end="")
        _show(statuses, json_output=json_output)
        if not watch:
            return 0
        sys.stdout.flush()
        time.sleep(_WATCH_S)


def _show(statuses: list[dict[str, Any]], *, json_output: bool) -> None:
    if json_output:
        print_json({"keepers": statuses})
    elif not statuses:
        print("no keeper is running on this host")
    else:
        Table("keepers", _TITLES, [_cells(status) for status in statuses], ("run",)).print()
        for status in statuses:
            if status["problem"]:
                print(f"run {status['run'][:12]} keeps no steps: {status['problem']}")


def _cells(status: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one table row."""
    generations = status["generations"]
    agreed = [held["step"] for held in generations if held["agreed"]]
    steps = [held["step"] for held in generations]
    counters = status["counters"]
    return (
        status["run"][:12],
        str(status["pid"]),
        str(status["epoch"]) if status["epoch"] >= 0 else "-",
        str(len(status["ranks"])),
        str(max(steps, default="-")),
        str(max(agreed, default="-")),
        _protected(status),
        str(max(1, len(status["hosts"]))),
        size_text(status["held_nbytes"]),
        size_text(status["budget_nbytes"]),
        str(counters["flushed"]),
        str(counters["skipped"]),
    )


def _protected(status: dict[str, Any]) -> str:
    """Return the newest step that survives the loss of a host, and the mode of protection."""
    if status["protection"] == "off":
        return "off"
    step = status["protected_step"]
    return f"{'-' if step is None else step} ({status['protection']})"


def stop(uri: str | None) -> int:
    """Stop the keeper of one run, or all, and print which. Returns 1 if there was none."""
    stopped = 0
    for folder in _folders(uri):
        found: dict[str, Any] | None = client.status_of(folder)
        if found is not None and client.stop(folder):
            stopped += 1
            size = size_text(found["held_nbytes"])
            print(f"run {found['run'][:12]}: process {found['pid']} stops and frees {size}")
    if not stopped:
        complain("no keeper is running on this host")
    return int(not stopped)


def upgrade(uri: str | None) -> int:
    """Replace the keepers of this host by new processes, which take over the images and options,
    and print which. Returns 1 if one was not replaced, or there was none."""
    statuses = _statuses(uri)
    if not statuses:
        complain("no keeper is running on this host")
    problems = [_upgrade(status) for status in statuses]
    return int(not statuses or any(problems))


def _upgrade(status: dict[str, Any]) -> str:
    """Replace one keeper. Print and return the problem, if any."""
    run, pid = status["run"], status["pid"]
    folder = KeeperFolder.of(run)
    problem = ""
    if status.get("is_service"):
        problem = "a service manager runs it; have that restart it, for example with systemctl"
    elif status["ranks"] and status.get("version") != VERSION:
        problem = "ranks train with it, and could not use the new version; end the training first"
    else:
        engine.run(launch({"run": run}, folder, UPGRADE))
        found = _successor(folder, pid)
        if found is None:
            problem = f"it was not replaced; {folder.log} tells why"
        else:
            size = size_text(found["held_nbytes"])
            print(f"run {run[:12]}: process {found['pid']} has replaced {pid}, and holds {size}")
    if problem:
        complain(f"run {run[:12]}, process {pid}: {problem}")
    return problem


def _successor(folder: KeeperFolder, pid: int) -> dict[str, Any] | None:
    """Wait for another keeper than ``pid`` to be ready, and return its status; None if none
    appears."""
    until_s = time.monotonic() + TAKE_OVER_S + START_S
    while time.monotonic() < until_s:
        found = client.status_of(folder)
        if found is not None and found["pid"] != pid and found["ready"]:
            return found
        time.sleep(_UPGRADE_LOOK_S)
    return None
