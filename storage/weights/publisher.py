"""Publishes versions of a model's weights. Every rank of the job has a publisher."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import join, redact
from ...errors import HoldfastError, NotFoundError, StorageError, SupersededError, UsageError
from ..format.manifest import MANIFEST_KEY
from ..format.patches import PatchBases, VersionRef, zstandard
from ..operations.call_errors import (
    announcing_errors,
    announcing_errors_of_call,
    closing,
    printed_step,
    printed_uri,
)
from ..operations.location import UriLike
from ..operations.options import DEADLINE_S, Lazy, SaveOptions
from ..operations.saving.handle import SaveHandle
from ..operations.saving.start_save import Destination, begin_save
from ..pipeline.patching import Publication, PublishedImage
from ..ranks.calls import Call
from ..ranks.messages import LEADER, Nothing, Round
from ..ranks.process_group import Group, acting_in, current_rank, current_team, current_world
from ..ranks.team import Team
from ..runtime.engine import check_may_wait, run, start
from .cast import cast_weights, checked_dtype
from .channel import (
    HEAD_KEY,
    LIST_LAG_S,
    PATCHES_TO_ANCHOR,
    Head,
    has_version,
    leased,
    newest_after,
    read_head,
    read_version,
    version_key,
)
from .memory import Serving, is_in_memory, served

if TYPE_CHECKING:
    from ..serving.store import MemoryStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """The newest version of a channel: its ``sequence``, 0 for none; the ``version`` that its
    publisher gave it, -1 for none; its ``attempt``, and the id of its ``publisher``."""

    sequence: int = 0
    version: int = -1
    attempt: str = ""
    publisher: str = ""
    uri: str = ""
    """URI of a channel in the leader's memory; "" for any other."""


_MEET = Round.of("publish", Nothing, Published)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of :func:`holdfast.publish`."""

    keep: int = 8
    anchor: int = 16
    dtype: str | torch.dtype | None = None
    lazy: Lazy = True
    budget_nbytes: int | None = None
    deadline_s: float = DEADLINE_S
    storage_options: Mapping[str, object] | None = None
    process_group: Group = None
    serving: Serving = field(default_factory=Serving)

    def checked(self) -> SaveOptions:
        """Return the options of each save. Raises UsageError for invalid values."""
        if self.keep < PATCHES_TO_ANCHOR or self.anchor < 1:
            raise UsageError(
                f"keep={self.keep}, anchor={self.anchor}",
                advice=f"Keep at least {PATCHES_TO_ANCHOR} versions; one in anchor >= 1 is whole.",
            )
        checked_dtype(self.dtype)
        options = SaveOptions(
            lazy=self.lazy,
            budget_nbytes=self.budget_nbytes,
            deadline_s=self.deadline_s,
            overwrite=False,
        )
        options.check()
        return options


class Publisher:
    """Publishes versions to the channel ``uri``; made by :func:`holdfast.publish`."""

    def __init__(self, uri: UriLike, options: PublishOptions) -> None:
        zstandard()
        self._uri = os.fspath(uri)
        self._options = options
        self._save_options = options.checked()
        with acting_in(options.process_group):
            self._leads = current_rank() == LEADER
        self._id = secrets.token_hex(8)
        self._image = PublishedImage()
        self._head: Head | None = None
        self._offers: list[tuple[float, int]] = []
        """When the head was put, by the clock of the storage, and the oldest version on offer."""
        self._has_published = False
        self._anchor: VersionRef | None = None
        self._push: Future[None] | None = None
        self._pushed: tuple[SaveHandle, int] | None = None
        self._before: int | None = None
        self._superseded: HoldfastError | None = None
        self._store: MemoryStore | None = None
        with acting_in(options.process_group):
            self._newest: Published | None = self._meet()

    @property
    def uri(self) -> str:
        """The URI for subscribers, without secrets."""
        return redact(self._uri)

    @property
    def sent_nbytes(self) -> int | None:
        """Bytes sent to subscribers of a channel in this process's memory; None for any other."""
        return None if self._store is None else self._store.sent_nbytes

    @property
    def newest(self) -> int | None:
        """The newest published version, as far as this process knows; None without any. Includes
        a push whose handle has been waited for."""
        if self._pushed is not None and self._pushed[0].report is not None:
            return self._pushed[1]
        return self._before

    def push(self, version: int, state: object) -> SaveHandle:
        """Start publishing ``state`` as ``version``; return once training may go on.

        ``state`` is a nested dict of tensors and modules, as for :func:`holdfast.async_save`, in
        any layout. Every rank calls this. The version becomes visible as a whole, once the parts of
        all ranks are durable; the handle's ``wait()`` returns then, or raises the error. A push
        that fails publishes nothing. The next one stores all weights, since nobody may have the
        bytes that it would be a patch of. A push first waits for the previous one.

        ``version`` must be greater than all published ones: after a restart from an older
        checkpoint, versions continue above the newest. Raises UsageError if it is not,
        SupersededError once another publisher has published to this channel, StateError, and the
        errors of :func:`holdfast.async_save`.
        """
        check_may_wait()
        with acting_in(self._options.process_group):
            if self._superseded is not None:  # other ranks may not know
                with announcing_errors_of_call(
                    "publish", self._uri, None, self._options.deadline_s
                ):
                    raise self._superseded
            self._settle()
            newest = self._newest = self._newest or self._meet()
            sequence = newest.sequence + 1
            uri = join(self._uri, version_key(sequence))
            try:
                with announcing_errors_of_call("save", uri, version, self._options.deadline_s):
                    self._check(newest, version)
                    to = self._destination(newest)
                    weights = cast_weights(state, checked_dtype(self._options.dtype))
                handle, future = begin_save(
                    to, weights, version, self._save_options, admit=lambda: self._admitted(sequence)
                )
            except BaseException:
                self._forget()
                raise
            self._before = self.newest
            self._pushed = (handle, version)
            self._push = start(self._finish(handle, future, sequence, version))
        if not self._options.lazy:
            handle.captured.wait()
        return handle

    def close(self) -> None:
        """Wait for the push in flight, and free the copy of the weights. The error of a push is
        raised by its handle, not here."""
        self._settle()
        self._image = PublishedImage()
        self._newest = None
        if self._store is not None:
            self._store.__exit__()
            self._store = None
        if self._superseded is None:
            self._superseded = UsageError("this publisher is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Wait for the end of the previous push."""
        if self._push is not None:
            with suppress(HoldfastError):
                self._push.result()
            self._push = None

    def _forget(self) -> None:
        """Forget all that a failed push leaves uncertain, as all other ranks do."""
        self._anchor = None
        self._head = None
        self._image = PublishedImage()
        self._newest = None

    def _check(self, newest: Published, version: int) -> None:
        if printed_step(version) != version or version < 0:
            raise UsageError(f"version is {version!r}, which is no whole number from 0")
        if version <= newest.version:
            raise UsageError(
                f"version {version} is not newer than {newest.version}, which is published",
                uri=printed_uri(self._uri),
                advice=f"Go on with versions from {newest.version + 1}: subscribers may have the "
                "others, so a number is never used twice.",
            )

    def _destination(self, newest: Published) -> Destination:
        publication = Publication(self._image, self._bases(newest))
        key = version_key(newest.sequence + 1)
        options = self._options.storage_options
        return Destination(self._uri, options, key, publication=publication)

    def _bases(self, newest: Published) -> PatchBases | None:
        anchor = self._anchor
        if anchor is None:
            return None
        previous = VersionRef(newest.sequence, newest.attempt)
        distance = newest.sequence + 1 - anchor.sequence
        if distance >= self._options.anchor:
            return PatchBases(previous, anchor, whole=True)
        return PatchBases(previous, anchor, to_anchor=distance % PATCHES_TO_ANCHOR == 0)

    def _meet(self) -> Published:
        """Return the newest version, as the leader finds it."""
        call = Call("publish", printed_uri(self._uri))
        team = current_team(call, self._options.deadline_s, saving=True)
        with announcing_errors(team):
            if self._leads and self._store is None and is_in_memory(self._uri):
                self._store, self._uri = served(self._uri, self._options.serving)
            driver = self._open()
        found = run(self._find_newest(driver, team))
        self._uri = found.uri or self._uri
        if found.version >= 0:
            self._pushed = None
            self._before = found.version
        return found

    def _open(self) -> Driver:
        return open_driver(self._uri, current_world(), **(self._options.storage_options or {}))

    async def _find_newest(self, driver: Driver, team: Team) -> Published:
        async def find(statements: object) -> Published:
            head = await read_head(driver)
            sequence = head.sequence
            if not await has_version(driver, sequence):
                sequence = max([0, *await _listed(driver)])
            sequence = await newest_after(driver, sequence)
            uri = self._uri if self._store is not None else ""
            if not sequence:
                return Published(uri=uri)
            manifest, _ = await read_version(driver, sequence)
            if self._has_published and manifest.branch != self._id:
                raise self._told(sequence)
            version = -1 if manifest.step is None else manifest.step
            return Published(sequence, version, manifest.attempt, manifest.branch, uri)

        async with closing(driver), team.session():
            try:
                return await team.round(_MEET, Nothing(), find)
            except BaseException as error:
                await team.fail(error)
                raise

    async def _admitted(self, sequence: int) -> str:
        """Raise SupersededError if another publisher has published the next version, StorageError
        if this one has; return what marks a version as ours."""
        async with closing(self._open()) as driver:
            manifest = None
            with suppress(NotFoundError):
                manifest, _ = await read_version(driver, sequence)
            # The head afterwards: it goes on before a version is deleted.
            head = await read_head(driver)
            if head.sequence > sequence or (manifest and manifest.branch != self._id):
                raise self._told(sequence)
            if manifest is not None:
                raise StorageError(
                    "an earlier push, whose put seemed to have failed, was published meanwhile",
                    uri=printed_uri(self._uri),
                    key=version_key(sequence, MANIFEST_KEY),
                    advice="Push the next version.",
                )
        return self._id

    def _told(self, sequence: int) -> SupersededError:
        return SupersededError(
            "another publisher has published to this channel meanwhile",
            uri=printed_uri(self._uri),
            key=version_key(sequence, MANIFEST_KEY),
            advice="One trainer at a time can publish to a channel. Stop one of them, or give each "
            "a channel of its own.",
        )

    async def _finish(
        self, handle: SaveHandle, future: Future[None], sequence: int, version: int
    ) -> None:
        """Take over the outcome of a push."""
        try:
            await handle.durable.reached()
        except HoldfastError as error:
            self._forget()
            if isinstance(error, SupersededError):
                self._superseded = self._told(sequence)
            return
        finally:
            await asyncio.wait([asyncio.wrap_future(future)])
        assert handle.report is not None
        is_anchor = self._image.is_whole
        if is_anchor:
            self._anchor = VersionRef(sequence, handle.report.attempt)
        self._newest = Published(sequence, version, handle.report.attempt, self._id)
        self._has_published = True
        if not self._leads:
            return
        try:
            async with closing(self._open()) as driver:
                await self._advance(driver, sequence, is_anchor=is_anchor)
        except HoldfastError as error:
            _log.warning("version %d is published, but not announced: %s", version, error)

    async def _advance(self, driver: Driver, sequence: int, *, is_anchor: bool) -> None:
        """Announce a version in the head; delete versions that no subscriber needs.

        Versions stay for one push after the head has withdrawn them. On storage that hosts share
        they also stay for LIST_LAG_S: a listing may lack the lease of a reader until then.
        """
        before, self._head = self._head, None  # until the put has succeeded
        stored = await read_head(driver)
        if stored.sequence >= sequence:
            return  # another publisher goes on, and deletes
        before = before or await _head_before(driver, stored, sequence)
        head = before.with_next(anchor=is_anchor, keep=self._options.keep)
        await driver.put(HEAD_KEY, head.encode())
        now_s = (await driver.stat(HEAD_KEY)).modified_s
        self._offers.append((now_s, head.offered))
        if driver.traits.shared and self._store is None:
            before = replace(before, offered=self._offered_at(now_s - LIST_LAG_S))
        deleted = before.unneeded(await leased(driver, now_s, tidy=True))
        for old in deleted:
            await driver.delete(version_key(old, MANIFEST_KEY))
            await driver.delete_all(version_key(old))
        self._head = head.without(deleted)

    def _offered_at(self, at_s: float) -> int:
        """Return the oldest version on offer at that time, 0 if this publisher does not know it."""
        settled = [offered for put_s, offered in self._offers if put_s <= at_s]
        self._offers = self._offers[max(0, len(settled) - 1) :]
        return settled[-1] if settled else 0


async def _head_before(driver: Driver, head: Head, sequence: int) -> Head:
    """Return the head for the version before ``sequence``: ``head`` with all versions since."""
    for missing in range(head.sequence + 1, sequence):
        try:
            manifest, _ = await read_version(driver, missing)
        except NotFoundError:  # another publisher has deleted it
            head = replace(head, sequence=missing)
        else:
            head = head.with_next(anchor=not manifest.is_patched, keep=missing)
    return head


async def _listed(driver: Driver) -> set[int]:
    """Return the numbers of all versions with a manifest, by listing: if there is no head."""
    suffix = f"/{MANIFEST_KEY}"
    keys = [info.key async for info in driver.list()]
    folders = [key.removesuffix(suffix) for key in keys if key.endswith(suffix)]
    return {int(folder) for folder in folders if folder.isdecimal()}
