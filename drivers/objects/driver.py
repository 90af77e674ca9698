"""Driver contract on obstore. Subclasses add the differences between kinds of stores.

A key is appended to the root: in ``s3://bucket/run`` the key ``a/b`` is the object ``run/a/b``,
with characters that object stores do not support percent-encoded. A folder does not exist by
itself: it is a prefix shared by keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import unquote
from weakref import WeakSet

import numpy as np

from ...core.aio import side_by_side, to_the_end
from ...core.pool import Pool
from ...core.units import ceil_div
from ...errors import (
    AccessError,
    DamagedError,
    ExistsError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from ..calls import Call, run
from ..contract import (
    Buffer,
    CopyTraits,
    Driver,
    ObjectInfo,
    TakePiece,
    Traits,
    Upload,
    check_key,
    check_small,
)
from ..options import Option, option_values
from ..pieces import PieceJoiner, Rooms
from ..schemes import check_installed
from ..threads import Threads
from ..uri import Uri
from ..watching import news, poll
from .compose import ComposedUpload, part_min_nbytes
from .connections import Connections, Held
from .errors import failures, is_unchanged, missing_container, no_store, states_code
from .known_stores import KNOWN
from .names import encoded, split_location
from .options import COMMON_OPTIONS, Requests, settings_of
from .trust import certificates, check_trusted
from .uploads import PartsUpload, Target, WholeUpload

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
SWEEP_QUIET_S = 3600.0
"""Seconds without activity after which an unfinished upload is swept."""
_NBYTES_MAX = 1 << 62
"""Larger than any object, and within obstore's integer range."""
_PIECE_NBYTES = 1 << 20
_ARRIVING_NBYTES = 256 << 10
"""Bytes that obstore collects before passing them on."""
_NOBODYS_KEY = ".holdfast-no-such-object"
"""A key that no object has."""
_BATCH = 1000
"""Maximum number of objects in one bulk delete."""
_LISTED = 100
"""Number of objects of a listing that obstore collects before passing them on."""
_REPEATED = 20
"""Number of successive collections without a new object after which a listing counts as endless. A
page of a store is ten collections, and stores that repeat a page or an object do end."""

_log = logging.getLogger(__name__)


class ObjectDriver(Driver):
    """Objects in a bucket, below a root. Does no I/O before its first operation."""

    OPTIONS: ClassVar[Mapping[str, Option]] = COMMON_OPTIONS

    _bulk_delete = False
    """True if requests of kind ``ONCE`` delete many objects at a time. Other kinds delete one."""

    _states_codes = True
    """True if all servers of this kind give the reason for a refusal in XML."""

    _located = staticmethod(split_location)
    """Returns the bucket and the root that a URI names."""

    _object_max_nbytes: int | None = None
    """Maximum object size of this kind of store."""

    _shared_by_copies: ClassVar[tuple[str, ...]] = ()
    """Options that two drivers have in common if one copies from the other."""

    _labels: Mapping[str, Any] = MappingProxyType({})
    """Arguments passed to obstore's ``put`` for every object."""

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        """Take the values of OPTIONS, by name."""
        self.uri = uri.root
        self._bucket, self._root = self._located(uri)
        self._values = values
        self._settings = settings_of(values)
        self.traits = Traits(
            part_nbytes=self._settings.part_nbytes,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=self._settings.concurrency,
            coalesce_nbytes=1 << 20,
            part_order="ascending",
            exclusive_is_atomic=self._settings.conditional,
            shared=True,
            hands_over=True,
            piece_nbytes=_PIECE_NBYTES,
            bounded=False,
            upload_nbytes=self._settings.part_nbytes,
            object_max_nbytes=self._object_max_nbytes,
        )
        self._threads = Threads(max(4, self._settings.concurrency), uri=self.uri)
        # Not daemons: the interpreter must not exit while a thread is inside obstore.
        self._readers = Pool(self._settings.concurrency, "holdfast-read")
        self._rooms = Rooms(_PIECE_NBYTES)
        self._connections = Connections(self.uri, self._connect, self._threads)
        self._container_seen = False
        self._uploads: WeakSet[Upload] = WeakSet()

    @classmethod
    def open(cls, uri: Uri) -> Self:
        """Return the driver for ``uri``. Raises UriError for an unknown option or an invalid value,
        and if obstore is not installed."""
        values = option_values(cls.OPTIONS, uri)
        check_installed(uri.scheme, uri.redacted)
        return cls(uri, values)

    @property
    @abstractmethod
    def _container(self) -> tuple[str, ...]:
        """Identifies the bucket across all drivers of this process."""

    @abstractmethod
    def _connect(self, requests: Requests) -> Any:
        """Return an obstore store of the bucket for one kind of request. Blocks. Raises
        StorageError, UriError, and obstore's errors."""

    @property
    def _ca(self) -> str:
        """File of certificates to trust in addition to the system's; "" for none."""
        return os.path.expanduser(self._settings.ca)

    def _http(self, requests: Requests, url: str) -> dict[str, Any]:
        """Return obstore's HTTP settings for the server of ``url``. Blocks. Raises StorageError if
        its certificate is not trusted, and UriError if the file of certificates to trust contains
        none."""
        options = self._settings.client(requests, http=url.startswith("http://"))
        if self._settings.ca or (self._ca and url.startswith("https://")):
            options["root_certificate"] = certificates(self._ca, self.uri)
        check_trusted(url, options, self.uri)
        return {"client_options": options, "retry_config": self._settings.retry(requests)}

    def _disconnect(self) -> None:
        """Release everything else that :meth:`_connect` opened. Does not block; safe to call
        twice."""

    async def _drop_unfinished(
        self, path: str, *, whole_key: bool = False, quiet_s: float = 0, began_within_s: float = inf
    ) -> None:
        """Drop unfinished uploads to ``path``, and unless ``whole_key`` also below it. Only affects
        uploads without activity for ``quiet_s`` that began within the last ``began_within_s``
        seconds. Does nothing if the store discards them itself."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        data = await self.fetch(key, start, len(into))
        if into:
            await self._threads.run(
                np.copyto, np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
            )

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`. One request; returns the memory it was received in."""
        path = self._path(key)
        self._check_start(key, start)
        if not nbytes or start > _NBYTES_MAX:
            await self._check_reach(key, start + nbytes)
            return memoryview(b"")
        async with self._reaching(key, start + nbytes):
            data = memoryview(
                await self._call("read", key, "get_range_async", path, start=start, length=nbytes)
            )
        if len(data) < nbytes:
            raise self._short(key, start + len(data), start + nbytes)
        return data

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. One request, whose response is passed on by a thread as
        it arrives, so that no more than a piece of it is in memory."""
        path = self._path(key)
        self._check_start(key, start)
        if not nbytes or start > _NBYTES_MAX:
            await self._check_reach(key, start + nbytes)
            return
        await self._connections.open(Requests.READING)

        def read(call: Call) -> int:
            wanted = {"range": (start, start + nbytes)}
            ask = partial(self._connections.ask, Requests.READING, "get", path, options=wanted)
            arrived_nbytes = 0
            with self._rooms.room() as room, self._connections.hold(ask()) as answer:
                joiner = PieceJoiner(start, nbytes, _PIECE_NBYTES, take, room)
                for arrived in answer.response.stream(min_chunk_size=_ARRIVING_NBYTES):
                    with call:
                        joiner.add(memoryview(arrived))
                    arrived_nbytes += len(arrived)
            return arrived_nbytes

        async with self._reaching(key, start + nbytes):
            reading = run(read, self._settings.limit_s, self._readers.submit)
            arrived_nbytes = await self._timed("read", key, reading)
        if arrived_nbytes < nbytes:
            raise self._short(key, start + arrived_nbytes, start + nbytes)

    def _check_start(self, key: str, start: int) -> None:
        if start < 0:
            raise StorageError(f"a read cannot start at byte {start}", uri=self.uri, key=key)

    @contextlib.asynccontextmanager
    async def _reaching(self, key: str, stop: int) -> AsyncIterator[None]:
        """If the body fails, raise DamagedError if the object ends before ``stop``: stores reject
        ranges beyond the end."""
        try:
            yield
        except StorageError as error:
            if not isinstance(error, NotFoundError | StorageDownError):
                await self._check_reach(key, stop)
            raise

    async def _check_reach(self, key: str, stop: int) -> None:
        nbytes = (await self.stat(key)).nbytes
        if stop > nbytes:
            raise self._short(key, nbytes, stop)

    def _short(self, key: str, nbytes: int, stop: int) -> DamagedError:
        return DamagedError(f"object ends at byte {nbytes}, before {stop}", uri=self.uri, key=key)

    async def create(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.create`. Up to one part it is a single request, sent by ``commit``;
        above that, a multipart upload. Of several uploads from one process to one key, the last to
        end cleans up after those that failed."""
        target = await self._target(key, nbytes)
        upload: PartsUpload | WholeUpload
        if nbytes > self._settings.part_nbytes:
            upload = PartsUpload(target)
        else:
            upload = WholeUpload(target)
        self._uploads.add(upload)
        await upload.begin()
        return upload

    def copies_from(self, source: Driver) -> bool:
        """See :meth:`Driver.copies_from`. Accepts other folders of the same bucket, with the same
        endpoint and credentials."""
        if self.traits.copies is None or not isinstance(source, type(self)):
            return False
        theirs = [source._bucket, *map(source._values.get, self._shared_by_copies)]
        return theirs == [self._bucket, *map(self._values.get, self._shared_by_copies)]

    async def compose(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.compose`. Sends parts of the writes' own sizes."""
        if self.traits.copies is None:
            return await self.create(key, nbytes)
        upload = self._composed(await self._target(key, nbytes))
        self._uploads.add(upload)
        await upload.begin()
        return upload

    def _composed(self, target: Target) -> ComposedUpload:
        """Return an upload with copies. Only called if the traits have any."""
        raise NotImplementedError

    def _allow_copies(self, parts_max: int) -> None:
        """Add copies to the traits. An upload has up to ``parts_max`` parts."""
        least_nbytes = part_min_nbytes(self._settings.part_nbytes)
        copies = CopyTraits(min_nbytes=least_nbytes, object_max_nbytes=parts_max * least_nbytes)
        self.traits = replace(self.traits, copies=copies)

    async def _target(self, key: str, nbytes: int) -> Target:
        path = self._path(key)
        await self._connections.open(Requests.SENDING)

        def drop_unfinished(began_within_s: float) -> Awaitable[None]:
            return self._drop_unfinished(path, whole_key=True, began_within_s=began_within_s)

        return Target(
            self.uri,
            key,
            (*self._container, path),
            nbytes,
            self._settings.part_nbytes,
            self._settings.concurrency,
            self._settings.limit_s,
            partial(self._put, path),
            partial(self.stat, key),
            drop_unfinished,
        )

    async def _put(self, path: str, data: Any, **how: Any) -> Any:
        await self._connections.open(Requests.SENDING)
        return await self._connections.ask(
            Requests.SENDING, "put_async", path, data, **self._labels, **how
        )

    async def get(self, key: str) -> bytes:
        content, _ = await self._get(key)
        return content

    async def _get(self, key: str, **options: str) -> tuple[bytes, str | None]:
        """Return the content and the entity tag of a small object. ``options`` are obstore's."""
        call = self._call("get", key, "get_async", self._path(key), options=options)
        with self._connections.hold(await call) as answer:
            meta = answer.response.meta
            check_small(meta["size"], self.uri, key)
            if answer.response.attributes.get("Content-Type", "").startswith("text/html"):
                raise no_store(self.uri, key)  # such as a login page in place of the object
            content = await self._timed("get", key, answer.response.bytes_async())
            return bytes(content), meta["e_tag"]

    async def watch(self, key: str, known: bytes | None, timeout_s: float) -> bytes | None:
        """See :meth:`Driver.watch`. Requests after the first one are conditional, so an object that
        has not changed is not sent again."""
        options: dict[str, str] = {}

        async def get() -> bytes:
            try:
                content, tag = await self._get(key, **options)
            except StorageError as error:
                if known is None or not is_unchanged(error):
                    raise
                return known
            options.clear()
            if tag is not None:
                options["if_none_match"] = tag
            return content

        return await poll(lambda: news(get, known), timeout_s)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. ``exclusive`` sends one conditional request, which obstore does
        not retry, so ExistsError never refers to this put's own object. With ``conditional=off`` it
        checks before writing, so two concurrent puts may both succeed, as the traits state. On
        cancellation, it still runs to completion."""
        path = self._path(key)
        conditional = self._settings.conditional
        if exclusive and not conditional:
            with contextlib.suppress(NotFoundError):
                await self.stat(key)
                raise ExistsError("the object already exists", uri=self.uri, key=key)
        if exclusive and conditional:
            mode = "create"
            requests = Requests.ONCE
        else:
            mode = "overwrite"
            requests = Requests.SENDING
        how: dict[str, Any] = {
            **self._labels,
            "mode": mode,
            "use_multipart": False,
            "requests": requests,
        }
        try:
            await to_the_end(self._call("put", key, "put_async", path, data, **how))
        except NotFoundError as error:  # only the bucket can be missing
            raise missing_container(self.uri, key) from error
        self._container_seen = True

    async def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        found = None
        with contextlib.suppress(NotFoundError):
            found = await self._call("stat", key, "head_async", path)
        # Outside the except block. Otherwise that error would become the context of obstore's next
        # one, which lives until garbage collection, together with everything the callers hold.
        if found is None:
            # A response to HEAD has no body that would say whether the object or the bucket is
            # missing.
            await self._check_container(key)
            raise NotFoundError("no such object", uri=self.uri, key=key)
        return ObjectInfo(key, found["size"], found["last_modified"].timestamp())

    async def _check_container(self, key: str) -> None:
        if not self._container_seen:
            await self._check_store(key)

    async def _check_store(self, key: str) -> None:
        """Check that a store answers and has the bucket, by requesting an object that does not
        exist.

        A web page in place of a listing parses as an empty listing, but a real store gives the
        reason for its refusal in XML. Raises StorageError. ``key`` is for messages.
        """
        try:
            await self._call("look", key, "get_async", self._path(_NOBODYS_KEY))
        except (NotFoundError, AccessError) as error:
            if states_code(str(error.__cause__)) or not self._states_codes:
                self._container_seen = True
                return
            raise no_store(self.uri, key) from error
        raise no_store(self.uri, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        path = self._root
        if prefix:
            path = self._path(prefix)
            # One after the other: concurrent requests that are cancelled leave connections open.
            with contextlib.suppress(NotFoundError):
                yield await self.stat(prefix)
        await self._connections.open(Requests.READING)
        ask = partial(self._connections.ask, Requests.READING, "list")
        shown: set[str] = set()
        in_vain = 0
        with self._connections.hold(ask(path or None, chunk_size=_LISTED)) as listing:
            while batch := await self._timed("list", prefix, self._next(listing)):
                in_vain += 1
                for found in batch:
                    if found["path"] in shown:
                        continue
                    in_vain = 0
                    shown.add(found["path"])
                    yield ObjectInfo(
                        self._key(found["path"]), found["size"], found["last_modified"].timestamp()
                    )
                if in_vain == _REPEATED:
                    raise self._endless(prefix)
        if not shown:
            await self._check_store(prefix)
        self._container_seen = True

    def _endless(self, prefix: str) -> StorageError:
        return StorageError(
            f"the listing does not end: it only repeats {_REPEATED * _LISTED} objects",
            uri=self.uri,
            key=prefix or None,
            advice="Does the store, or a gateway before it, honour continuation tokens?",
        )

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(NotFoundError):
            await to_the_end(self._call("delete", key, "delete_async", path))

    async def delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. Deletes in bulk if the store can, including live
        unfinished uploads below the prefix."""
        path = self._path(prefix)
        keys = [info.key async for info in self.list(prefix)]
        lanes = self._settings.concurrency
        step = min(_BATCH, max(1, ceil_div(len(keys), lanes)))
        batches = iter([keys[begin : begin + step] for begin in range(0, len(keys), step)])

        async def lane() -> None:
            for batch in batches:
                await self._delete_batch(prefix, batch)

        await side_by_side(*(lane() for _ in range(lanes)))
        await self._drop_unfinished(path)

    async def _delete_batch(self, prefix: str, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        refusal: StorageError | None = None
        if self._bulk_delete and len(paths) > 1 and self._container not in KNOWN.no_bulk_delete:
            try:
                await to_the_end(
                    self._call("delete", prefix, "delete_async", paths, requests=Requests.ONCE)
                )
                return
            except StorageError as error:
                if error.temporary:
                    raise
                refusal = error
        try:
            await to_the_end(self._call("delete", prefix, "delete_async", paths))
        except NotFoundError:
            # Another process is deleting too, and the store rejects missing keys.
            for key in keys:
                await self.delete(key)
        if refusal is None or isinstance(refusal, NotFoundError):
            return
        if self._container not in KNOWN.no_bulk_delete:
            KNOWN.no_bulk_delete.add(self._container)
            _log.warning(
                "%s does not delete many objects with one request, so they are deleted one by "
                "one; bulk_delete=off avoids the attempt: %s",
                self.uri,
                refusal.message,
            )

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. An unfinished upload without activity for an hour, by the
        store's clock, counts as dead."""
        await self._drop_unfinished(self._path(prefix), quiet_s=SWEEP_QUIET_S)

    async def close(self) -> None:
        """See :meth:`Driver.close`. Aborts uploads that are neither committed nor aborted."""
        self._connections.refuse_requests()
        for upload in tuple(self._uploads):
            await upload.abort()
        await self._connections.close()
        self._readers.shutdown(wait=False)
        try:
            await self._threads.close(CLOSE_TIMEOUT_S)
        finally:
            self._disconnect()  # last: a running call may connect again

    def _path(self, key: str) -> str:
        """Return the object's name in the bucket. Raises UriError for an unsafe key, and
        StorageError after close()."""
        check_key(key, uri=self.uri)
        self._connections.check_open()
        try:
            name = encoded(key)
        except UnicodeEncodeError as error:
            raise UriError(f"key {key!r} is not valid Unicode", uri=self.uri, key=key) from error
        if self._root:
            return f"{self._root}/{name}"
        return name

    def _key(self, path: str) -> str:
        return unquote(path.removeprefix(f"{self._root}/" if self._root else ""))

    async def _call(
        self,
        doing: str,
        key: str,
        method: str,
        *args: Any,
        requests: Requests = Requests.READING,
        **kwargs: Any,
    ) -> Any:
        await self._connections.open(requests)
        with failures(doing, self.uri, key):
            ask = partial(self._connections.ask, requests, method)
            return await self._timed(doing, key, ask(*args, **kwargs))

    async def _timed(self, doing: str, key: str, work: Awaitable[T]) -> T:
        """Await ``work`` of obstore within the time limit and return its result. Raises
        StorageError."""
        limit_s = self._settings.limit_s
        with failures(doing, self.uri, key):
            try:
                async with asyncio.timeout(limit_s):
                    return await work
            except TimeoutError as error:
                message = f"{doing} failed: no answer for {limit_s:g} s"
                raise StorageDownError(message, uri=self.uri, key=key) from error
            finally:
                del work  # its result may have a connection: see Held

    async def _next(self, listing: Held) -> Any:
        """Return the next batch of a listing, empty at the end. The builtin ``anext`` with a
        default cannot await obstore's iterators."""
        self._connections.check_open()
        try:
            return await anext(listing.response)
        except StopAsyncIteration:
            return ()
