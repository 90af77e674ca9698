"""Engines that are wrong on purpose, each in one way. A simulator that does not catch them proves
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from holdfast.drivers.contract import TakePiece
from holdfast.drivers.layers.layer import Layer, Operation
from holdfast.drivers.layers.retry import RetryLayer
from holdfast.drivers.local import files as local_files
from holdfast.drivers.local import tree as local_tree
from holdfast.errors import (
    DeadlineError,
    ExistsError,
    NotFoundError,
    RankFailedError,
    StorageError,
    SupersededError,
)
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations.loading import load
from holdfast.storage.operations.maintenance import prune
from holdfast.storage.operations.rounds import Arrived, Differences, Fit
from holdfast.storage.operations.saving import save
from holdfast.storage.pipeline.image_writer import ImageWriter
from holdfast.storage.protocol import attempt as attempts
from holdfast.storage.protocol import collect, commit, limits, records
from holdfast.storage.protocol.attempt import Attempt
from holdfast.storage.protocol.current import current_attempt
from holdfast.storage.ranks import following, member, rendezvous, store_team, watch
from holdfast.storage.ranks.calls import Call
from holdfast.storage.ranks.hosts import numbered

from .breaking import BROKEN, Broken, Patch, broken
from .run import Failure, run
from .schedule import drawn

__all__ = ["BROKEN", "Broken", "seeds_until_caught"]


@broken("a rank reports its image before it is durable", 4)
def _manifest_before_data() -> Iterator[Patch]:
    class Hasty:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.write, self.abort = inner.write, inner.abort

        async def commit(self, nbytes: int | None = None) -> None:
            self.later = asyncio.ensure_future(_quietly(partial(self._inner.commit, nbytes)))

    async def opened(self: ImageWriter, key: Any) -> Any:
        return Hasty(await self._driver.create(await key(), self._layout.nbytes))

    yield ImageWriter, "_open", opened
    yield commit, "check_images", _nothing


@broken(
    "the leader does not look whether all images are there, and a rank drops the error of "
    "its commit",
    2,
)
def _dropped_error() -> Iterator[Patch]:
    class Careless:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.abort = inner.abort

        async def write(self, start: int, data: Any) -> None:
            with contextlib.suppress(StorageError):
                await self._inner.write(start, data)

        async def commit(self, nbytes: int | None = None) -> None:
            with contextlib.suppress(StorageError):
                await self._inner.commit(nbytes)

    async def opened(self: ImageWriter, key: Any) -> Any:
        return Careless(await self._driver.create(await key(), self._layout.nbytes))

    yield ImageWriter, "_open", opened
    yield commit, "check_images", _nothing


@broken("an error of the manifest's put is dropped", 123)
def _dropped_commit() -> Iterator[Patch]:
    real = commit.commit

    async def committed(driver: Any, attempt: Any, manifest: Any, putting: Any) -> Any:
        try:
            return await real(driver, attempt, manifest, putting)
        except StorageError:
            return None

    yield save, "commit", committed


@broken("no fsync of folders", 32, "posix")
def _no_folder_sync() -> Iterator[Patch]:
    yield local_files, "sync_folder", lambda fd: None
    yield local_tree, "sync_folder", lambda fd: None


@broken("no fsync of files", 2, "posix")
def _no_file_sync() -> Iterator[Patch]:
    def publish(self: Any, nbytes: int, *, exclusive: bool = False) -> None:
        with self._opened() as file:
            self._sync_name(file, take_back=self._give_name(exclusive))

    yield local_files.NewFile, "publish", publish


@broken("the file is renamed before its fsync", 32, "posix")
def _rename_first() -> Iterator[Patch]:
    def publish(self: Any, nbytes: int, *, exclusive: bool = False) -> None:
        with self._opened() as file:
            free = self._give_name(exclusive)
            local_files.os.fsync(file.plain)
            self._sync_name(file, take_back=free)

    yield local_files.NewFile, "publish", publish


@broken("a failed fsync is tried again", 2, "posix")
def _sync_again() -> Iterator[Patch]:
    def publish(self: Any, nbytes: int, *, exclusive: bool = False) -> None:
        with self._opened() as file:
            try:
                local_files.os.fsync(file.plain)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                local_files.os.fsync(file.plain)
            self._sync_name(file, take_back=self._give_name(exclusive))

    yield local_files.NewFile, "publish", publish


@broken("files are written under their own name", 1, "posix")
def _in_place() -> Iterator[Patch]:
    def init(
        self: Any, tree: Any, key: str, nbytes: int, *, direct: str, create: Any = None
    ) -> None:
        real(self, tree, key, nbytes, direct=direct)
        self._temporary = self._name + ".new"
        if key != MANIFEST_KEY:
            return
        self._temporary = self._name

        def creat(folder: int, name: str, size: int) -> int:
            os = local_files.os
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            return local_files.create_file(folder, name, size)

        self._create_file = creat

    real = local_files.NewFile.__init__
    yield local_files.NewFile, "__init__", init


@broken("the collector knows no grace", 10)
def _no_grace() -> Iterator[Patch]:
    yield limits, "GRACE_S", 0.0


@broken("the collector deletes without an abort record", 100)
def _no_abort_record() -> Iterator[Patch]:
    async def collected(
        driver: Any, attempt: Any, has_record: bool, now_s: float, grace_s: float
    ) -> None:
        if not has_record:  # as the list had it, a while ago
            await attempts.delete_attempt(driver, attempt)
        else:
            await real(driver, attempt, has_record, now_s, grace_s)

    real = collect.abort_and_delete
    yield collect, "abort_and_delete", collected
    yield commit, "abort_and_delete", collected


@broken("the collector does not ask which attempt is current", 0)
def _collects_current() -> Iterator[Patch]:
    async def none(driver: Any) -> None:
        return None

    yield collect, "current_attempt", none
    yield commit, "current_attempt", none
    yield limits, "GRACE_S", 60.0


@broken("the commit puts no commit record", 10)
def _no_claim() -> Iterator[Patch]:
    async def committed(driver: Any, attempt: Any, manifest: Any, putting: Any) -> Any:
        data, before = manifest.encode(), await current_attempt(driver)
        await driver.put(MANIFEST_KEY, data)
        return None if before in (None, attempt.id) else Attempt(before)

    yield save, "commit", committed


@broken("the commit record is not put exclusively", 115)
def _claim_not_exclusive() -> Iterator[Patch]:
    async def committed(driver: Any, attempt: Any, manifest: Any, putting: Any) -> Any:
        class Lax:
            uri, traits = driver.uri, driver.traits
            stat, get, delete, list, read = (
                driver.stat,
                driver.get,
                driver.delete,
                driver.list,
                driver.read,
            )

            async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
                await driver.put(key, data)

        lax: Any = Lax()
        return await real(lax, attempt, manifest, putting)

    real = commit.commit
    yield save, "commit", committed


@broken("the marker is not checked after the commit record", 124)
def _no_look() -> Iterator[Patch]:
    real = attempts.check_marker

    async def trusted(driver: Any, attempt: Any) -> Any:
        try:
            return await real(driver, attempt)
        except SupersededError:
            return SimpleNamespace(modified_s=attempts.time.time())

    for module in (attempts, collect, commit):
        yield module, "check_marker", trusted
    yield commit, "check_images", _nothing


@broken("the marker is deleted last, and nobody looks for the images", 0)
def _marker_last() -> Iterator[Patch]:
    async def deleted(driver: Any, attempt: Any) -> None:
        with contextlib.suppress(StorageError):
            keys = [info.key async for info in driver.list(attempt.prefix)]
            for key in sorted(keys, key=lambda k: (k == attempt.marker_key, "safetensors" in k)):
                await driver.delete(key)

    for module in (attempts, collect, commit, save):
        yield module, "delete_attempt", deleted
    yield commit, "check_images", _nothing


@broken("the old attempt is deleted before the manifest is put", 0)
def _deletes_first() -> Iterator[Patch]:
    async def committed(driver: Any, attempt: Any, manifest: Any, putting: Any) -> Any:
        before = await current_attempt(driver)
        if before is not None and before != attempt.id:
            await attempts.delete_attempt(driver, Attempt(before))
        return await real(driver, attempt, manifest, putting)

    real = commit.commit
    yield save, "commit", committed


@broken(
    "what was replaced is deleted at once, also while its own leader may try its put again",
    None,
    "objects",
)
def _replaced_goes_at_once() -> Iterator[Patch]:
    yield commit, "is_settled", _always


@broken("whether what was replaced is settled is asked after the put", None, "objects")
def _asked_late() -> Iterator[Patch]:
    async def committed(driver: Any, attempt: Any, manifest: Any, putting: Any) -> Any:
        obsolete = await real(driver, attempt, manifest, putting)

        async def now_s() -> float:
            return float((await driver.stat(attempt.record_key)).modified_s)

        return obsolete if obsolete and await is_settled(driver, obsolete, now_s) else None

    real, is_settled = commit.commit, commit.is_settled
    yield save, "commit", committed
    yield commit, "is_settled", _always


@broken("a failed put of the manifest counts as not done", None)
def _put_not_done() -> Iterator[Patch]:
    async def committed(self: Any, fragments: Any) -> bytes:
        try:
            return await real(self, fragments)
        except StorageError:
            self._uncommitted = self._attempt
            raise

    real = save._Leader.commit
    yield save._Leader, "commit", committed


@broken("nobody looks whether the storage has kept the manifest", None)
def _manifest_not_read_back() -> Iterator[Patch]:
    yield commit, "_is_kept", _always


@broken("attempts share one id", 0)
def _one_id() -> Iterator[Patch]:
    async def announce(driver: Any, contents: Any = None) -> Any:
        attempt = Attempt("20260101T000000-00000000")
        await driver.put(attempt.marker_key, b"{}")
        with contextlib.suppress(NotFoundError):
            await driver.delete(attempt.record_key)
        return attempt

    yield attempts, "announce", announce
    yield commit, "announce", announce


@broken("the commit does not check coverage", 40)
def _no_coverage() -> Iterator[Patch]:
    from holdfast.storage.format import merge

    yield merge, "coverage_errors", lambda tensors, shards: []


@broken("the leader merges what it has when a rank is silent", 40)
def _merges_what_it_has() -> Iterator[Patch]:
    return _takes_what_there_is("commit")


@broken("the first rank of a host tells what it has when another is silent", 40)
def _tells_what_it_has() -> Iterator[Patch]:
    return _takes_what_there_is("written")


def _takes_what_there_is(of: str) -> Iterator[Patch]:
    from holdfast.storage.format import merge

    async def gathered(self: Any, name: str, ranks: Any, what: str) -> Any:
        try:
            return await real(self, name, ranks, what)
        except (DeadlineError, RankFailedError):
            if name != of:
                raise
            found = [self._keys.get(f"{name}/{r}") for r in ranks]
            return [told for told in found if told is not None]

    def decoded(kind: Any, received: Any, ranks: Any, where: str) -> Any:
        return [kind.decode(data, where) for data in received]

    real = store_team.StoreTeam._gather
    yield store_team.StoreTeam, "_gather", gathered
    yield store_team, "_decode_all", decoded
    yield merge, "coverage_errors", lambda tensors, shards: []


@broken("nobody minds silence", 39)
def _no_deadline() -> Iterator[Patch]:
    yield watch.Watch, "look", lambda self, statuses, what, now_s: (0, 0.0)


@broken("an exclusive put that is tried again takes every taken key for its own", None)
def _not_its_own() -> Iterator[Patch]:
    async def nobodys(self: Any, key: str, data: bytes) -> bool:
        return True

    yield RetryLayer, "_is_ours", nobodys
    yield commit, "check_range_reads", _nothing  # it would read what another has put


@broken("all commit records are alike", 349)
def _nameless_records() -> Iterator[Patch]:
    yield records, "_new_commit_record", lambda: b""


@broken("a reader takes what is missing for damage", 6)
def _no_second_look() -> Iterator[Patch]:
    async def always(driver: Any, attempt: Any) -> bool:
        return True

    yield load, "is_current", always


@broken("a read in pieces that is tried again begins anew", 1874, "objects")
def _takes_pieces_twice() -> Iterator[Patch]:
    async def from_the_start(self: Any, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        operation = Operation("read", key, nbytes)
        call = partial(self.inner.read_pieces, key, start, nbytes, take)
        await self.around(operation, call)

    yield Layer, "read_pieces", from_the_start


@broken("ranks that load do not compare their manifests", 149)
def _no_comparing() -> Iterator[Patch]:
    async def judge(check: Any, reports: Any) -> Fit:
        return Fit(Differences(), numbered([report.peers for report in reports]))

    async def any_of(statements: Any) -> Arrived:
        return Arrived(complete=True)

    yield load, "_judge", judge
    yield load, "_unanimous", any_of


@broken("pruning deletes the data before the manifest", 7)
def _prunes_data_first() -> Iterator[Patch]:
    async def deleted(driver: Any, checkpoint: Any) -> bool:
        manifest, _ = await prune.read_manifest(driver)
        if manifest.attempt != checkpoint.attempt:
            return False
        await driver.delete_all(prune.Attempt(checkpoint.attempt).prefix)
        await driver.delete(MANIFEST_KEY)
        return True

    yield prune, "delete_checkpoint", deleted


@broken("a pruning puts no prune lock", None, "objects")
def _prunes_untold() -> Iterator[Patch]:
    async def deleted(driver: Any, attempt: Any) -> bool:
        manifest, _ = await prune.read_manifest(driver)
        if manifest.attempt == attempt.id:
            await driver.delete(MANIFEST_KEY)
        return bool(manifest.attempt == attempt.id)

    yield prune, "delete_manifest", deleted


@broken("a save that a pruning bars does not hear of it before it has put its manifest", 22)
def _barred_too_late() -> Iterator[Patch]:
    real = commit.wait_for_prunings

    async def wait(driver: Any, now_s: Any) -> None:
        if not isinstance(now_s, partial):  # of a save that begins
            await real(driver, now_s)

    yield commit, "wait_for_prunings", wait


@broken("a failed save leaves everything, and nobody collects", 2)
def _nobody_collects() -> Iterator[Patch]:
    yield commit, "collect_others", _nothing


@broken("the error of a chunk's write is dropped", None)
def _dropped_write() -> Iterator[Patch]:
    real = ImageWriter._write

    async def write(self: Any, *args: Any) -> None:
        with contextlib.suppress(StorageError):
            await real(self, *args)

    from holdfast.drivers.ranges import Ranges

    yield ImageWriter, "_write", write
    yield Ranges, "check_complete", lambda self, nbytes=None: None


@broken("ranks count their calls", 3)
def _counted_calls() -> Iterator[Patch]:
    real = store_team.StoreTeam.session

    @contextlib.asynccontextmanager
    async def session(self: Any) -> AsyncIterator[None]:
        self._member.calls = getattr(self._member, "calls", 0) + 1
        self._call = Call("call", step=self._member.calls)
        async with real(self):
            yield

    yield store_team.StoreTeam, "session", session


@broken("a rank that fails before its call begins tells nobody", 9)
def _untold() -> Iterator[Patch]:
    real = store_team.StoreTeam.fail

    async def fail(self: Any, error: BaseException) -> None:
        if self._participation is not None:
            await real(self, error)

    yield store_team.StoreTeam, "fail", fail


@broken("a rank takes whatever answer is there for its call's", 5)
def _any_answer() -> Iterator[Patch]:
    yield following.FollowerRendezvous, "_is_mine", lambda self, answer, status, now_s: True


@broken("a rank follows a leader that has not acknowledged it", 227)
def _any_leader() -> Iterator[Patch]:
    def find_leader(self: Any) -> bool:
        lead = self._keys.value("lead")
        self.leader = self.leader or (lead or b"").decode()
        return bool(self.leader)

    yield member.Member, "find_leader", find_leader


@broken("a leader can be found before its status is there", 4647)
def _found_too_early() -> Iterator[Patch]:
    def lead(self: Any, now_s: float) -> None:
        self._keys.set("lead", self.nonce)

    async def publish_status(self: Any) -> None:
        with contextlib.suppress(RuntimeError):
            await member.offload(self.publish, asyncio.get_running_loop().time())

    yield member.Member, "_claim_leadership", lead
    yield member.Member, "publish_status", publish_status


@broken("all failures of a rank belong to the last one of the leader", 41)
def _all_belong_together() -> Iterator[Patch]:
    real = rendezvous.paired

    def paired(settled: Any, leaders: Any, others: Any) -> Any:
        settled, theirs, ours = real(settled, leaders, others)
        last = max(map(abs, others), default=0)
        return (
            (rendezvous.Settled(settled.leader, last), theirs, [])
            if ours and leaders
            else (settled, theirs, ours)
        )

    yield rendezvous, "paired", paired
    yield following, "paired", paired


@broken("the leader heeds what a dead process has shown that never found it", 949)
def _heeds_strangers() -> Iterator[Patch]:
    real = rendezvous.LeaderRendezvous._check

    async def check(self: Any, statuses: Any, now_s: float) -> None:
        lead = self._member.nonce
        heeded = {
            rank: status and replace(status, leader=status.leader or lead)
            for rank, status in statuses.items()
        }
        await real(self, heeded, now_s)

    yield rendezvous.LeaderRendezvous, "_check", check


@broken("the leader does not look for ranks that are in another call", 3)
def _other_calls_unseen() -> Iterator[Patch]:
    yield rendezvous.LeaderRendezvous, "_other_call", lambda self, rank, status: None


async def _nothing(*args: Any, **options: Any) -> None:
    return None


async def _always(*args: Any, **options: Any) -> bool:
    return True


async def _quietly(function: Any) -> None:
    with contextlib.suppress(StorageError, ExistsError):
        await function()


def seeds_until_caught(
    engine: Broken, most: int, first: int = 0
) -> tuple[int, int, Failure | None]:
    """How many schedules it takes until this engine is caught, the seed of the last, and what was
    seen: None if nothing was seen in ``most`` schedules."""
    tried, seed = 0, first
    with engine.engine():
        while True:
            schedule = drawn(seed)
            if engine.storages in schedule.storage:
                tried += 1
                failure = run(schedule)
                if failure is not None or tried >= most:
                    return tried, seed, failure
            seed += 1
