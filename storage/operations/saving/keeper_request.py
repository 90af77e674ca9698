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
        self._awaits_protection = by.protects
        self._awaits_local = by.local
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
                self._is_local(SaveError(f"not on local storage: {problem}") if problem else None)
            case Protected():
                self._is_protected(event.generation)
            case Durable():
                self._stages.agreed()
                if not self.ended.done():
                    self.ended.set_result(event)
            case Voided():
                self._is_local(SaveError(event.text))
                self._fail(SaveError(event.text))
            case FlushFailed(final=True):
                self._fail(SaveError(event.text))
            case KeeperLost():
                self._is_lost(event)
        return self._awaits_protection or self._awaits_local or not self.ended.done()

    def _is_agreed(self, event: Agreed) -> None:
        self._stages.agreed()
        if not event.local:
            text = "this step is not written to the host's storage"
            self._is_local(UsageError(text))
        if self.storage is None and not self.ended.done():
            self.ended.set_result(None)

    def _is_lost(self, event: KeeperLost) -> None:
        """Handle the loss of the keeper; the next one may still flush the step."""
        error = SaveError(f"not kept in memory: {event.text}")
        self._is_local(error)
        self._unprotected(error)
        if self.storage is None:
            self._fail(error)

    def _fail(self, error: SaveError) -> None:
        self._unprotected(error)
        if not self.ended.done():
            self.ended.set_exception(error)

    def _is_local(self, error: HoldfastError | None) -> None:
        if self._awaits_local:
            self._awaits_local = False
            self._stages.local(error)

    def _is_protected(self, generation: GenerationId) -> None:
        if not self._awaits_protection:
            return
        if generation == self._generation:
            self._awaits_protection = False
            self._stages.protected(None)
        else:
            text = f"a later step, {generation.step}, is protected instead of this one"
            self._unprotected(SaveError(text))

    def _unprotected(self, error: SaveError) -> None:
        if self._awaits_protection:
            self._awaits_protection = False
            self._stages.protected(error)
