"""One rank's part of a load. Ranks agree on the manifest, check that it fits the state, read and
fill, and agree that everything has arrived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from ....core.spans import span
from ....drivers.contract import Driver
from ....errors import DamagedError, RankFailedError, ReplacedError
from ....planner.columns import Ints
from ....planner.image import DIGEST_NBYTES
from ....planner.loading import LoadPlan, Targets
from ...exchange.broadcast import read_once
from ...exchange.exchange import LEAST_NBYTES, Exchange, begin_exchange
from ...exchange.group import ExchangeGroup, ExchangeLimits
from ...format.manifest import Manifest, VerifiedManifest
from ...format.part import Part
from ...format.tree import Key, dotted, format_path
from ...pipeline.image_reader import ImageReader, plan_reads
from ...pipeline.mapping import image_driver
from ...protocol.current import is_current, read_manifest
from ...ranks.hosts import numbered, numbers_in, ranks_with, share_of
from ...ranks.team import Team
from ...runtime.engine import offload
from ...state.adapters.stateful import restore
from ...state.bits import mark_written
from ...state.filling.memoryless import Given, allocate, give
from ...state.filling.object_state import Source, build_object_state
from ...state.filling.targets import Match, Wanted, match, subtree_paths
from ...state.flat_state import FlatState, Subtree
from ..driver_progress import with_progress
from ..rounds import ARRIVED, FITS, HOSTS, Arrived, Differences, Fit, FitReport, Hosts, OnHost
from .differences import DifferenceCheck, Strict, report_of, wants_state
from .fill import Report, build_part, delivery, fill
from .overlaps import Overlaps, filled_by_others, overlapping, read_overlaps

_log = logging.getLogger(__name__)

RETRIES = 3
EVERYWHERE = "*"
"""Stands for a host: the rank exchanges with all ranks of the job."""

Exchanging = bool | Literal["auto"]
"""True: ranks that want the same bytes read them once and exchange them; "auto": within a host."""


@dataclass(kw_only=True, eq=False)
class LoadJob:
    """The target of one rank's load, and the load's progress."""

    flat: FlatState = field(kw_only=False)
    part: Part | None = None
    """The part of the checkpoint to load; None for all of it."""
    strict: Strict
    cast: bool
    budget_nbytes: int
    shares_budget: bool = False
    """True if all ranks of the host share the budget."""
    exchange: Exchanging = False
    exchange_limits: ExchangeLimits = field(default_factory=ExchangeLimits)
    progress: Report = lambda done_nbytes, total_nbytes: None
    early: Future[tuple[Manifest, bytes]] | None = None
    """The manifest and its bytes, if already being read."""
    touched: set[str] = field(default_factory=set)
    """Names of the state that failed loads have begun to fill; this load adds its own. Filling
    all of them repairs the state."""
    match: Match = field(default_factory=Match)
    left: Differences = field(default_factory=Differences)
    built: list[tuple[Subtree, object]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    """Memory for tensors of modules that have none."""


async def run_load(driver: Driver, team: Team, job: LoadJob) -> tuple[Manifest, ImageReader]:
    """Fill the tensors of ``job``; every rank of the team calls this. :func:`finish` does the rest.
    Raises MismatchError, listing the differences on all ranks, before any tensor is filled; any
    error on this rank; RankFailedError and DeadlineError for other ranks."""
    driver = with_progress(driver, team)
    async with team.session():
        sharing = await _sharing(team)
        if job.shares_budget:
            job.budget_nbytes = share_of(job.budget_nbytes, len(sharing))
        host_ranks = sharing if job.exchange else [team.rank]
        for attempt in range(RETRIES):
            loaded = await _load(driver, team, job, attempt, host_ranks)
            if loaded is not None:
                return loaded
        raise _replaced_each_time(driver)


async def run_build(
    driver: Driver,
    rank: int,
    budget_nbytes: int,
    report: Report = lambda done_nbytes, total_nbytes: None,
    part: Part | None = None,
) -> tuple[object, Manifest, ImageReader]:
    """Build a new state, or a part of one. Raises UsageError if the part does not exist."""
    for _ in range(RETRIES):
        manifest, _data = await read_manifest(driver)
        wanted = Wanted()
        with span("match"):
            state = await offload(build_part, manifest, rank, wanted, part, driver.uri)
        images = image_driver(driver, manifest)
        try:
            reader = await fill(images, manifest, wanted, budget_nbytes, report)
            return state, manifest, reader
        except DamagedError:
            if await is_current(driver, manifest.attempt):
                raise
    raise _replaced_each_time(driver)


def _replaced_each_time(driver: Driver) -> ReplacedError:
    return ReplacedError(
        f"another save replaced the checkpoint {RETRIES} times while it was being read",
        uri=driver.uri,
    )


async def _sharing(team: Team) -> list[int]:
    """Return the ranks of this host."""
    if team.world == 1:
        return [team.rank]
    verdict = await team.round(HOSTS, OnHost(team.host), _hosts)
    return ranks_with(team.rank, numbers_in(verdict.numbers))


async def _hosts(statements: Sequence[OnHost]) -> Hosts:
    return Hosts(numbered([statement.host for statement in statements]))


async def _load(
    driver: Driver, team: Team, job: LoadJob, attempt: int, host_ranks: Sequence[int]
) -> tuple[Manifest, ImageReader] | None:
    early = job.early
    job.early = None
    seen, checksum = await _seen(driver, team, f"manifest/{attempt}", host_ranks, early)
    manifest = seen.manifest
    with span("match"):
        job.match, job.built = await offload(_matched, job, manifest, team.rank, team.world)
    overlaps = await _overlaps(driver, team, seen, job)
    if overlaps is None:
        checksum = b""
    judge = partial(_judge, DifferenceCheck(manifest, job.strict, driver.uri, job.part))
    peers = EVERYWHERE if job.exchange is True else team.host if job.exchange else None
    report = report_of(job.match, manifest, checksum, peers)
    fit = await team.round(FITS.numbered(attempt), report, judge)
    if fit.left is None:
        return None
    job.left = fit.left
    job.touched |= job.match.filled
    mark_written(_written(job))
    group = _exchange_group(team, f"exchange/{attempt}", fit.peers, job, host_ranks)
    with span("plan"):
        reading = await _plan_reading(driver, job, seen, group)
    complete = await _read(driver, team, job, reading, overlaps)
    arrived = await team.round(ARRIVED.numbered(attempt), Arrived(complete), _unanimous)
    if not complete or not arrived.complete:
        return None
    return reading.manifest, reading.reader


def _written(job: LoadJob) -> Iterator[torch.Tensor]:
    yield from job.match.wanted.buffers
    for name, origin in zip(job.flat.names, job.flat.origins, strict=True):
        if name in job.match.filled and isinstance(origin, torch.Tensor):
            yield origin


@dataclass(frozen=True, slots=True)
class _Reading:
    """One rank's plan for reading: alone, or in an exchange with others."""

    manifest: Manifest
    targets: Targets
    reader: ImageReader
    exchange: Exchange | None
    plan: LoadPlan


async def _plan_reading(
    driver: Driver, job: LoadJob, seen: _Seen, group: ExchangeGroup | None
) -> _Reading:
    targets = job.match.wanted.targets(seen.manifest.tensors.shape)
    manifest = await seen.with_shards_of(targets.tensor)
    budget_nbytes = job.budget_nbytes
    if group is not None and group.job_host:
        budget_nbytes //= 2  # the other half buffers data from other ranks
    reader = ImageReader(image_driver(driver, manifest), manifest, budget_nbytes)
    exchange = None
    if group is not None:
        exchange = await begin_exchange(group, reader, targets)
    plan = exchange.plan if exchange else await offload(plan_reads, driver, manifest, targets)
    return _Reading(manifest, targets, reader, exchange, plan)


async def _read(
    driver: Driver, team: Team, job: LoadJob, reading: _Reading, overlaps: Overlaps | None
) -> bool:
    def report(done_nbytes: int, total_nbytes: int) -> None:
        team.report_progress()
        job.progress(done_nbytes, total_nbytes)

    reader = reading.reader
    plan = reading.plan
    deliver = delivery(reading.manifest, job.match.wanted, reading.targets, plan, report)
    try:
        if reading.exchange is not None:
            with span("exchange"):
                await reading.exchange.run(deliver)
        else:
            await reader.run(plan, deliver)
        if overlaps:
            await offload(overlaps.put)
            reader.bytes_wanted += overlaps.bytes_wanted
            reader.bytes_read += overlaps.bytes_read
    except (DamagedError, RankFailedError):
        # The other rank may have failed because the checkpoint was replaced.
        if await is_current(driver, reading.manifest.attempt):
            raise
        return False
    return True


async def _overlaps(driver: Driver, team: Team, seen: _Seen, job: LoadJob) -> Overlaps | None:
    """Read values of tensors that share memory, once; None if the checkpoint was replaced."""
    found = job.match
    wanted = found.wanted
    groups = await offload(overlapping, wanted)
    if (
        not groups
        or found.mismatched
        or found.castable
        or (found.missing and wants_state(job.strict))
    ):
        return Overlaps()
    numbers = {number for group in groups for number in group}
    found.wanted = wanted.without(numbers)
    rows = np.unique([wanted.wishes[number][0] for number in numbers])
    manifest = await seen.with_shards_of(rows)
    try:
        images = image_driver(driver, manifest)
        overlaps = await read_overlaps(
            images, manifest, wanted, groups, job.budget_nbytes, lambda *_: team.report_progress()
        )
    except DamagedError:
        if await is_current(driver, manifest.attempt):
            raise
        return None
    found.shared |= overlaps.conflicts
    return overlaps


@dataclass(frozen=True, slots=True)
class _Seen:
    """The manifest to load from; without shards for now if another rank ``verified`` it."""

    manifest: Manifest
    verified: VerifiedManifest | None = None

    async def with_shards_of(self, tensors: Ints) -> Manifest:
        if self.verified is None:
            return self.manifest
        return await offload(self.verified.with_shards_of, tensors)


async def _seen(
    driver: Driver,
    team: Team,
    name: str,
    host_ranks: Sequence[int],
    early: Future[tuple[Manifest, bytes]] | None,
) -> tuple[_Seen, bytes]:
    """Return the manifest and its checksum. One rank of the host checks it for the others."""
    mine: list[Manifest] = []

    async def read() -> bytes:
        if early is None:
            manifest, data = await read_manifest(driver)
        else:
            manifest, data = await asyncio.wrap_future(early)
        mine.append(manifest)
        return data

    data = await read_once(team, name, host_ranks, read)
    checksum = bytes(data[-DIGEST_NBYTES:])
    if mine:
        return _Seen(mine[0]), checksum
    verified = await offload(VerifiedManifest.decode, data)
    return _Seen(verified.manifest, verified), checksum


def _exchange_group(
    team: Team, name: str, verdict: bytes, job: LoadJob, host_ranks: Sequence[int]
) -> ExchangeGroup | None:
    """Return the ranks to exchange with; None if there are none."""
    ranks = ranks_with(team.rank, numbers_in(verdict))
    if len(ranks) == 1:
        return None
    everywhere = job.exchange is True
    return ExchangeGroup(
        team,
        name,
        ranks,
        len(host_ranks),
        team.job_host if everywhere else "",
        1 if everywhere else LEAST_NBYTES,
        job.exchange_limits,
    )


async def _unanimous(statements: Sequence[Arrived]) -> Arrived:
    return Arrived(all(statement.complete for statement in statements))


def _matched(
    job: LoadJob, manifest: Manifest, rank: int, world: int
) -> tuple[Match, list[tuple[Subtree, object]]]:
    found = match(job.flat, manifest, rank, cast=job.cast)
    built: list[tuple[Subtree, object]] = []
    missing: dict[str, str] = {}
    stored_dtypes = found.wanted.stored_dtypes(manifest.tensors) if job.cast else None
    source = Source(manifest, rank, world, found.wanted, stored_dtypes)
    for subtree, path in zip(job.flat.subtrees, subtree_paths(job.flat), strict=True):
        if subtree.state is None:
            try:
                made = build_object_state(subtree, job.flat.modules, source, path)
            except KeyError:
                keys = [key for _, key in path]
                missing[dotted(keys)] = f"{format_path(keys)}: nothing in the checkpoint"
                continue
            built.append((subtree, made.state))
            found.filled.add(dotted(key for _, key in path))
            if not wants_state(job.strict):  # else the object gets everything or is refused
                found.filled.update(manifest.tensors.names[row] for row in made.rows)
            found.tensors |= made.rows
            missing |= made.missing
            found.mismatched |= made.mismatched
            if job.strict:
                found.mismatched |= made.dealt
            else:
                for text in made.dealt.values():
                    _log.warning("%s", text)
    found.missing = missing | found.missing  # errors show the first names: whole objects
    shared = filled_by_others(job.flat, found)
    for name in shared:
        del found.missing[name]
    job.given = allocate(job.flat, found.wanted)
    found.filled |= shared.union(found.wanted.names.values())
    for name in sorted(job.touched - found.filled):
        found.left[name] = (
            f"{name!r} still has values of a failed load, and this checkpoint has none for it"
        )
    return found, built


async def _judge(check: DifferenceCheck, reports: Sequence[FitReport]) -> Fit:
    """Return the leader's verdict: what is left out, and who exchanges with whom, or a retry."""
    manifests = {report.manifest for report in reports}
    if len(manifests) > 1 or b"" in manifests:
        return Fit(None)  # a save intervened: some ranks read the old manifest
    left = await offload(check.judge, reports)
    return Fit(left, numbered([report.peers for report in reports]))


def finish(job: LoadJob, manifest: Manifest, rank: int) -> object:
    """Assign values, restore objects and return the state. Runs in the caller's thread."""
    root = _assign(job, manifest, rank)
    give(job.given)
    modules = [(s, s.state) for s in job.flat.subtrees if s.state is not None]
    for subtree, state in modules + job.built:  # modules first: others may read them
        try:
            restore(subtree.owner, state)
        except Exception as error:  # raised by the object's own code
            path = format_path(job.flat.keys_to(subtree))
            error.add_note(f"while {path} took its state back")
            raise
    return root


def _assign(job: LoadJob, manifest: Manifest, rank: int) -> object:
    """Assign values to their containers, innermost first, because tuples are replaced in theirs."""
    nodes = job.flat.nodes
    containers = job.flat.tree.containers
    todo: dict[int, dict[Key, object]] = {}
    for container, key, row in job.match.assign:
        todo.setdefault(container, {})[key] = manifest.tree.values[row].of(rank)
    for number in range(len(nodes) - 1, -1, -1):
        updates = todo.get(number)
        node: Any = nodes[number]
        if not updates:
            continue
        if not isinstance(node, tuple):
            for key, value in updates.items():
                node[key] = value
            continue
        nodes[number] = tuple(updates.get(i, item) for i, item in enumerate(node))
        if number:
            todo.setdefault(containers[number].parent, {})[containers[number].key] = nodes[number]
    return nodes[0]
