"""Saves through a keeper: the request to it, and the handling of its events."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ....errors import HoldfastError, SaveError, UsageError
from ...arenas.arena import Arena, KeeperLost
from ...arenas.label import GenerationId
from ...arenas.messages import (
    Agreed,
    Durable,
    Event,
    Flush,
    FlushFailed,
    Local,
    Protected,
    Sealed,
    Voided,
)

_CONFIGURES_DRIVERS = re.compile(
    r"HOLDFAST_(?!KEEPER_|TEST_).*|AWS_.*|AZURE_.*|GOOGLE_.*|CLOUDSDK_.*|HADOOP_.*|KRB5.*"
    r"|SSL_CERT_.*|REQUESTS_CA_BUNDLE|(?i:https?|all|no)_proxy"
)
"""Environment variables passed to a keeper for a flush: they configure access to storage."""


@dataclass(frozen=True)
class Storage:
    """Destination of a keeper's flush. ``uri``: as given; ``compression``: of images."""

    uri: str
    options: Mapping[str, object]
    compression: str | None = None

    def request(self, step: int, branch: str) -> Flush:
        """Return the request to a keeper. Raises SaveError if JSON cannot hold an option."""
        try:
            options = json.dumps(dict(self.options))
        except (TypeError, ValueError) as error:
            raise SaveError(
                "storage_options for a keeper must be numbers, strings or booleans"
            ) from error
        environment = {
            name: value for name, value in os.environ.items() if _CONFIGURES_DRIVERS.fullmatch(name)
        }
        return Flush(step, self.uri, options, environment, self.compression or "", branch)


@dataclass(frozen=True)
class ByKeeper:
    """Options of a save through a keeper, via its ``arena``.

    ``storage``: destination of the flush; None if the step stays in memory. ``flushes``: this rank
    sends the flush request. ``protects``: keepers of several hosts protect each other. ``local``:
    the keeper writes to the host's storage.
    """

    arena: Arena
    storage: Storage | None = None
    flushes: bool = True
    protects: bool = False
    local: bool = False


@dataclass(eq=False)
class KeptStages:
    """Callbacks of a keeper on the engine's loop; the last two may get an error."""

    sealed: Callable[[], None]
    agreed: Callable[[], None]
    local: Callable[[HoldfastError | None], None]
    protected: Callable[[HoldfastError | None], None]


class Keeping:
    """One save through a keeper, seen from its rank. ``ended``: durable, if it goes to storage."""

    def __init__(self, by: ByKeeper, stages: KeptStages) -> None:
        self.arena = by.arena
        self.storage = by.storage
        self.flushes = by.flushes
        self._stages = stages
        self._generation: GenerationId | None = None
        self._beside: dict[str, Callable[[HoldfastError | None], None]] = {}
        """Callbacks of the side stages that are still awaited, by the stage's name."""
        if by.local:
            self._beside["local"] = stages.local
        if by.protects:
            self._beside["protected"] = stages.protected
        self.ended: Future[Durable | None] = Future()

    def tell(self, event: Event | KeeperLost) -> bool:
        """Handle an event of the keeper. Implements :data:`~...arenas.arena.Listener`."""
        match event:
            case Sealed():
                self._generation = event.generation
                self._stages.sealed()
            case Agreed():
                self._is_agreed(event)
            case Local(problem=problem):
                error = SaveError(f"not on local storage: {problem}") if problem else None
                self._end_beside("local", error)
            case Protected():
                self._is_protected(event.generation)
            case Durable():
                self._stages.agreed()
                if not self.ended.done():
                    self.ended.set_result(event)
            case Voided():
                self._end_beside("local", SaveError(event.text))
                self._fail(SaveError(event.text))
            case FlushFailed(final=True):
                self._fail(SaveError(event.text))
            case KeeperLost():
                self._is_lost(event)
        return bool(self._beside) or not self.ended.done()

    def _is_agreed(self, event: Agreed) -> None:
        self._stages.agreed()
        if not event.local:
            self._end_beside("local", UsageError("this step is not written to the host's storage"))
        if self.storage is None and not self.ended.done():
            self.ended.set_result(None)

    def _is_protected(self, generation: GenerationId) -> None:
        error = None
        if generation != self._generation:
            text = f"a later step, {generation.step}, is protected instead of this one"
            error = SaveError(text)
        self._end_beside("protected", error)

    def _is_lost(self, event: KeeperLost) -> None:
        """Handle the loss of the keeper; the next one may still flush the step."""
        error = SaveError(f"not kept in memory: {event.text}")
        for stage in list(self._beside):
            self._end_beside(stage, error)
        if self.storage is None:
            self._fail(error)

    def _fail(self, error: SaveError) -> None:
        self._end_beside("protected", error)
        if not self.ended.done():
            self.ended.set_exception(error)

    def _end_beside(self, stage: str, error: HoldfastError | None) -> None:
        """End a side stage, unless it has ended or this save has none."""
        callback = self._beside.pop(stage, None)
        if callback is not None:
            callback(error)
