"""One rank's part of a load: agree on the manifest, check that all fits, read, fill, and agree that all arrived."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..drivers.contract import Driver
from ..errors import DamagedError, MismatchError, RankFailedError, ReplacedError
from ..planner.image import DIGEST_NBYTES
from ..planner.loading import LoadPlan, Targets
from .capture.build import build
from .capture.scatter import Scatter
from .capture.state import FlatState, Subtree
from .capture.targets import Match, Wanted, match
from .committed import decoded, get_manifest, read_manifest
from .format.manifest import Manifest
from .format.tree import Key, format_path
from .format.vouched import Vouched
from .frameworks.names import Walked
from .frameworks.process_group import store_host
from .frameworks.stateful import fills_in_place, maker_of, restore
from .pipeline.engine import offload
from .pipeline.image_reader import ImageReader, plan_reads
from .pipeline.unpacked import images_of
from .ranks.exchange import Circle
from .ranks.handout import read_once
from .ranks.hosts import numbered, numbers_in, ranks_with
from .ranks.meeting import LEAST_NBYTES, begin_exchange
from .ranks.team import Team
from .ranks.wire import host_key

__all__ = ["Exchanging", "LoadJob", "fill", "finish", "run_build", "run_load"]

RETRIES = 3

Exchanging = bool | Literal["auto"]
"""Whether ranks that want the same bytes read them once and exchange them; auto: those of one host do."""


class LoadJob:
    """What one rank loads into, and what it found there."""

    def __init__(
        self, flat: FlatState, *, strict: bool, cast: bool, budget_nbytes: int, exchange: Exchanging = False
    ) -> None:
        self.flat = flat
        self.exchange = exchange
        self.strict = strict
        self.cast = cast
        self.budget_nbytes = budget_nbytes
        self.match = Match()
        self.built: list[tuple[Subtree, Any]] = []


async def run_load(driver: Driver, team: Team, job: LoadJob) -> tuple[Manifest, ImageReader]:
    """Fill the tensors of ``job``; every rank of the team calls this. Values and objects are left to :func:`finish`.

    Raises MismatchError, with every difference on any rank, before any byte is read; what failed on this rank; or
    RankFailedError and DeadlineError for another.
    """
    async with team.session():
        try:
            mates = await _mates(team, job.exchange)
            for attempt in range(RETRIES):
                loaded = await _load(driver, team, job, attempt, mates)
                if loaded is not None:
                    return loaded
            raise ReplacedError(
                f"another save replaced the checkpoint {RETRIES} times while it was being read", uri=driver.uri
            )
        except BaseException as error:
            await team.fail(error)
            raise


async def run_build(driver: Driver, rank: int, budget_nbytes: int) -> tuple[Any, Manifest, ImageReader]:
    """The whole state, built anew."""
    for _ in range(RETRIES):
        manifest, _data = await read_manifest(driver)
        wanted = Wanted()
        state, _rows = await offload(build, manifest, rank, wanted)
        try:
            return state, manifest, await fill(images_of(driver, manifest), manifest, wanted, budget_nbytes)
        except DamagedError:
            if not await _replaced(driver, manifest):
                raise
    raise ReplacedError(f"another save replaced the checkpoint {RETRIES} times while it was being read", uri=driver.uri)


async def fill(driver: Driver, manifest: Manifest, wanted: Wanted, budget_nbytes: int) -> ImageReader:
    """Read all that is wanted, once, verified, straight to where it belongs; return the reader, for its figures. ``driver``
    is that of the images (``images_of``)."""
    reader = ImageReader(driver, manifest, budget_nbytes)
    targets = wanted.targets(manifest.tensors.shape)
    plan = await offload(plan_reads, driver, manifest, targets)
    await reader.run(plan, _scatter(manifest, wanted, targets, plan).deliver)
    return reader


def _scatter(m: Manifest, wanted: Wanted, targets: Targets, plan: LoadPlan) -> Scatter:
    return Scatter(m.tensors, m.shards, targets, plan, wanted.buffers)


async def _mates(team: Team, exchange: Exchanging) -> list[int]:
    """The ranks of this host, which read the manifest once; this rank alone where that is not wanted, or not known."""
    if team.world == 1:
        return [team.rank]
    told = json.dumps({"circle": exchange and host_key()}).encode()
    verdict = await team.round("hosts", told, _hosts)
    return ranks_with(team.rank, numbers_in(verdict))


async def _hosts(statements: Sequence[bytes]) -> bytes:
    return _circles([json.loads(s) for s in statements])


async def _load(
    driver: Driver, team: Team, job: LoadJob, attempt: int, mates: Sequence[int]
) -> tuple[Manifest, ImageReader] | None:
    """One try; None when the checkpoint was replaced meanwhile, on any rank."""
    seen, checksum = await _seen(driver, team, f"manifest/{attempt}", mates)
    manifest = seen.manifest if isinstance(seen, Vouched) else seen
    job.match, job.built = await offload(_matched, job, manifest, team.rank)
    fits = await team.round(
        f"fits/{attempt}", _fitting(job, manifest, checksum), _Referee(manifest, job.strict, driver.uri).judge
    )
    if not fits.startswith(b"go"):
        return None
    targets = job.match.wanted.targets(manifest.tensors.shape)
    if isinstance(seen, Vouched):
        manifest = await offload(seen.of, targets.tensor)
    circle = _circle(team, f"exchange/{attempt}", fits[2:], job.exchange, mates)
    budget_nbytes = job.budget_nbytes // (2 if circle and circle.near else 1)  # as much to receive into
    reader = ImageReader(images_of(driver, manifest), manifest, budget_nbytes)
    exchange = await begin_exchange(circle, reader, targets) if circle else None
    plan = exchange.plan if exchange else await offload(plan_reads, driver, manifest, targets)
    scatter = _scatter(manifest, job.match.wanted, targets, plan)
    outcome = b"all"
    try:
        await (exchange.run(scatter.deliver) if exchange else reader.run(plan, scatter.deliver))
    except (DamagedError, RankFailedError):  # of another rank that, perhaps, saw that it was replaced, and left
        if not await _replaced(driver, manifest):
            raise
        outcome = b"replaced"
    arrived = await team.round(f"arrived/{attempt}", outcome, _unanimous)
    return (manifest, reader) if outcome == arrived == b"all" else None


async def _seen(driver: Driver, team: Team, name: str, mates: Sequence[int]) -> tuple[Manifest | Vouched, bytes]:
    """The manifest, and its checksum. Read and checked by one rank of the host: the others decode what they need of it."""
    mine: list[Manifest] = []

    async def read() -> bytes:
        data = await get_manifest(driver)
        mine.append(await decoded(driver, data))
        return data

    data = await read_once(team, name, mates, read)
    return mine[0] if mine else await offload(Vouched.decode, data), bytes(data[-DIGEST_NBYTES:])


def _circle(team: Team, name: str, verdict: bytes, exchange: Exchanging, mates: Sequence[int]) -> Circle | None:
    """The ranks that this one exchanges with, by the leader's verdict; None without any."""
    ranks = ranks_with(team.rank, numbers_in(verdict))
    if len(ranks) == 1:
        return None
    everywhere = exchange is True
    near = store_host() if everywhere else ""
    return Circle(team, name, ranks, len(mates), near, 1 if everywhere else LEAST_NBYTES)


def _circles(told: Sequence[dict[str, Any]]) -> bytes:
    """Which ranks exchange what they read, as numbers; those that do not have one of their own."""
    return numbered([t["circle"] or None for t in told])


async def _replaced(driver: Driver, manifest: Manifest) -> bool:
    return (await read_manifest(driver))[0].attempt != manifest.attempt


async def _unanimous(votes: Sequence[bytes]) -> bytes:
    return b"all" if all(vote == b"all" for vote in votes) else b"replaced"


def _matched(job: LoadJob, manifest: Manifest, rank: int) -> tuple[Match, list[tuple[Subtree, Any]]]:
    found = match(job.flat, manifest, rank, cast=job.cast)
    built: list[tuple[Subtree, Any]] = []
    for subtree in job.flat.subtrees:
        if subtree.state is None:
            path = (*_typed(job.flat, subtree.parent), (type(subtree.key).__name__, subtree.key))
            try:
                make = maker_of(subtree.owner, job.flat.modules)
                state, rows = build(manifest, rank, found.wanted, path, make)
            except KeyError:
                found.missing.append(f"{format_path(key for _, key in path)}: nothing in the checkpoint")
                continue
            built.append((subtree, state))
            found.tensors |= rows
    return found, built


def _typed(flat: FlatState, container: int) -> tuple[tuple[str, Key], ...]:
    return tuple((type(key).__name__, key) for key in flat.tree.paths()[container])


def _fitting(job: LoadJob, manifest: Manifest, checksum: bytes) -> bytes:
    """What a rank says before reading: which manifest it has, what does not fit, and what it has a place for."""
    rows = np.zeros(len(manifest.tensors), bool)
    rows[list(job.match.tensors)] = True
    values = np.zeros(len(manifest.tree.values), bool)
    values[list(job.match.values)] = True
    told = {
        "manifest": checksum.hex(),
        "circle": "*" if job.exchange is True else job.exchange and host_key(),
        "missing": job.match.missing,
        "mismatched": job.match.mismatched,
        "tensors": base64.b64encode(np.packbits(rows).tobytes()).decode(),
        "values": base64.b64encode(np.packbits(values).tobytes()).decode(),
    }
    return json.dumps(told).encode()


class _Referee:
    """The leader's judgement: does the checkpoint fit the state, seen from all ranks together?"""

    def __init__(self, manifest: Manifest, strict: bool, uri: str) -> None:
        self._manifest = manifest
        self._strict = strict
        self._uri = uri

    async def judge(self, statements: Sequence[bytes]) -> bytes:
        told = [json.loads(s) for s in statements]
        if len({t["manifest"] for t in told}) > 1:
            return b"again"  # a save came between: some ranks read the manifest before, some after
        differences = _once(told, "mismatched")
        if self._strict:
            differences += _once(told, "missing") + self._unexpected(told)
        if differences:
            shown = "".join(f"\n  {d}" for d in differences[:50]) + (
                f"\n  and {len(differences) - 50} more" if len(differences) > 50 else ""
            )
            raise MismatchError(
                f"the state and the checkpoint differ in {len(differences)} places:{shown}\n",
                uri=self._uri,
                advice="strict=False loads what both have" if self._strict else "Nothing was loaded",
                differences=tuple(differences),
            )
        return b"go" + _circles(told)

    def _unexpected(self, told: Sequence[dict[str, Any]]) -> list[str]:
        m = self._manifest
        rows = ~_union(told, "tensors", len(m.tensors))
        values = ~_union(told, "values", len(m.tree.values))
        paths = m.tree.paths()
        names = dict.fromkeys(m.tensors.names[row] for row in np.flatnonzero(rows).tolist())
        out = [f"tensor {name!r} of the checkpoint: no place for it in the state" for name in names]
        for i in np.flatnonzero(values).tolist():
            v = m.tree.values[i]
            out.append(
                f"value {format_path((*paths[v.container], v.key))} of the checkpoint: no place for it in the state"
            )
        return out


def _union(told: Sequence[dict[str, Any]], name: str, n: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    bits = [np.frombuffer(base64.b64decode(t[name]), np.uint8) for t in told]
    return np.unpackbits(np.bitwise_or.reduce(bits), count=n).astype(bool)


def _once(told: Sequence[dict[str, Any]], name: str) -> list[str]:
    """All ranks' entries in order, each once, with the rank where not all ranks have it."""
    ranks: dict[str, list[int]] = {}
    for rank, t in enumerate(told):
        for entry in t[name]:
            ranks.setdefault(entry, []).append(rank)
    return [
        entry if len(on) == len(told) else f"{entry} (rank {', '.join(map(str, on))})" for entry, on in ranks.items()
    ]


def finish(job: LoadJob, manifest: Manifest, rank: int) -> Any:
    """Put values into their containers, give objects their state, and return the state. In the caller's thread."""
    root = _assign(job, manifest, rank)
    given = [(s.owner, s.state) for s in job.flat.subtrees if s.state is not None]
    given += [(subtree.owner, state) for subtree, state in job.built]
    given.sort(key=lambda pair: not fills_in_place(pair[0]))  # modules first: optimizers need them
    modules = [Walked(walked.module) for walked in job.flat.modules]  # as they are then
    for owner, state in given:
        restore(owner, state, modules)
    return root


def _assign(job: LoadJob, manifest: Manifest, rank: int) -> Any:
    """Tuples cannot be assigned to: they are made anew, and put into what they were in."""
    nodes, containers = job.flat.nodes, job.flat.tree.containers
    todo: dict[int, dict[Key, Any]] = {}
    for container, key, row in job.match.assign:
        todo.setdefault(container, {})[key] = manifest.tree.values[row].of(rank)
    for number in range(len(nodes) - 1, -1, -1):
        updates, node = todo.get(number), nodes[number]
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
