"""Saves through a keeper: the request to it, and the handling of its events."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace

from ....errors import SaveError, UsageError
from ...arenas.arena import Arena, KeeperLost
from ...arenas.label import GenerationId
from ...arenas.messages import (
    Agreed,
    Event,
    Flush,
    FlushEnd,
    FlushLost,
    Local,
    Protected,
    Sealed,
    Voided,
)
from ...pipeline.base import Base
from .handle import SaveHandle

_CONFIGURES_DRIVERS = re.compile(
    r"HOLDFAST_(?!KEEPER_|TEST_).*|AWS_.*|AZURE_.*|GOOGLE_.*|CLOUDSDK_.*|HADOOP_.*|KRB5.*"
    r"|SSL_CERT_.*|REQUESTS_CA_BUNDLE|(?i:https?|all|no)_proxy"
)
"""Environment variables passed to processes that write: they configure access to storage."""


@dataclass(frozen=True)
class Storage:
    """Destination of a keeper's flush. ``uri``: as given; ``compression``: of images; ``base``: a
    checkpoint beside it to borrow from."""

    uri: str
    options: Mapping[str, object]
    compression: str | None = None
    base: Base | None = None

    def place(self) -> tuple[str, str, Mapping[str, str]]:
        """Return the URI, the driver options as JSON, and the environment variables that configure
        drivers, for another process. Raises SaveError if JSON cannot hold an option."""
        try:
            text = json.dumps(dict(self.options))
        except (TypeError, ValueError) as error:
            raise SaveError(
                "storage_options for a keeper must be numbers, strings or booleans"
            ) from error
        variables = os.environ.items()
        configuring = {
            name: value for name, value in variables if _CONFIGURES_DRIVERS.fullmatch(name)
        }
        return self.uri, text, configuring

    def request(self, step: int, branch: str) -> Flush:
        """Return the request to a keeper. Raises SaveError if JSON cannot hold an option."""
        flush = Flush(step, *self.place(), self.compression or "", branch)
        if self.base is None:
            return flush
        return replace(flush, base=self.base.key() or "", limits=astuple(self.base.limits))


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


class Keeping:
    """One save through a keeper, seen from its rank: ends the stages of its ``handle``.

    ``sealed`` is called when the image is. ``ended``: durable, if the step goes to storage.
    """

    def __init__(self, by: ByKeeper, handle: SaveHandle, sealed: Callable[[], None]) -> None:
        self.arena = by.arena
        self.storage = by.storage
        self.flushes = by.flushes
        self._handle = handle
        self._sealed = sealed
        self._generation: GenerationId | None = None
        self.ended: Future[FlushEnd | None] = Future()

    def tell(self, event: Event | KeeperLost) -> bool:
        """Handle an event of the keeper. Implements :data:`~...arenas.arena.Listener`."""
        match event:
            case Sealed():
                self._generation = event.generation
                self._sealed()
            case Agreed():
                self._is_agreed(event)
            case Local(problem=problem):
                error = SaveError(f"not on local storage: {problem}") if problem else None
                self._handle.local.end(error)
            case Protected():
                self._is_protected(event.generation)
            case FlushEnd(problem=""):
                self._handle.agreed.reach()
                if not self.ended.done():
                    self.ended.set_result(event)
            case Voided():
                self._handle.local.fail(SaveError(event.text))
                self._fail(SaveError(event.text))
            case FlushEnd(final=True) | FlushLost():
                self._fail(SaveError(event.problem))
            case KeeperLost():
                self._is_lost(event)
        beside = (self._handle.local.status, self._handle.protected.status)
        return "not yet" in beside or not self.ended.done()

    def _is_agreed(self, event: Agreed) -> None:
        self._handle.agreed.reach()
        if not event.local:
            text = "this step is not written to the host's storage"
            self._handle.local.fail(UsageError(text))
        if self.storage is None and not self.ended.done():
            self.ended.set_result(None)

    def _is_protected(self, generation: GenerationId) -> None:
        error = None
        if generation != self._generation:
            text = f"a later step, {generation.step}, is protected instead of this one"
            error = SaveError(text)
        self._handle.protected.end(error)

    def _is_lost(self, event: KeeperLost) -> None:
        """Handle the loss of the keeper; the next one may still flush the step."""
        error = SaveError(f"not kept in memory: {event.text}")
        self._handle.local.fail(error)
        self._handle.protected.fail(error)
        if self.storage is None:
            self._fail(error)

    def _fail(self, error: SaveError) -> None:
        self._handle.protected.fail(error)
        if not self.ended.done():
            self.ended.set_exception(error)
