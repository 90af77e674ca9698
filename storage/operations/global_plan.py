"""What the ranks of a job have to know of each other before they write: who else holds what, and
who writes how much of it.

A rank knows who holds its part of a DTensor that lies on a mesh of the whole job. All else (plain
tensors; DTensors on a mesh of some ranks, which another mesh may hold, too) has a *label*: ranks
that have the same label hold the same, or different tensors under one name. Their bytes tell, of
which each sends a digest. What comes out is an *accord*, the same on all ranks:

    agree      each says what it holds, by labels; the leader asks about those that several groups of ranks have
    digests    each digests what it is asked about; the leader finds who holds the same, and shares out the work

The accord also says the way that word of what is written takes: the ranks of a host tell the first
of them, who tells the leader what all of them have told. Ranks say in the first round which host
they are on.

A rank keeps the accord, and at the next save of a state that is laid out as this one says only that
it goes by it, with one digest of all that was the same everywhere. If all ranks say so, and what
was the same still is, nothing is left to be decided: the leader looks nothing up, and its verdict
is a few bytes. Else it asks all to say all. Nor are layouts told again, see ``Accord.told``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...core.lru import LruCache
from ...errors import SaveError, UsageError
from ...planner.balance import Group, balance
from ..exchange.transport import host_key
from ..format.digest import digest
from ..format.fragment import Layout
from ..ranks.hosts import numbered, numbers_in, ranks_with
from ..ranks.messages import codec
from ..ranks.team import Team
from ..runtime.engine import offload
from ..state.divergence import warn_divergent
from ..state.fingerprint import label, unsure_rows
from ..state.flat_state import FlatState
from ..state.placeholders import refuse_placeholders, reported_placeholders
from ..state.plan import Agreed
from .rounds import (
    AGREE,
    DIGESTS,
    HOLDS,
    AgreeVerdict,
    Comparison,
    Findings,
    Holdings,
    PlanDecision,
    PlanFollowed,
    SaveStatement,
)

__all__ = ["Accord", "Accords", "Digest", "Held", "Leader", "Way", "agree"]

Ints = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]
Digest = Callable[[Sequence[int]], Mapping[int, bytes]]
"""The digests of what is in rows of the state. Not called on the event loop's thread."""
WIDTH = 16
"""Bytes of a digest."""
EVERYBODY = -1
"""In place of the number of a group: all ranks, which need not be listed."""


@dataclass(frozen=True, eq=False)
class Held:
    """What one rank holds whose replicas it does not know, whatever is in it.

    ``labels``   (n, 16); plain tensors and parts of DTensors never have the same
    ``mesh``     (n,) int16, which of ``groups`` holds it, as far as its mesh says; -1 for a plain tensor
    ``groups``   of all that lies on meshes: who holds it, by a digest of the ranks, and how many bytes
    """

    labels: Digests
    mesh: npt.NDArray[np.int16]
    groups: dict[str, int]

    @classmethod
    def of(cls, flat: FlatState, world: int) -> Held:
        """Of ``flat``, by its ``unsure_rows``."""
        rows = unsure_rows(flat, world)
        names: dict[int, str] = {}  # by ids of tuples of ranks, which thousands of tensors share
        groups = Counter[str]()
        for row, layout in enumerate(flat.layouts):
            if layout.holders is not None and layout.pieces:
                name = (
                    names.get(id(layout.holders))
                    or digest(np.array(layout.holders, np.int64).data).hex()
                )
                names[id(layout.holders)] = name
                groups[name] += _nbytes(flat, row)
        number = {name: i for i, name in enumerate(groups)}
        held = [flat.layouts[row].holders for row in rows]
        mesh = [-1 if ranks is None else number[names[id(ranks)]] for ranks in held]
        kinds = ("plain " if ranks is None else "part " for ranks in held)
        texts = (kind + label(flat, row) for kind, row in zip(kinds, rows, strict=True))
        labels = b"".join(digest(text.encode("utf-8", "surrogatepass")) for text in texts)
        return cls(_digests(labels), np.array(mesh, np.int16), dict(groups))

    @property
    def names(self) -> list[str]:
        """The labels in hexadecimal digits."""
        return _names(self.labels)

    def encode(self) -> Holdings:
        """The message for the leader."""
        return Holdings(self.labels.tobytes(), self.mesh.tobytes(), self.groups, host_key())

    @classmethod
    def decode(cls, message: Holdings) -> Held:
        """What :meth:`encode` has sent."""
        mesh = np.frombuffer(message.mesh, np.int16)
        return cls(_digests(message.labels), mesh, message.groups)


@dataclass(frozen=True)
class Way:
    """How what a rank tells gets to the leader. ``mates``: ranks of one host, this one among them,
    of which the first tells for all. ``tellers``: who tells the leader himself: the ranks of his
    own host, which have no shorter way, and the first of each other host. Both ascending."""

    mates: Sequence[int]
    tellers: Sequence[int]

    @classmethod
    def of(cls, rank: int, hosts: Ints) -> Way:
        """That of ``rank``, by a number of each rank's host."""
        first = np.unique(hosts, return_index=True)[1]
        near = ranks_with(0, hosts)
        mates = [rank] if hosts[rank] == hosts[0] else ranks_with(rank, hosts)
        return cls(mates, np.union1d(near, first).tolist())


@dataclass(frozen=True, eq=False)
class Accord:
    """What was agreed on, as one rank keeps it. ``id`` is the same on all ranks, and of no other
    accord. ``alike`` are rows that were the same wherever they are held, by a name of those who
    hold them; ``apart`` those that differed.

    ``told``: keys of the layouts that this rank need not tell again. Whom it tells has them in his
    ``heard``: a save that goes by this accord has told them and has been committed, and he has been
    in this accord ever since, or it were another.
    """

    id: bytes
    agreed: Agreed
    alike: Mapping[str, Sequence[int]]
    apart: Mapping[str, int]
    way: Way
    heard: dict[bytes, Layout] = field(default_factory=dict)
    told: set[bytes] = field(default_factory=set)

    @property
    def rows(self) -> list[int]:
        """Those that have to be digested."""
        return [*(row for rows in self.alike.values() for row in rows), *self.apart.values()]

    def tell(self, digests: Mapping[int, bytes]) -> PlanFollowed:
        """What a rank that goes by it says."""
        alike = {
            name: digest(b"".join(digests[row] for row in rows))
            for name, rows in self.alike.items()
        }
        return PlanFollowed(
            self.id, alike, {name: digests[row] for name, row in self.apart.items()}
        )


Accords = LruCache[Accord]
"""Accords of one process, by what they follow from."""


async def agree(
    team: Team,
    uri: str,
    flat: FlatState,
    digests: Digest,
    accords: Accords,
    compression: str | None = None,
) -> Accord:
    """Agree with the other ranks, and return what was agreed on. All ranks of a team of several
    call this.

    Storage is not asked for anything: trainers wait for the copies that begin when this returns.

    Raises UsageError where ranks save to different URIs, or compress differently, StateError where
    all hold less than it seems, SaveError where they hold different values of one part of a
    DTensor.
    """
    key, leader = (flat.layout_id, team.rank, team.world), Leader()
    accord = None if flat.layout_id is None else accords.get(key)
    held: Held | None = None
    followed: PlanFollowed | None = None
    if accord is None:
        held = Held.of(flat, team.world)
    else:
        followed = accord.tell(await offload(digests, accord.rows))
    holdings = None if held is None else held.encode()
    placeholders = reported_placeholders(flat)
    statement = SaveStatement(
        uri,
        followed,
        holdings,
        compression,
        None if placeholders is None else dict(placeholders),
    )
    verdict = await team.round(AGREE, statement, leader.agree)
    if accord is None or not verdict.plan:
        held = held or Held.of(flat, team.world)
        comparison = verdict.comparison
        if comparison is None:
            comparison = await team.round(HOLDS, held.encode(), leader.hear)
        accord = await _anew(team, flat, held.names, digests, set(comparison.labels), leader)
        if flat.layout_id is not None:
            accords.put(key, accord)
    return accord


async def _anew(
    team: Team,
    flat: FlatState,
    names: Sequence[str],
    digests: Digest,
    asked: Set[str],
    leader: Leader,
) -> Accord:
    """Digest what is asked about; return the accord that comes of it. ``names``: the labels of what
    is held."""
    rows = unsure_rows(flat, team.world)
    mine = [
        i for i, row in enumerate(rows) if flat.layouts[row].holders is None or names[i] in asked
    ]
    found = await offload(digests, [rows[i] for i in mine])
    findings = Findings(
        tuple(mine),
        b"".join(found[rows[i]] for i in mine),
        tuple(_nbytes(flat, rows[i]) for i in mine),
        {names[i]: label(flat, rows[i]) for i in mine if names[i] in asked},
    )
    verdict = await team.round(DIGESTS, findings, leader.compare)
    accord = _accord({names[i]: rows[i] for i in mine}, verdict, team)
    ours = {row: verdict.apart[name] for name, row in accord.apart.items()}
    warn_divergent(
        flat, {row: held for row, (first, held) in ours.items() if first == team.rank}, team.rank
    )
    return accord


def _accord(asked: Mapping[str, int], verdict: PlanDecision, team: Team) -> Accord:
    """What the verdict means for the rows that were asked about, by label."""
    groups = [*verdict.groups, tuple(range(team.world))]  # the last is EVERYBODY
    holders: dict[int, Group] = {}
    alike, apart = defaultdict[str, list[int]](list), dict[str, int]()
    for name, row in sorted(
        asked.items()
    ):  # so that all who hold the same go through it in one order
        number = verdict.labels.get(name, EVERYBODY)
        holders[row] = () if number is None else groups[number]
        if number is None:
            apart[name] = row
        elif len(groups[number]) > 1:
            alike[str(number)].append(row)
    way = Way.of(team.rank, numbers_in(verdict.hosts))
    return Accord(verdict.id, Agreed(holders, dict(verdict.shares)), alike, apart, way)


class Leader:
    """What only rank 0 does."""

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._hosts = b""
        self._seal = b""

    async def agree(self, statements: Sequence[SaveStatement]) -> AgreeVerdict:
        """All go by one accord, and what was the same still is: that is all. Else what to digest,
        or to say first."""
        ours = statements[0]
        for rank, theirs in enumerate(statements):
            if theirs.uri != ours.uri:
                raise UsageError(
                    f"rank {rank} saves to {theirs.uri}, rank 0 to {ours.uri}", rank=rank
                )
            if theirs.compression != ours.compression:
                raise UsageError(
                    f"rank {rank} saves with compression={theirs.compression!r}, "
                    f"rank 0 with {ours.compression!r}",
                    rank=rank,
                )
        refuse_placeholders([theirs.placeholders for theirs in statements])
        holdings = [theirs.holdings for theirs in statements if theirs.holdings is not None]
        if len(holdings) == len(statements):
            return AgreeVerdict(comparison=await self.hear(holdings))
        followed = [theirs.plan for theirs in statements if theirs.plan is not None]
        if len(followed) < len(statements) or not _still(followed):
            return AgreeVerdict()
        return AgreeVerdict(followed[0].id)

    async def hear(self, statements: Sequence[Holdings]) -> Comparison:
        """Which parts of DTensors lie on several meshes, by labels. Plain tensors are digested in
        any case."""
        self._held = await offload(lambda: [Held.decode(holdings) for holdings in statements])
        self._hosts = numbered([holdings.host for holdings in statements])
        self._seal = await offload(_seal_of, statements)
        return Comparison(tuple(await offload(_several, self._held)))

    async def compare(self, statements: Sequence[Findings]) -> PlanDecision:
        """The accord. Raises SaveError where ranks hold different values of one part of a DTensor."""
        decision = replace(await offload(_agreed, self._held, statements), hosts=self._hosts)
        id_ = digest(codec(PlanDecision).encode(decision) + self._seal)
        return replace(decision, id=id_)


def _seal_of(statements: Sequence[Holdings]) -> bytes:
    """A digest of what all ranks hold."""
    return digest(b"".join(digest(codec(Holdings).encode(holdings)) for holdings in statements))


def _still(followed: Sequence[PlanFollowed]) -> bool:
    """Whether all ranks go by one accord, what was the same is the same, and what differed differs."""
    if len({plan.id for plan in followed}) > 1:
        return False
    alike: defaultdict[str, set[bytes]] = defaultdict(set)
    apart: defaultdict[str, set[bytes]] = defaultdict(set)
    for plan in followed:
        for name, value in plan.alike.items():
            alike[name].add(value)
        for name, value in plan.apart.items():
            apart[name].add(value)
    return all(len(seen) == 1 for seen in alike.values()) and all(
        len(seen) > 1 for seen in apart.values()
    )


def _several(held: Sequence[Held]) -> list[str]:
    """Labels of parts of DTensors that several groups of ranks have."""
    known: dict[str, int] = {}
    number = [
        np.array([known.setdefault(name, len(known)) for name in of.groups], np.int64)
        for of in held
    ]
    group = np.concatenate([n[of.mesh[of.mesh >= 0]] for n, of in zip(number, held, strict=True)])
    labels = np.concatenate([of.labels[of.mesh >= 0] for of in held])
    first, equal = _equal(labels)
    return sorted(set(_names(labels[group != group[first][equal]])))


def _equal(labels: Digests) -> tuple[Ints, Ints]:
    """The first of each label's rows, and, for each row, which label it has."""
    high, low = labels.view(np.uint64).T
    order = np.lexsort((low, high))
    new = np.append(True, (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0))[: len(order)]
    equal = np.empty(len(order), np.int64)
    equal[order] = np.cumsum(new) - 1
    return order[new], equal


def _agreed(held: Sequence[Held], told: Sequence[Findings]) -> PlanDecision:
    """Who holds what of that which was asked about, and the shares in which all is written."""
    labels = np.concatenate([of.labels[list(t.of)] for of, t in zip(held, told, strict=True)])
    found = np.concatenate([_digests(t.digests) for t in told])
    nbytes = [n for t in told for n in t.nbytes]
    ranks = np.repeat(np.arange(len(held)), [len(t.of) for t in told])
    first, equal = _equal(labels)
    same = np.ones(len(first), bool)
    same[equal[(found != found[first][equal]).any(axis=1)]] = False
    names = _names(labels[first])
    _refuse(told, {name for name, alike in zip(names, same.tolist(), strict=True) if not alike})
    groups, numbers = {tuple(range(len(held))): EVERYBODY}, dict[str, int | None]()
    apart: dict[str, tuple[int, int]] = {}  # the first rank that holds it, and how many do
    loads = _on_meshes(held, told)
    order = np.argsort(equal, kind="stable")
    holders = np.split(order, np.cumsum(np.bincount(equal, minlength=1))[:-1])
    for name, alike, rows in zip(
        names, same.tolist(), holders, strict=False
    ):  # without names there is one of no rows
        group = tuple(ranks[rows].tolist())
        number = groups.setdefault(group, len(groups) - 1) if alike else None
        if number != EVERYBODY:
            numbers[name] = number
        if not alike:
            apart[name] = (group[0], len(group))
        for row in rows[:1].tolist() if alike else rows.tolist():
            loads[group if alike else (int(ranks[row]),)] += nbytes[row]
    shares = tuple((group, tuple(cuts)) for group, cuts in balance(loads, len(held)).items())
    return PlanDecision(tuple(groups)[1:], numbers, apart, shares)


def _refuse(told: Sequence[Findings], different: Set[str]) -> None:
    """Raise SaveError where a part of a DTensor is among ``different``."""
    texts = {text: name for t in told for name, text in t.parts.items() if name in different}
    if texts:
        text = min(texts)
        ranks = [rank for rank, t in enumerate(told) if texts[text] in t.parts]
        raise SaveError(
            f"ranks {ranks} hold different values of {text!r}, on different meshes",
            advice="Give the tensors names of their own, or make them equal.",
        )


def _on_meshes(held: Sequence[Held], told: Sequence[Findings]) -> Counter[Group]:
    """The bytes that each group of ranks holds together, as far as meshes alone tell it."""
    ranks, nbytes = defaultdict[str, list[int]](list), dict[str, int]()
    for rank, (of, t) in enumerate(zip(held, told, strict=True)):
        left, names = dict(of.groups), list(of.groups)
        for mesh, n in zip(of.mesh[list(t.of)].tolist(), t.nbytes, strict=True):
            if mesh >= 0:
                left[names[mesh]] -= n
        for name, n in left.items():
            ranks[name].append(rank)
            nbytes[name] = n
    return Counter({tuple(of): nbytes[name] for name, of in ranks.items()})


def _nbytes(flat: FlatState, row: int) -> int:
    """Bytes of a row; none of one that is tied."""
    return flat.locals[row].nbytes if flat.alias[row] < 0 else 0


def _names(labels: Digests) -> list[str]:
    text = labels.tobytes().hex()
    return [text[i : i + 2 * WIDTH] for i in range(0, len(text), 2 * WIDTH)]


def _digests(joined: bytes) -> Digests:
    return np.frombuffer(joined, np.uint8).reshape(-1, WIDTH)
