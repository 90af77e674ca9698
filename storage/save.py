"""One rank's part of a save: agree, lay out, stream chunk by chunk, and commit together."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..drivers.contract import Driver
from ..errors import InvisibleFilesError, NotFoundError, SaveError, StorageError, UsageError
from ..planner.balance import Group, balance
from .capture.fingerprint import label
from .capture.plan import SavePlan, plan_save
from .capture.state import FlatState
from .commit import CLEAN_UP_S, Attempt, begin, commit, delete_attempt, give_up, settle, still_there
from .deadline import Deadline
from .format.digest import digest
from .format.fragment import Fragment, Layout, decode_fragment, fragment_of
from .format.manifest import ImageTable, Manifest, image_key
from .format.merge import merge
from .pipeline.engine import offload
from .pipeline.image_writer import ImageWriter, Progress
from .ranks.team import Team

__all__ = ["SaveJob", "run_save"]

Agreed = tuple[dict[str, list[int]], set[str]]

_log = logging.getLogger(__name__)


@dataclass
class SaveJob:
    """What one rank saves. ``unsure``: per row of a tensor whose replicas are unknown, its digest (none when alone)."""

    flat: FlatState
    step: int | None
    unsure: dict[int, bytes]
    budget_nbytes: int | None
    """Host memory for chunks; None: room for the whole image."""
    progress: Progress = field(default=Progress(lambda: None, lambda: None))
    created_s: float = field(default_factory=time.time)
    after: Future[None] | None = None
    """Another save, for whose end the writing waits; copying does not."""
    deadline: Deadline = field(default=Deadline())
    """When it is committed, or has failed."""


async def run_save(driver: Driver, team: Team, job: SaveJob) -> tuple[str, int]:
    """Save; return the attempt and this rank's bytes. Every rank of the team calls this.

    Raises what failed on this rank, RankFailedError or DeadlineError for another, DeadlineError when its time is over. Then
    nothing was committed, unless the failure came between the put of the manifest and word of it: what is there is a whole
    checkpoint in any case.
    """
    leader = _Leader(driver, job)
    async with team.session():
        try:
            async with job.deadline.holds(driver.uri, team.rank):
                saved = await _save(driver, team, job, leader)
        except BaseException as error:
            await team.fail(error)
            await leader.give_up()
            raise
        await _settle(leader, job, driver.uri)
        return saved


async def _save(driver: Driver, team: Team, job: SaveJob, leader: _Leader) -> tuple[str, int]:
    beginning = asyncio.ensure_future(team.round("begin", _statement(driver.uri, job), leader.begin))
    try:
        # Alone there is nothing to agree on before capturing: the storage is prepared meanwhile.
        verdict = None if team.world == 1 else json.loads(await beginning)
        agreed = None if verdict is None else _agreed(job, verdict, team.world)
        shares = None if verdict is None else {tuple(ranks): tuple(cuts) for ranks, cuts in verdict["shares"]}
        plan = await offload(plan_save, job.flat, team.rank, agreed, shares)
        writer = ImageWriter(driver, plan.layout, plan.source, job.budget_nbytes, job.progress)
        digests = await _written(writer, beginning, team, job.after)
    except BaseException as error:
        beginning.cancel()
        await asyncio.wait([beginning])
        if isinstance(error, NotFoundError) and not beginning.cancelled() and beginning.exception() is None:
            # Somebody has deleted what was half written. If it was a later save, that is what is to be said.
            await still_there(driver, Attempt(json.loads(beginning.result())["attempt"]))
        raise
    attempt = Attempt(json.loads(await beginning)["attempt"])
    if job.flat.lazy is not None:
        job.flat.lazy.confirm()
    fragment = _fragment(attempt, job, plan, digests, team.rank)
    try:
        await team.round("commit", await offload(fragment.encode), leader.commit)
    except InvisibleFilesError:
        await _drop(driver, attempt, team.rank)  # nobody else sees this file, so nobody else will collect it
        raise
    return attempt.id, plan.layout.nbytes if len(digests) else 0


async def _settle(leader: _Leader, job: SaveJob, uri: str) -> None:
    """It is committed: where the save has a deadline, what is left to do must not hold it up for long."""
    try:
        async with asyncio.timeout(None if job.deadline.timeout_s is None else CLEAN_UP_S):
            await leader.settle()
    except TimeoutError:
        _log.warning("what was replaced stays at %s until a later save: %g s were not enough", uri, CLEAN_UP_S)


class _Leader:
    """What only rank 0 does: begin an attempt, commit it, and delete what is no longer needed."""

    def __init__(self, driver: Driver, job: SaveJob) -> None:
        self._driver = driver
        self._job = job
        self._attempt: Attempt | None = None
        self._obsolete: Attempt | None = None
        self._dead: Attempt | None = None
        """Ours, as long as it is certain that it is not committed."""

    async def begin(self, statements: Sequence[bytes]) -> bytes:
        told = [json.loads(s) for s in statements]
        for rank, other in enumerate(told):
            if other["uri"] != told[0]["uri"]:
                raise UsageError(f"rank {rank} saves to {other['uri']}, rank 0 to {told[0]['uri']}", rank=rank)
        verdict = await offload(_verdict, told)
        self._attempt = self._dead = await begin(self._driver)
        return json.dumps({"attempt": self._attempt.id} | verdict).encode()

    async def commit(self, fragments: Sequence[bytes]) -> bytes:
        assert self._attempt is not None
        manifest = await offload(_merged, fragments)
        self._obsolete = await commit(self._driver, self._attempt, manifest, self._putting)
        return self._attempt.id.encode()

    def _putting(self) -> None:
        """From here on the manifest may turn out to have been stored, whatever is raised."""
        self._dead = None

    async def settle(self) -> None:
        """All ranks know that it is committed."""
        if self._attempt is not None:
            await settle(self._driver, self._attempt)
        if self._obsolete is not None:
            await delete_attempt(self._driver, self._obsolete)

    async def give_up(self) -> None:
        """Delete what is not committed. What may be is left for later saves to collect, or to keep."""
        if self._dead is not None:
            await give_up(self._driver, self._dead)


async def _written(
    writer: ImageWriter, beginning: asyncio.Future[bytes], team: Team, after: Future[None] | None
) -> npt.NDArray[np.uint8]:
    async def key() -> str:
        if after is not None:
            await asyncio.wait([asyncio.wrap_future(after)])
        return await _image_key(beginning, team.rank)

    try:
        return await writer.write(key)
    except StorageError as error:
        # A leader that has heard of a failure removes the attempt, also under those who are still writing.
        first = await team.failure()
        if first is not None:
            raise first from error
        raise


def _merged(fragments: Sequence[bytes]) -> Manifest:
    known: dict[bytes, Layout] = {}
    return merge([decode_fragment(data, f"the fragment of rank {i}", known) for i, data in enumerate(fragments)])


def _statement(uri: str, job: SaveJob) -> bytes:
    """What a rank says first: where it saves to; what it holds whose replicas are unknown, by digests and bytes; and the
    bytes of all else, by who holds it."""
    flat, told = job.flat, dict[str, dict[str, str]](plain={}, shards={})
    for row, fingerprint in job.unsure.items():
        nbytes = flat.locals[row].nbytes if flat.alias[row] < 0 else 0
        told["plain" if flat.parts[row] is None else "shards"][label(flat, row)] = f"{fingerprint.hex()} {nbytes}"
    return json.dumps({"uri": uri, "held": _held(job)} | told).encode()


def _held(job: SaveJob) -> dict[str, int]:
    """Bytes of what a rank holds whose replicas are known, by a name of those who hold it, the same for all of them."""
    flat, nbytes = job.flat, Counter[int]()
    holders: dict[int, tuple[int, ...]] = {}
    for row, part in enumerate(flat.parts):
        if part is not None and part.pieces and row not in job.unsure and flat.alias[row] < 0:
            holders[id(part.holders)] = part.holders  # which thousands of tensors share
            nbytes[id(part.holders)] += flat.locals[row].nbytes
    held = Counter[str]()
    for key, ranks in holders.items():
        held[digest(np.array(ranks, np.int64).data).hex()] += nbytes[key]
    return held


def _verdict(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks have to know of each other's statements. Raises SaveError where they cannot be saved together."""
    plain, shards = (_agree([other[kind] for other in told]) for kind in ("plain", "shards"))
    verdict = {"plain": _agree_plain(*plain, len(told)), "shards": _agree_shards(*shards)}
    return verdict | {"shares": list(balance(_loads(told, plain, shards), len(told)).items())}


def _loads(told: Sequence[Mapping[str, Any]], plain: Agreed, shards: Agreed) -> dict[Group, int]:
    """The bytes that each group of ranks holds together."""
    held, nbytes = defaultdict[str, list[int]](list), dict[str, int]()
    for rank, other in enumerate(told):
        for name, count in other["held"].items():
            held[name].append(rank)
            nbytes[name] = count
    loads = Counter[Group]({tuple(ranks): nbytes[name] for name, ranks in held.items()})
    for kind, (holders, differ) in (("plain", plain), ("shards", shards)):
        for name, ranks in holders.items():
            for group in [(rank,) for rank in ranks] if name in differ else [tuple(ranks)]:
                loads[group] += int(told[group[0]][kind][name].partition(" ")[2])
    return loads


def _agree(held: Sequence[dict[str, str]]) -> Agreed:
    """Who holds what: by label, the ranks; and the labels under which ranks hold different bytes."""
    holders: dict[str, list[int]] = {}
    digests: dict[str, set[str]] = {}
    for rank, by_label in enumerate(held):
        for name, told in by_label.items():
            holders.setdefault(name, []).append(rank)
            digests.setdefault(name, set()).add(told)
    return holders, {name for name, seen in digests.items() if len(seen) > 1}


def _agree_plain(holders: dict[str, list[int]], differ: set[str], world: int) -> dict[str, list[int]]:
    """The ranks that share the bytes of a plain tensor; none where they differ, and each keeps its own.

    Names that all ranks share are left out: that is the common case, and the verdict stays small.
    """
    return {n: [] if n in differ else r for n, r in holders.items() if n in differ or len(r) < world}


def _agree_shards(holders: dict[str, list[int]], differ: set[str]) -> dict[str, list[int]]:
    """The ranks that share a shard across meshes; shards of one rank are left out. Raises SaveError where they differ."""
    if differ:
        name = min(differ)
        raise SaveError(
            f"ranks {holders[name]} hold different values of {name!r}, on different meshes",
            advice="Give the tensors names of their own, or make them equal.",
        )
    return {n: r for n, r in holders.items() if len(r) > 1}


def _agreed(job: SaveJob, verdict: dict[str, dict[str, list[int]]], world: int) -> dict[int, tuple[int, ...]]:
    """Per row whose replicas were unknown, the ranks that hold its bytes; empty where each rank keeps its own."""
    agreed: dict[int, tuple[int, ...]] = {}
    for row in job.unsure:
        part, name = job.flat.parts[row], label(job.flat, row)
        if part is None:
            agreed[row] = tuple(verdict["plain"].get(name, range(world)))
        else:
            agreed[row] = tuple(verdict["shards"].get(name, part.holders))
    return agreed


async def _image_key(beginning: asyncio.Future[bytes], rank: int) -> str:
    return image_key(json.loads(await asyncio.shield(beginning))["attempt"], rank)


def _fragment(attempt: Attempt, job: SaveJob, plan: SavePlan, digests: npt.NDArray[np.uint8], rank: int) -> Fragment:
    """What this rank tells the leader."""
    wrote = len(digests) > 0
    images = ImageTable(
        np.array([rank] if wrote else [], np.int64),
        np.array([plan.layout.hashed_end] if wrote else [], np.int64),
        digests,
    )
    part = Manifest(
        attempt.id, job.step, rank + 1, job.created_s, job.flat.tree, plan.tensors, plan.container, plan.shards, images
    )
    return fragment_of(part, rank)


async def _drop(driver: Driver, attempt: Attempt, rank: int) -> None:
    try:
        await driver.delete(image_key(attempt.id, rank))
    except StorageError as error:
        _log.warning("an image that no checkpoint names stays at %s: %s", driver.uri, error)
