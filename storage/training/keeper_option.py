"""The user's options for keepers, and starting a keeper process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from ...core.units import parse_duration, parse_size
from ...drivers.registry import resolved_options
from ...drivers.uri import parse
from ...errors import CoordinationError, UsageError
from ...planner.parity import GROUP_HOSTS, Mode
from ..arenas.folder import KeeperFolder
from ..arenas.numa import cpus_of
from ..keeper.decisions.history import LEVELS_MAX
from ..keeper.detached import TAKE_OVER
from ..keeper.options import KeeperOptions
from ..runtime.engine import offload
from ..serving.options import interface_and_port

START_S = 30.0


@dataclass(frozen=True, slots=True)
class Keeper:
    """Options for keeping steps in host memory, in a process separate from the trainer.

    That process, the keeper, runs once per host and survives the trainer.

    ``every``: keep every n-th step. ``memory``: the limit for all images of a host, such as
    ``"200GiB"``; None: as much as the host can spare. Each rank needs three images. ``domain``: the
    name of the failure domain, such as a host or a rack; None: the host's name. ``deadline_s``: how
    long the trainer waits for a reply before it continues without a keeper; a keeper that it has to
    start may take a minute. ``linger``: how long an unused keeper stays alive; one that a trainer
    has started also ends once training is finished and its last step is in storage. ``starts``:
    whether to start a keeper if none answers. ``gives_up_after``: how long a resume waits
    for keepers that do not answer, if it would otherwise lose a step that they may hold; ``"0"``:
    not at all.

    ``history``: how many older steps to keep besides the newest, if memory suffices, so that
    ``resume(before=…)`` can go further back: each needs one more image of each rank, and they are
    about 4, 16, 64 and so on kept steps apart. ``goes_back_after``: after this many starts in a row
    without a newer step, a resume takes the newest step before all those; None: never.

    ``local``: a folder on storage of the host, such as NVMe. The keeper writes its images there
    every ``local_every`` steps. After a reboot of the host, a new keeper loads them back into
    memory.

    ``serve``: where to serve the keeper's images over HTTP, as ``peer://``: an interface or an
    address, optionally with a port, such as ``"eth0:7070"``; None: nowhere. TLS needs
    ``certificate`` and ``key``, PEM files. Keepers of several hosts work together only if all of
    them serve.

    ``protect``: the protection against the loss of a host: ``"copy"`` places a copy of each image
    on another host; ``"xor"`` survives the loss of any one host of a group; ``"pq"`` of any two;
    ``"off"`` none; ``"auto"`` chooses nothing for one host, a copy for two, XOR for three or more.
    ``group``: hosts per group.

    ``max_bytes_per_s``: the limit for reads from other keepers, for parity and rebuilds, such as
    ``"1GB"``; None: no limit. ``cpus``: the processors that the keeper runs on, such as
    ``"0-3,8"``; None: inherited from the process that starts it.

    Raises UsageError for an invalid option, UriError if ``local`` is not a valid folder.
    """

    every: int = 1
    memory: int | str | None = None
    domain: str | None = None
    deadline_s: float = 10.0
    linger: str = "1h"
    starts: bool = True
    gives_up_after: str = "2min"
    local: str | os.PathLike[str] | None = None
    local_every: int = 1
    serve: str | None = None
    certificate: str = ""
    key: str = ""
    protect: str = "auto"
    group: int = GROUP_HOSTS
    max_bytes_per_s: int | str | None = None
    cpus: str | None = None
    history: int = 0
    goes_back_after: int | None = None

    def __post_init__(self) -> None:
        for name, steps in (("every", self.every), ("local_every", self.local_every)):
            if type(steps) is not int or steps < 1:
                raise UsageError(f"Keeper: {name} is {steps!r}", advice="Give a number of steps.")
        self._check_history()
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
            ("gives_up_after", self.gives_up_after, parse_duration),
            ("max_bytes_per_s", self.max_bytes_per_s, _parse_rate),
            ("cpus", self.cpus, cpus_of),
        ):
            try:
                if isinstance(value, str):
                    parsed(value)
            except ValueError as error:
                raise UsageError(f"Keeper: {name} is {value!r}: {error}") from error

    def _check_history(self) -> None:
        if type(self.history) is not int or not 0 <= self.history <= LEVELS_MAX:
            advice = f"Give a number of steps, at most {LEVELS_MAX}."
            raise UsageError(f"Keeper: history is {self.history!r}", advice=advice)
        tries = self.goes_back_after
        if tries is not None and (type(tries) is not int or tries < 1):
            advice = "Give a number of starts, or None."
            raise UsageError(f"Keeper: goes_back_after is {tries!r}", advice=advice)

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
        """Return the options of a keeper process for the run with this id."""
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
            self.history,
            self.every,
        )


def _parse_rate(text: str) -> int:
    nbytes = parse_size(text)
    if not nbytes:
        raise ValueError("nothing would ever be read")
    return nbytes


KeeperOption = Keeper | Literal["auto"] | None


def checked_keeper(option: KeeperOption) -> Keeper | None:
    """Return the Keeper meant by the ``keeper`` argument; None without one. Raises UsageError."""
    if option == "auto":
        return Keeper()
    if option is None or isinstance(option, Keeper):
        return option
    raise UsageError(
        f"keeper is {option!r:.50}", advice='Give a holdfast.Keeper, "auto", or None for none.'
    )


async def start_keeper(
    option: Keeper, folder: KeeperFolder, run: str, *, takes_over: bool = False
) -> None:
    """Start a detached keeper of the run; of several, one remains. ``takes_over``: the running one
    is to hand its memory over, and to exit. Raises CoordinationError."""
    flags = [TAKE_OVER] if takes_over else []
    await launch(asdict(option.of_process(run)), folder, *flags)


async def launch(options: Mapping[str, object], folder: KeeperFolder, *flags: str) -> None:
    """Start a detached keeper with these fields of KeeperOptions. ``flags``: see
    :func:`..keeper.process.main`. Raises CoordinationError."""
    program = [sys.executable, "-m", "holdfast.storage.keeper.detached"]
    arguments = [*program, json.dumps(options), *flags]
    try:
        folder.make()
        await offload(_run, arguments, folder)
    except (UsageError, OSError, subprocess.SubprocessError) as error:
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
