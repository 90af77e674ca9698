"""Hands the memory of a keeper to its successor, as when Holdfast was upgraded.

The successor connects like a trainer. It gets all images with their labels, and the locked file of
the run last, so that no third keeper can start in between. The previous keeper exits only once the
successor serves. Parity is not handed over: the successor encodes the next agreed generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.decoded_json import Json, object_in
from ...errors import CoordinationError, UsageError
from ..arenas import messages
from ..arenas.folder import KeeperFolder
from ..arenas.sockets import Line, MessageError, connected
from .options import KeeperOptions
from .slot_memory import SlotPool

TAKE_OVER_S = 60.0
"""Time limit for a keeper to finish its flushes and to hand over its memory, and for its successor
to start."""

_log = logging.getLogger(__name__)


class RunningError(UsageError):
    """Another keeper of the run is alive."""


@dataclass(slots=True)
class Estate:
    """Memory of the previous keeper, owned by its successor. ``images``: the descriptors of each
    image and its label, and whether it is agreed. ``lock``: the locked file, -1 without one.
    ``options``: the previous keeper's. ``line``: the connection to it. It stays alive until
    :meth:`confirm`, and continues as the keeper of the run if this process ends before."""

    images: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)
    lock: int = -1
    options: Mapping[str, Json] = field(default_factory=dict)
    line: Line | None = None

    def recall(self, pool: SlotPool, run: str) -> None:
        """Move the images of ``run`` to ``pool``."""
        while self.images:
            fds, agreed = self.images.pop(0)
            pool.take_over(fds, run, agreed=agreed)

    async def confirm(self) -> None:
        """Let the previous keeper exit: this process serves its trainers now."""
        if self.line is not None:
            with contextlib.suppress(OSError):
                await self.line.send(messages.encode(1, messages.Done()))
        self.close()

    def close(self) -> None:
        """Close the connection, and the remaining descriptors of images."""
        if self.line is not None:
            self.line.close()
            self.line = None
        for fds, _ in self.images:
            for fd in fds:
                os.close(fd)
        self.images.clear()


class Succession:
    """The end of a keeper that another process replaces. ``is_service``: a service manager would
    start it again, so no other process may replace it."""

    def __init__(self, *, is_service: bool) -> None:
        self.is_service = is_service
        self._successor: tuple[Line, int] | None = None
        """Connection of the next keeper, and the number of its request."""

    @property
    def is_pending(self) -> bool:
        """True if the next keeper waits."""
        return self._successor is not None

    def uses(self, line: Line) -> bool:
        """Return whether the next keeper waits at the other end of ``line``."""
        return self._successor is not None and self._successor[0] is line

    async def accepts(
        self,
        line: Line,
        number: int,
        request: messages.TakeOver,
        ranks: Sequence[int],
        *,
        is_free: bool,
    ) -> bool:
        """Accept or refuse the next keeper. ``ranks``: those that use this keeper; ``is_free``:
        this keeper neither starts nor ends."""
        problem = ""
        if self.is_service:
            problem = "a service manager runs this keeper: have that restart it"
        elif not is_free:
            problem = "this keeper is starting or stopping"
        elif request.version == messages.VERSION and not request.always:
            problem = "this keeper speaks that version"
        elif ranks and request.version != messages.VERSION:
            problem = (
                f"ranks of this host are training with this keeper, including rank {min(ranks)}, "
                "and could not use one of another version: end the training first"
            )
        if problem:
            await line.send(messages.encode(number, messages.Refused("running", problem)))
            return False
        self._successor = (line, number)
        return True

    async def hand_over(self, pool: SlotPool, options: KeeperOptions, lock: int) -> bool:
        """Hand all images and the lock to the next keeper. Return False if that keeper fails before
        it serves, so that this one has to continue; True otherwise, also without a next keeper."""
        if self._successor is None:
            return True
        (line, number), self._successor = self._successor, None
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                for slot, agreed in pool.held():
                    answer = messages.encode(number, messages.HandedOver(agreed))
                    await line.send(answer, [slot.memory.fd, slot.label_fd])
                text = json.dumps(dataclasses.asdict(options))
                await line.send(messages.encode(number, messages.TakenOver(text)), [lock])
                (await line.receive()).close()
        except (OSError, TimeoutError, MessageError) as error:
            text = str(error) or f"not ready within {TAKE_OVER_S:g} s"
            _log.warning("the next keeper has failed, so this one continues: %s", text)
            return False
        finally:
            line.close()
        return True


async def take_over(folder: KeeperFolder, *, always: bool) -> Estate:
    """Take over the memory of the running keeper; return an empty estate if none is running.
    ``always``: also from one of the same version. Raises RunningError if it refuses,
    CoordinationError if it does not answer."""
    estate = Estate()
    try:
        line = connected(folder.socket)
    except (FileNotFoundError, ConnectionError):
        return estate
    try:
        async with asyncio.timeout(TAKE_OVER_S):
            request = messages.TakeOver(messages.VERSION, always)
            await line.send(messages.encode(1, request))
            while estate.lock < 0:
                await _receive(line, estate)
    except BaseException as error:
        line.close()
        estate.close()
        if isinstance(error, OSError | TimeoutError | MessageError):
            text = str(error) or f"no answer within {TAKE_OVER_S:g} s"
            raise CoordinationError(f"the keeper at {folder.path} does not end: {text}") from error
        raise
    estate.line = line
    return estate


async def _receive(line: Line, estate: Estate) -> None:
    received = await line.receive()
    try:
        _, answer = messages.decode(received.data)
        if isinstance(answer, messages.Refused):
            raise RunningError(answer.text)
        if isinstance(answer, messages.TakenOver) and len(received.fds) == 1:
            estate.options = object_in(json.loads(answer.options), "options")
        elif not isinstance(answer, messages.HandedOver):
            raise CoordinationError(f"a keeper has answered with a {type(answer).__name__}")
    except ValueError as error:
        received.close()
        raise CoordinationError(f"a keeper's options cannot be read: {error}") from error
    except BaseException:
        received.close()
        raise
    if isinstance(answer, messages.TakenOver):
        (estate.lock,) = received.fds
    else:
        estate.images.append((received.fds, answer.agreed))
