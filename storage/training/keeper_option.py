"""What a user says about keepers, and how one is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from ...core.units import parse_duration, parse_size
from ...drivers.registry import resolved_options
from ...drivers.uri import parse
from ...errors import CoordinationError, UsageError
from ...planner.parity import GROUP_HOSTS, Mode
from ..arenas.folder import KeeperFolder
from ..keeper.options import KeeperOptions, cpus_of
from ..keeper.serve import interface_and_port
from ..runtime.engine import offload

__all__ = ["Keeper", "KeeperOption", "checked_keeper", "start_keeper"]

START_S = 30.0


@dataclass(frozen=True, slots=True)
class Keeper:
    """That a :class:`Checkpointer` keeps steps in host memory, in a process outside of the trainer:
    the keeper of its host, which survives the trainer.

    ``every``: steps between two that are kept. ``memory``: the most that all images of a host may
    take, such as ``"200GiB"``; None: what the host can spare. There are three images of each rank.
    ``domain``: the name of what fails together, such as a host or a rack; None: the host's name.
    ``deadline_s``: how long the trainer waits for an answer; without one, all goes on without a
    keeper. ``linger``: how long a keeper that nobody uses stays. ``starts``: whether to start a
    keeper where none answers.

    ``local``: a folder on storage of the host, such as NVMe, to which the keeper writes what it
    holds every ``local_every`` steps. A keeper that is started after the host has rebooted has it
    in memory again.

    ``serve``: where what the keeper holds can be read over HTTP, by ``peer://``: an interface or an
    address, and perhaps a port after a colon, such as ``"eth0:7070"``; None: nowhere. Without
    ``certificate`` and ``key``, files in PEM, there is no TLS. Keepers of several hosts work
    together where all of them serve.

    ``protect``: what is done against the loss of a host: ``"copy"``, a copy of each image on
    another one; ``"xor"``, so that any host of a group may be lost; ``"pq"``, any two; ``"off"``;
    or ``"auto"``, nothing on one host, a copy on two, XOR from three. ``group``: hosts of a group.

    ``max_bytes_per_s``: what the keeper may read from others, for parity and to make images again,
    such as ``"1GB"``; None: as much as the network gives. ``cpus``: the processors that the keeper
    runs on, such as ``"0-3,8"``; None: those of whoever starts it.

    Raises UsageError for what is none of that, UriError for what is no folder.
    """

    every: int = 1
    memory: int | str | None = None
    domain: str | None = None
    deadline_s: float = 10.0
    linger: str = "1h"
    starts: bool = True
    local: str | os.PathLike[str] | None = None
    local_every: int = 1
    serve: str | None = None
    certificate: str = ""
    key: str = ""
    protect: str = "auto"
    group: int = GROUP_HOSTS
    max_bytes_per_s: int | str | None = None
    cpus: str | None = None

    def __post_init__(self) -> None:
        for name, steps in (("every", self.every), ("local_every", self.local_every)):
            if type(steps) is not int or steps < 1:
                raise UsageError(f"Keeper: {name} is {steps!r}", advice="Give a number of steps.")
        if self.local is not None:
            resolved_options(parse(self.local))
        if self.serve is not None:
            interface_and_port(self.serve)
        self._check_protection()
        if not self.deadline_s > 0:
            raise UsageError(f"Keeper: deadline_s is {self.deadline_s!r}")
        if isinstance(self.max_bytes_per_s, int) and self.max_bytes_per_s < 1:
            raise UsageError(f"Keeper: max_bytes_per_s is {self.max_bytes_per_s!r}")
        for name, value, parsed in (
            ("memory", self.memory, parse_size),
            ("linger", self.linger, parse_duration),
            ("max_bytes_per_s", self.max_bytes_per_s, _parse_rate),
            ("cpus", self.cpus, cpus_of),
        ):
            try:
                if isinstance(value, str):
                    parsed(value)
            except ValueError as error:
                raise UsageError(f"Keeper: {name} is {value!r}: {error}") from error

    def _check_protection(self) -> None:
        modes = get_args(Mode)
        if self.protect not in modes:
            advice = f"Give one of {', '.join(modes)}."
            raise UsageError(f"Keeper: protect is {self.protect!r}", advice=advice)
        if type(self.group) is not int or self.group < 2:
            raise UsageError(f"Keeper: group is {self.group!r}", advice="Give a number of hosts.")

    @property
    def host(self) -> str:
        """The name of the failure domain."""
        return self.domain or socket.gethostname()

    def of_process(self, run: str) -> KeeperOptions:
        """For a keeper of the run with this id."""
        memory, rate = self.memory, self.max_bytes_per_s
        return KeeperOptions(
            run,
            self.host,
            parse_size(memory) if isinstance(memory, str) else memory,
            parse_duration(self.linger),
            None if self.local is None else str(parse(self.local)),
            self.local_every,
            self.serve,
            self.certificate,
            self.key,
            _parse_rate(rate) if isinstance(rate, str) else rate,
            self.cpus or "",
        )


def _parse_rate(text: str) -> int:
    """Bytes per second. Raises ValueError."""
    nbytes = parse_size(text)
    if not nbytes:
        raise ValueError("nothing would ever be read")
    return nbytes


KeeperOption = Keeper | Literal["auto"] | None


def checked_keeper(option: KeeperOption) -> Keeper | None:
    """What was given as ``keeper``. Raises UsageError for what is no such thing."""
    if option == "auto":
        return Keeper()
    if option is None or isinstance(option, Keeper):
        return option
    raise UsageError(
        f"keeper is {option!r:.50}", advice='Give a holdfast.Keeper, "auto", or None for none.'
    )


async def start_keeper(option: Keeper, folder: KeeperFolder, run: str) -> None:
    """Start a keeper of the run, which is no child of this process. Where another process does the
    same at once, one of both remains. Raises CoordinationError."""
    options = json.dumps(asdict(option.of_process(run)))
    arguments = [sys.executable, "-m", "holdfast.storage.keeper.detached", options]
    folder.make()
    try:
        await offload(_run, arguments, folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise CoordinationError(f"a keeper cannot be started: {error}") from error


def _run(arguments: list[str], folder: KeeperFolder) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(folder.log, flags, 0o600)
    try:
        subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
            timeout=START_S,
            start_new_session=True,
        )
    finally:
        os.close(log)
