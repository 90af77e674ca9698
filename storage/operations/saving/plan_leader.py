"""The leader's part of the global plan: finds replicas and divides the writing among them. A rank
states the tensors whose replicas it does not know: labels, and the ranks of their meshes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....errors import SaveError, UsageError
from ....planner.balance import Group, balance
from ...format.digest import digest
from ...ranks.hosts import numbered
from ...ranks.messages import codec
from ...runtime.engine import offload
from ...state.fingerprint import label, unsure_rows
from ...state.flat_state import FlatState
from ...state.flattening.placeholders import refuse_placeholders
from ..rounds import (
    AgreeVerdict,
    Comparison,
    Findings,
    HeldStatement,
    PlanDecision,
    PlanFollowed,
    SaveStatement,
)

Ints = npt.NDArray[np.int64]
_Digests = npt.NDArray[np.uint8]
"""Digests, one per row: (n, ``_DIGEST_NBYTES``)."""
_DIGEST_NBYTES = 16

ALL_RANKS = -1
"""Stands for a group's number: all ranks, which need not be listed."""


def statement_of(flat: FlatState, rank: int, world: int, host: str | None) -> HeldStatement:
    """Return the statement of ``rank``, on ``host``, about the ``unsure_rows`` of ``flat``.

    Plain tensors and parts of DTensors never share a label. The bytes of groups also count rows
    that are not listed.
    """
    rows = unsure_rows(flat, world)
    # Keyed by ids of rank tuples, which thousands of tensors share.
    names: dict[int, str] = {}
    groups = Counter[str]()
    for row, layout in enumerate(flat.layouts):
        if layout.holders is None or layout.is_empty:
            continue
        name = names.get(id(layout.holders))
        if name is None:
            ranks = layout.holders or (rank,)
            name = digest(np.array(ranks, np.int64).data).hex()
            names[id(layout.holders)] = name
        groups[name] += row_nbytes(flat, row)
    number = {name: i for i, name in enumerate(groups)}
    holders = [flat.layouts[row].holders for row in rows]
    mesh = [-1 if known is None else number[names[id(known)]] for known in holders]
    labels = b"".join(digest(text) for text in _label_texts(flat, rows))
    return HeldStatement(labels, np.array(mesh, np.int16).tobytes(), dict(groups), host)


def _mesh_of(held: HeldStatement) -> npt.NDArray[np.int16]:
    return np.frombuffer(held.mesh, np.int16)


def _label_texts(flat: FlatState, rows: Sequence[int]) -> Iterator[bytes]:
    for row in rows:
        kind = "plain " if flat.layouts[row].holders is None else "part "
        yield (kind + label(flat, row)).encode("utf-8", "surrogatepass")


def row_nbytes(flat: FlatState, row: int) -> int:
    """Return the bytes of a row; 0 if it is tied to another."""
    return flat.locals[row].nbytes if flat.alias[row] < 0 else 0


def label_names(labels: bytes) -> list[str]:
    """Return labels in hexadecimal."""
    text = labels.hex()
    width = 2 * _DIGEST_NBYTES
    return [text[i : i + width] for i in range(0, len(text), width)]


def _digest_column(joined: bytes) -> _Digests:
    return np.frombuffer(joined, np.uint8).reshape(-1, _DIGEST_NBYTES)


class PlanLeader:
    """The decisions of rank 0 in the rounds *agree*, *holds* and *digests*."""

    def __init__(self) -> None:
        self._held: Sequence[HeldStatement] = ()
        self._hosts = b""
        self._seal = b""

    async def agree(self, statements: Sequence[SaveStatement]) -> AgreeVerdict:
        """Confirm the plan if it still holds; otherwise ask for statements or for a comparison."""
        _check_same_save(statements)
        refuse_placeholders([statement.placeholders for statement in statements])
        holdings = [s.holdings for s in statements if s.holdings is not None]
        if len(holdings) == len(statements):
            return AgreeVerdict(comparison=await self.choose_labels(holdings))
        followed = [s.plan for s in statements if s.plan is not None]
        if len(followed) < len(statements) or not _still_holds(followed):
            return AgreeVerdict()
        return AgreeVerdict(followed[0].id)

    async def choose_labels(self, statements: Sequence[HeldStatement]) -> Comparison:
        """Return labels of DTensor parts on several meshes; plain tensors are always compared."""
        self._held = statements
        self._hosts = numbered([holdings.host for holdings in statements])
        self._seal = await offload(_seal_of, statements)
        return Comparison(tuple(await offload(_labels_of_several_groups, self._held)))

    async def decide(self, statements: Sequence[Findings]) -> PlanDecision:
        """Return the global plan. Raises SaveError for different values of one DTensor part."""
        decision = replace(await offload(_decision, self._held, statements), hosts=self._hosts)
        plan_id = digest(codec(PlanDecision).encode(decision) + self._seal)
        return replace(decision, id=plan_id)


def _check_same_save(statements: Sequence[SaveStatement]) -> None:
    first = statements[0]
    for rank, other in enumerate(statements):
        if other.uri != first.uri:
            raise UsageError(f"rank {rank} saves to {other.uri}, rank 0 to {first.uri}", rank=rank)
    check_same("compression", [statement.compression for statement in statements])
    check_same("overwrite", [statement.overwrite for statement in statements])


def check_same(option: str, values: Sequence[object]) -> None:
    """Raise UsageError unless ``option`` has the same value on all ranks."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(
                f"rank {rank} saves with {option}={value!r}, rank 0 with {values[0]!r}", rank=rank
            )


def _seal_of(statements: Sequence[HeldStatement]) -> bytes:
    """Return a digest of all ranks' statements."""
    return digest(
        b"".join(digest(codec(HeldStatement).encode(holdings)) for holdings in statements)
    )


def _still_holds(followed: Sequence[PlanFollowed]) -> bool:
    """Return whether all follow one plan, and the same tensors are identical as before."""
    if len({plan.id for plan in followed}) > 1:
        return False
    identical: defaultdict[str, set[bytes]] = defaultdict(set)
    divergent: defaultdict[str, set[bytes]] = defaultdict(set)
    for plan in followed:
        for name, value in plan.identical.items():
            identical[name].add(value)
        for name, value in plan.divergent.items():
            divergent[name].add(value)
    if any(len(values) > 1 for values in identical.values()):
        return False
    return all(len(values) > 1 for values in divergent.values())


def _labels_of_several_groups(held: Sequence[HeldStatement]) -> list[str]:
    """Return the labels of DTensor parts that several groups of ranks hold."""
    known: dict[str, int] = {}
    groups = []
    labels = []
    for of in held:
        numbers = [known.setdefault(name, len(known)) for name in of.groups]
        mesh = _mesh_of(of)
        on_mesh = mesh >= 0
        groups.append(np.array(numbers, np.int64)[mesh[on_mesh]])
        labels.append(_digest_column(of.labels)[on_mesh])
    group = np.concatenate(groups)
    column = np.concatenate(labels)
    first, number = _distinct(column)
    return sorted(set(label_names(column[group != group[first][number]].tobytes())))


def _distinct(labels: _Digests) -> tuple[Ints, Ints]:
    """Return the first row of each distinct label, and each row's label number."""
    high, low = labels.view(np.uint64).T
    order = np.lexsort((low, high))
    is_new = np.append(True, (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0))[: len(order)]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(is_new) - 1
    return order[is_new], number


def _decision(held: Sequence[HeldStatement], findings: Sequence[Findings]) -> PlanDecision:
    pairs = list(zip(held, findings, strict=True))
    labels = np.concatenate([_digest_column(of.labels)[list(found.of)] for of, found in pairs])
    digests = np.concatenate([_digest_column(found.digests) for found in findings])
    nbytes = [n for found in findings for n in found.nbytes]
    ranks = np.repeat(np.arange(len(held)), [len(found.of) for found in findings])
    first, number = _distinct(labels)
    is_identical = np.ones(len(first), bool)
    is_identical[number[(digests != digests[first][number]).any(axis=1)]] = False
    names = label_names(labels[first].tobytes())
    different = {names[i] for i in np.flatnonzero(~is_identical).tolist()}
    _refuse_different_parts(findings, different)

    groups: dict[Group, int] = {tuple(range(len(held))): ALL_RANKS}
    group_of: dict[str, int | None] = {}
    divergent: dict[str, tuple[int, int]] = {}
    loads = _loads_on_meshes(held, findings)
    # Without names there is one list of no rows, which zip drops.
    for name, identical, rows in zip(
        names, is_identical.tolist(), _rows_by_number(number), strict=False
    ):
        holders = tuple(ranks[rows].tolist())
        if identical:
            group = groups.setdefault(holders, len(groups) - 1)
            if group != ALL_RANKS:
                group_of[name] = group
            loads[holders] += nbytes[rows[0]]
            continue
        group_of[name] = None
        divergent[name] = (holders[0], len(holders))
        for row in rows.tolist():
            loads[(int(ranks[row]),)] += nbytes[row]
    shares = tuple((group, tuple(cuts)) for group, cuts in balance(loads, len(held)).items())
    return PlanDecision(tuple(groups)[1:], group_of, divergent, shares)


def _rows_by_number(number: Ints) -> Iterable[Ints]:
    order = np.argsort(number, kind="stable")
    return np.split(order, np.cumsum(np.bincount(number, minlength=1))[:-1])


def _refuse_different_parts(findings: Sequence[Findings], different: Set[str]) -> None:
    texts = {
        text: name for found in findings for name, text in found.parts.items() if name in different
    }
    if not texts:
        return
    text = min(texts)
    ranks = [rank for rank, found in enumerate(findings) if texts[text] in found.parts]
    raise SaveError(
        f"ranks {ranks} hold different values of {text!r}, which is one part of a tensor",
        advice="Give the tensors different names, or make them equal.",
    )


def _loads_on_meshes(held: Sequence[HeldStatement], findings: Sequence[Findings]) -> Counter[Group]:
    """Return the bytes that each group of ranks holds in the rows that were not compared."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    nbytes: dict[str, int] = {}
    for rank, (of, found) in enumerate(zip(held, findings, strict=True)):
        remaining = dict(of.groups)
        names = list(of.groups)
        for mesh, n in zip(_mesh_of(of)[list(found.of)].tolist(), found.nbytes, strict=True):
            if mesh >= 0:
                remaining[names[mesh]] -= n
        for name, n in remaining.items():
            ranks[name].append(rank)
            nbytes[name] = n
    return Counter({tuple(group): nbytes[name] for name, group in ranks.items()})
