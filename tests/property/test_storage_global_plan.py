"""Ranks agree on one plan from all their states, whatever each remembers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples
from support.ranks import as_ranks, succeeded

import holdfast
from holdfast.core.lru import LruCache
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.operations.saving.global_plan import GlobalPlans, agree
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.state.fingerprint import fingerprints, unsure_rows
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import Agreed

WORLD = 3
MESHES = [(0, 1), (2,)]
"""Meshes of tensors whose names begin with "p": all ranks of a mesh hold each of them whole."""
_kin: dict[Any, object] = {}

State = dict[str, int]
"""A value per name, which fills the tensor."""
names = st.sampled_from(["a", "b", "c", "p", "q"])
values = st.integers(0, 1)
states = st.dictionaries(names, values, max_size=4)


def flat_of(state: State, rank: int) -> FlatState:
    """Flatten a rank's state; states with the same names count as laid out alike."""
    flat = flatten({name: torch.full((2,), float(value)) for name, value in state.items()})
    mesh = next(mesh for mesh in MESHES if rank in mesh)
    flat.layouts = list(flat.layouts)
    for row, name in enumerate(flat.names):
        if name in "pq":
            piece = Piece(Box((0,), (2,)), 0, (2,))
            flat.layouts[row] = MeshLayout((2,), (piece,), (2,), mesh, len(mesh))
    flat.layout_id = _kin.setdefault((rank, tuple(state)), object())
    return flat


def agree_all(
    flats: Sequence[FlatState], memory: Sequence[GlobalPlans]
) -> tuple[list[Agreed], int, list[int]]:
    """Return each rank's agreement, the number of rounds, and the rows each digested."""
    digested = [0] * WORLD

    def digests(rank: int, rows: Sequence[int]) -> dict[int, bytes]:
        digested[rank] += len(rows)
        return fingerprints(flats[rank], rows)

    async def agreed(team: StoreTeam) -> tuple[Agreed, int]:
        rank = team.rank
        async with team.session():
            plan = await agree(team, "memory://", flats[rank], partial(digests, rank), memory[rank])
        return plan.agreed, 1 + len(team.rounds)

    done = succeeded(as_ranks(WORLD, agreed))
    return [found for found, _ in done], done[0][1], digested


def by_sight(job: Sequence[State]) -> list[dict[str, tuple[int, ...]]] | None:
    """Return the holders as an observer of all states sees them; None if they cannot be saved."""
    seen: list[dict[str, tuple[int, ...]]] = []
    for state in job:
        mine = {}
        for name, value in state.items():
            ranks = tuple(other for other in range(WORLD) if name in job[other])
            if any(job[other][name] != value for other in ranks):
                if name in "pq":
                    return None
                ranks = ()
            mine[name] = ranks
        seen.append(mine)
    return seen


def on_one_mesh(job: Sequence[State]) -> bool:
    """Return whether the ranks of each mesh hold its tensors alike, as a framework ensures."""
    return all(len({job[rank].get(name) for rank in mesh}) == 1 for mesh in MESHES for name in "pq")


def look(
    flats: Sequence[FlatState], agreed: Sequence[Agreed], job: Sequence[State]
) -> list[dict[str, tuple[int, ...]]]:
    """Return the agreed holders by name; tensors known from their mesh are not discussed."""
    found = []
    for rank, (flat, told) in enumerate(zip(flats, agreed, strict=True)):
        mesh = next(mesh for mesh in MESHES if rank in mesh)
        assert set(told.holders) <= set(unsure_rows(flat, WORLD))
        found.append({name: told.holders.get(row, mesh) for row, name in enumerate(flat.names)})
    return found


@examples(40)
@given(
    st.lists(
        st.lists(states, min_size=WORLD, max_size=WORLD).filter(on_one_mesh), min_size=1, max_size=5
    )
)
def test_ranks_agree_on_what_they_hold_whatever_was_before(history: list[list[State]]) -> None:
    """Whatever ranks remember, they agree on what their states tell, or all refuse."""
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    for job in history:
        flats = [flat_of(state, rank) for rank, state in enumerate(job)]
        expected = by_sight(job)
        if expected is None:
            with pytest.raises(holdfast.SaveError, match=r"hold different values of '[pq]"):
                agree_all(flats, memory)
        else:
            agreed, _, _ = agree_all(flats, memory)
            assert look(flats, agreed, job) == expected


def test_parts_of_one_tensor_that_differ_between_meshes_are_refused() -> None:
    """The error gives the name and its ranks. Neither value is stored."""
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    job: list[State] = [{"p": 0}, {"p": 0}, {"p": 1}]
    flats = [flat_of(state, rank) for rank, state in enumerate(job)]
    with pytest.raises(holdfast.SaveError, match=r"ranks \[0, 1, 2\] hold .* of 'p\[0:2\]'"):
        agree_all(flats, memory)


def test_what_is_as_before_takes_one_round_and_no_more_digests_than_needed() -> None:
    """Tensors of one mesh are never digested, and tensors of one rank only once."""
    job = [
        {"a": 1, "b": rank, "p": 5} if rank < 2 else {"a": 1, "b": rank, "c": 7}
        for rank in range(WORLD)
    ]
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    seen = [agree_all([flat_of(s, rank) for rank, s in enumerate(job)], memory) for _ in range(3)]
    assert [rounds for _, rounds, _ in seen] == [2, 1, 1]
    assert [digested for _, _, digested in seen] == [[2, 2, 3], [2, 2, 2], [2, 2, 2]]
    assert all(
        again is first
        for _agreed, *_ in seen[1:]
        for again, first in zip(_agreed, seen[0][0], strict=True)
    )


def test_what_was_alike_and_is_not_is_found_out_anew() -> None:
    """Tensors that begin or cease to differ are detected; then one round suffices again."""
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    rounds, holders = [], []
    for values_of_a in ((1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 1, 1), (3, 3, 3)):
        flats = [flat_of({"a": value}, rank) for rank, value in enumerate(values_of_a)]
        agreed, count, _ = agree_all(flats, memory)
        rounds.append(count)
        holders.append(agreed[0].holders[0])
    assert rounds == [2, 3, 1, 3, 1]
    assert holders == [(0, 1, 2), (), (), (0, 1, 2), (0, 1, 2)]


def test_a_rank_that_remembers_nothing_has_all_say_all() -> None:
    """A rank that has restarted makes all ranks send full statements."""
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    flats = [flat_of({"a": 1}, rank) for rank in range(WORLD)]
    agree_all(flats, memory)
    memory[1].clear()
    assert [agree_all(flats, memory)[1] for _ in range(2)] == [3, 1]


def test_layouts_that_were_never_together_are_not_taken_for_one_plan() -> None:
    """Remembered plans of other combinations of layouts are not reused."""
    memory: list[GlobalPlans] = [LruCache(2) for _ in range(WORLD)]
    for name in ("a", "b"):
        agree_all([flat_of({name: 1}, rank) for rank in range(WORLD)], memory)
    flats = [flat_of({name: 1}, rank) for rank, name in enumerate("aab")]
    agreed, rounds, _ = agree_all(flats, memory)
    assert (rounds, [a.holders[0] for a in agreed]) == (3, [(0, 1), (0, 1), (2,)])
