"""Test plain tensors on several ranks, stored once if equal, and the reports to the leader."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.bits import difference, plain
from support.copies import run
from support.ranks import BUDGET_NBYTES, as_ranks, load_as_ranks, save_as_ranks, saved_as_ranks
from support.wrapped import Given
from torch import nn

import holdfast
from holdfast.bench.simulated.fleet import FlatStates, by_host, fragment_told
from holdfast.bench.workloads.sized import sized
from holdfast.core.lru import LruCache
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.fragment import Fragment, StateLayout, decode_fragment
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.format.merge import merge
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.saving import save
from holdfast.storage.operations.saving.global_plan import GlobalPlans
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import plan_image

WORLD = 4


def state_of(rank: int) -> dict[str, Any]:
    """Return tensors and values that are equal, different, partial or tied on the ranks."""
    tied, shared = torch.arange(700.0), torch.arange(6.0)
    state: dict[str, Any] = {
        "same": torch.arange(30_000.0),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "own": torch.full((5,), float(rank)),
        "z": {"first": tied},
        "a": {"second": tied},
        "array": np.arange(4),
        "empty": torch.zeros(0, 2),
        "who": rank,
        "parity": ["even", "odd"][rank % 2],
        "list": [1, (2, float(rank))],
        "lists": Given({"of": [list(range(rank)), tuple("abc"[:rank]), [7] * (4 - rank)]}),
        "tied on some": {
            "p": shared,
            "q": shared if rank % 2 else shared + rank + 1,
            "r": shared if rank % 2 else shared.clone(),
        },
    }
    if rank == 1:
        state["only"] = {"t": torch.full((3,), 5.0), "v": "here"}
    return state


def target_of(rank: int) -> dict[str, Any]:
    """Return a state like ``state_of(rank)`` with other contents."""
    into = state_of(rank) | {"own": torch.full((5,), -1.0), "who": -1, "lists": Given({"of": None})}
    into["same"], into["turned"] = torch.zeros(30_000), torch.zeros(3, 4).t()
    return into


def compared(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with its object replaced by the object's state."""
    return {key: of.state if isinstance(of, Given) else of for key, of in state.items()}


@pytest.fixture(scope="module")
def driver() -> MemoryDriver:
    """Return storage with a checkpoint of four ranks."""
    storage = saved_as_ranks([state_of(rank) for rank in range(WORLD)])
    return storage


@pytest.mark.parametrize("world", [4, 3])
def test_each_rank_gets_back_what_the_rank_of_its_number_saved(
    world: int, driver: MemoryDriver
) -> None:
    """Shared, own, partial and tied tensors, arrays and values load, with and without a target."""
    into = [target_of(rank) for rank in range(world)]
    if world < WORLD:  # without a rule, an object's state is not distributed to other ranks
        for state in into:
            del state["lists"]
    found = load_as_ranks(driver, into, strict=world == WORLD or "state")
    for rank, loaded in enumerate(found):
        expected = compared({key: value for key, value in state_of(rank).items() if key in loaded})
        assert difference(expected, compared(loaded)) is None
        built, *_ = run(run_build(driver, rank, BUDGET_NBYTES))
        assert difference(expected, {key: built[key] for key in expected}) is None


def test_what_all_have_alike_is_stored_once(driver: MemoryDriver) -> None:
    """The ranks divide equal tensors evenly. Each rank stores its own and its differing tensors."""
    with holdfast.open(driver.uri) as c:
        total = 30_000 * 4
        assert total < sum(c.images.values()) < total + 4 * 16384
        assert max(c.images.values()) < total / 4 * 1.05 + 16384
        assert (c.world, c.tensors["same"].owners, c.tensors["own"].owners) == (4, (), (0, 1, 2, 3))
        assert c.tensors["same"].ranks == (0, 1, 2, 3)
        assert c.tensors["only.t"].ranks == (1,)
        for rank in range(WORLD):
            assert c.read("own", rank=rank).tolist() == [float(rank)] * 5
            values = dict(c.values(rank))
            assert (values['state["who"]'], values['state["parity"]']) == (
                rank,
                ["even", "odd"][rank % 2],
            )
        assert c.verify().ok


@pytest.mark.parametrize(
    ("other", "text"),
    [({"x": torch.ones(9), "y": [1]}, 'state["y"]'), ([torch.ones(9)], "state")],
    ids=["kind of container", "kind of state"],
)
def test_ranks_that_disagree_are_told_where(other: Any, text: str) -> None:
    """The error names the place."""
    state = {"x": torch.ones(9), "y": {0: 1}}
    with pytest.raises(holdfast.SaveError) as caught:
        save_as_ranks(MemoryDriver(), [state, state, other])
    assert text in str(caught.value)


def test_a_mismatch_names_the_ranks_that_see_it() -> None:
    """The load changes no tensor."""
    driver = saved_as_ranks([{"x": torch.ones(100), "y": 1}])
    into = [{"x": torch.zeros(100), "y": 0} for _ in range(4)]
    into[2]["x"], into[3]["z"] = torch.zeros(5), 1
    with pytest.raises(holdfast.MismatchError) as caught:
        load_as_ranks(driver, into)
    assert caught.value.differences == (
        'state["x"]: shape [100] in the checkpoint, [5] in the state (rank 2)',
        'state["z"]: no such value in the checkpoint (rank 3)',
    )
    assert not any(state["x"].any() for state in into)


def test_a_rank_needs_a_place_for_its_part_only() -> None:
    """An entry is unexpected only if no rank has a place for it, as with pipeline stages."""
    driver = saved_as_ranks([{"x": torch.ones(100), "y": 1}])
    into = [{"x": torch.zeros(100)}, {"y": 0}, {}]
    expected = [{"x": torch.ones(100)}, {"y": 1}, {}]
    assert difference(expected, load_as_ranks(driver, into)) is None


FULL = {"w": torch.ones(2), "v": torch.ones(1, 3)}
EMPTY = {"w": torch.empty(0), "v": torch.zeros(0, 3)}


@pytest.mark.parametrize(
    ("states", "is_hollow"),
    [
        ([EMPTY, EMPTY], True),
        ([EMPTY, {}], True),
        ([EMPTY, {"step": 3}], True),
        ([{"step": 3}, {"step": 3}], False),
        ([FULL, EMPTY], False),
        ([EMPTY, FULL], False),
    ],
)
def test_a_state_is_hollow_only_if_all_ranks_have_no_element(
    states: list[Any], is_hollow: bool
) -> None:
    """Then all ranks refuse to save it."""
    jobs = [SaveJob(flatten(state), 1, BUDGET_NBYTES) for state in states]
    driver = MemoryDriver()
    found = as_ranks(2, lambda team: run_save(driver, team, jobs[team.rank]))
    assert [isinstance(one, holdfast.StateError) for one in found] == [is_hollow] * 2
    assert (MANIFEST_KEY in driver.objects) == (not is_hollow)


class Diverged(nn.Module):
    """A parameter and a buffer with values of the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(rank)))
        self.alike = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor([rank]))


def diverged(rank: int) -> dict[str, Any]:
    """Return a state whose tensors differ between ranks, expected or not."""
    model = Diverged(rank)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim.state[model.weight]["momentum_buffer"] = torch.full((3,), float(rank))
    second = {"second": torch.full((2,), float(rank))} if rank else {}
    return second | {
        "model": model,
        "optim": optim,
        "dict": {"weight": model.weight.detach() + 0},
        "shape": torch.ones(2 + rank),
        "dtype": torch.ones(2, dtype=[torch.float32, torch.float16, torch.float64][rank]),
        "late": torch.ones(2),
        "generator": torch.Generator().manual_seed(rank),
        "data": holdfast.PerRank({"at": torch.tensor(rank)}),
        "loader": Given({"worker": {"seed": torch.tensor([rank])}}),
        "values": rank,
    }


def test_plain_tensors_that_differ_between_ranks_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first holder warns, at the first save in which they differ."""
    driver, plans = MemoryDriver(), [LruCache(8) for _ in range(3)]
    states = [diverged(rank) for rank in range(3)]

    def warnings_of_a_save() -> list[str]:
        caplog.clear()
        flats = [flatten({"warned": state}) for state in states]
        jobs = [
            SaveJob(flat, 1, BUDGET_NBYTES, plans=kept)
            for flat, kept in zip(flats, plans, strict=True)
        ]
        found = as_ranks(3, lambda team: run_save(driver, team, jobs[team.rank]))
        assert not [one for one in found if isinstance(one, BaseException)]
        return sorted(record.getMessage() for record in caplog.records)

    first, second = warnings_of_a_save()
    if "second" in first:
        first, second = second, first
    named = [
        '["model"]["weight"] (float32 [3] on rank 0, held by 3)',
        '["optim"]["state"]["weight"]["momentum_buffer"] (float32 [3] on rank 0, held by 3)',
        '["dict"]["weight"] (float32 [3] on rank 0, held by 3)',
        '["shape"] (float32 [2] on rank 0, held by 3)',
        '["dtype"] (float32 [2] on rank 0, held by 3)',
    ]
    assert all('state["warned"]' + name in first for name in named)
    assert first.count("on rank 0") == len(named)
    assert all(way in first for way in ("DTensor", "PerRank", "broadcast"))
    assert 'state["warned"]["second"] (float32 [2] on rank 1, held by 2)' in second
    assert warnings_of_a_save() == []
    for rank, state in enumerate(states):
        state["late"] += rank
    (late,) = warnings_of_a_save()
    assert 'state["warned"]["late"]' in late
    assert late.count("on rank 0") == 1
    assert warnings_of_a_save() == []


class Position:
    """An object that knows a rank's position in its data."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "left": [self.position] * 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.fixture
def positions() -> MemoryDriver:
    """Save two ranks, each with its own position, and one that is equal."""
    storage = saved_as_ranks(
        [{"own": Position(10 * rank), "alike": Position(5)} for rank in (0, 1)]
    )
    return storage


def test_the_state_of_an_object_is_not_dealt_out_unsaid(positions: MemoryDriver) -> None:
    """Another number of ranks refuses a state per rank: it fits neither three ranks nor one."""

    def loaded(world: int, strict: Any = True) -> list[int]:
        into = [{"own": Position(-1), "alike": Position(-1)} for _ in range(world)]
        load_as_ranks(positions, into, strict=strict)
        assert [state["alike"].position for state in into] == [5] * world
        return [state["own"].position for state in into]

    assert loaded(2) == [0, 10]
    assert loaded(3, strict=False) == [0, 10, 0]
    for world in (1, 3):
        with pytest.raises(holdfast.MismatchError) as caught:
            loaded(world)
        (text,) = caught.value.differences
        assert text.startswith('state["own"]: each of 2 ranks saved its own state')


def test_what_was_saved_without_a_rule_is_loaded_with_one(positions: MemoryDriver) -> None:
    """A PerRank in the target applies its rule to all saved states."""

    def rule(values: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        assert all(value["left"] == [value["position"]] * 2 for value in values)
        return {"position": sum(value["position"] for value in values) + 1000 * rank + world}

    own = Position(-1)
    load_as_ranks(positions, [{"own": holdfast.PerRank(own, rule)}], strict=False)
    assert own.position == 11


def test_items_that_only_some_ranks_have_are_not_dealt_out_unsaid() -> None:
    """A state with another structure on each rank counts as a different one."""

    def states(world: int) -> list[Any]:
        return [
            {"uneven": Given({f"item {rank}": 1}), "tensor": Given({"t": torch.tensor([rank])})}
            for rank in range(world)
        ]

    driver = saved_as_ranks(states(2))
    load_as_ranks(driver, states(2))
    with pytest.raises(holdfast.MismatchError) as caught:
        load_as_ranks(driver, states(3))
    places = [text.partition(":")[0] for text in caught.value.differences]
    assert places == ['state["uneven"]', 'state["tensor"]']


HOSTS = [
    list("aabb"),
    list("abab"),
    list("abbcca"),
    list("aaa"),
    list("abc"),
    ["a", None, None, "b", "b"],
]


class Listening:
    """A store that records the sizes of its values."""

    def __init__(self) -> None:
        self._inner = dist.HashStore()
        self.told: dict[str, int] = {}

    def set(self, key: str, value: bytes | str, /) -> None:
        self.told[key.split("/", 3)[-1]] = len(
            value
        )  # below the job's prefix, its generation, and the call
        self._inner.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ranks(self, name: str) -> list[int]:
        """Return the ranks that sent something under ``name``."""
        return sorted(
            int(key.split("/")[1])
            for key in self.told
            if key.startswith(f"{name}/") and key.count("/") == 1
        )

    def nbytes(self, name: str) -> int:
        """Return the bytes sent under ``name``."""
        return sum(
            n for key, n in self.told.items() if key.startswith(f"{name}/") and "verdict" not in key
        )


def staged_state(rank: int) -> dict[str, Any]:
    """Return the state of a rank: tensors of all ranks, of every second rank, and its own."""
    stage = {f"layer {i} of stage {rank % 2}": torch.full((3,), float(i)) for i in range(50)}
    return {
        "shared": torch.arange(1000.0),
        "own": torch.full((5,), float(rank)),
        "rank": rank,
    } | stage


def saved(
    driver: MemoryDriver, hosts: Sequence[str | None], memory: Sequence[GlobalPlans]
) -> tuple[Listening, list[Any]]:
    """Save as one rank per named host; hosts may repeat. Return the store with its record, and the
    outcomes."""
    store = Listening()

    async def act(team: StoreTeam) -> Any:
        rank = team.rank
        job = SaveJob(flatten(staged_state(rank)), 1, 64 << 20, created_s=1.0, plans=memory[rank])
        return await run_save(driver, team, job)

    return store, as_ranks(len(hosts), act, store=store, hosts=hosts)


def memories(world: int) -> list[GlobalPlans]:
    """Return empty caches of plans."""
    return [LruCache(2) for _ in range(world)]


def manifest(driver: MemoryDriver) -> Manifest:
    """Return the committed manifest, without its attempt."""
    return replace(asyncio.run(read_manifest(driver))[0], attempt="")


def whole(driver: MemoryDriver, world: int) -> bool:
    """Return whether each rank loads the state that it saved."""
    into = [
        {
            k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1
            for k, v in staged_state(rank).items()
        }
        for rank in range(world)
    ]
    return all(
        difference(staged_state(rank), found) is None
        for rank, found in enumerate(load_as_ranks(driver, into))
    )


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(host or "-" for host in hosts))
def test_the_ranks_of_a_host_report_to_the_leader_as_one(hosts: list[str | None]) -> None:
    """The host's first rank forwards all; the commit is the same."""
    driver, world = MemoryDriver(), len(hosts)
    store, outcomes = saved(driver, hosts, memories(world))
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    near = {r for r in range(world) if hosts[r] == hosts[0]}
    first = {r for r in range(world) if hosts[r] is None or hosts.index(hosts[r]) == r}
    assert store.ranks("commit") == sorted((near | first) - {0})
    assert store.ranks("written") == sorted(set(range(world)) - near - first)
    assert whole(driver, world)
    flat = MemoryDriver()
    saved(flat, [None] * world, memories(world))
    if hosts == sorted(hosts, key=str):
        assert plain(manifest(driver)) == plain(manifest(flat))


def test_a_layout_is_sent_once() -> None:
    """Later saves send its key only; a rank that forgot makes all send everything."""
    hosts = list("aabbb")
    driver, memory = MemoryDriver(), memories(len(hosts))
    first, *again = [saved(driver, hosts, memory)[0] for _ in range(3)]
    for store in again:
        assert store.ranks("digests") == []  # they went by their plan
        assert store.nbytes("commit") < 0.5 * first.nbytes("commit")
        assert store.nbytes("written") < 0.5 * first.nbytes("written")
        assert whole(driver, len(hosts))
    for rank in (0, 2, 4):
        memory[rank].clear()
        store, _ = saved(driver, hosts, memory)
        assert (store.nbytes("commit"), store.nbytes("written")) == (
            first.nbytes("commit"),
            first.nbytes("written"),
        )
        assert whole(driver, len(hosts))


def test_a_layout_of_a_save_that_failed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how far it got."""
    hosts = list("aabb")
    driver, memory = MemoryDriver(), memories(len(hosts))

    def fail(*_: Any, **__: Any) -> Any:
        raise holdfast.FullError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(save, "commit", fail)
        first, outcomes = saved(driver, hosts, memory)
        assert [type(outcome) for outcome in outcomes] == [holdfast.FullError] * 4
    store, outcomes = saved(driver, hosts, memory)
    assert store.ranks("digests") == []
    assert (store.nbytes("commit"), store.nbytes("written")) == (
        first.nbytes("commit"),
        first.nbytes("written"),
    )
    assert whole(driver, len(hosts))


@pytest.mark.parametrize("rank", [2, 3])
def test_a_failure_of_a_report_reaches_all_ranks_with_the_name_of_the_rank(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All raise, and the next save collects leftovers."""
    real = save.join if rank == 2 else save.written_fragment
    driver = MemoryDriver()

    def broken(*args: Any) -> Any:
        joins = rank == 2 and args[0][0].groups[0].ranks[0] == 2
        if joins or args[-1] == 3:
            raise holdfast.FullError("no memory")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(save, real.__name__, broken)
        _, raised = saved(driver, list("aabbc"), memories(5))
    assert isinstance(raised.pop(rank), holdfast.FullError)
    assert [(type(e), e.rank) for e in raised] == [(holdfast.RankFailedError, rank)] * 4
    assert all("no memory" in str(e) for e in raised)
    assert all(key.startswith("data/") and key.endswith(".safetensors") for key in driver.objects)
    saved(driver, list("aabbc"), memories(5))
    assert whole(driver, 5)
    current = asyncio.run(read_manifest(driver))[0].attempt
    assert {key.split("/")[1] for key in driver.objects if key != MANIFEST_KEY} == {current}


def test_a_digest_of_an_unknown_layout_is_damage() -> None:
    """A key alone does for those who know it."""
    flat = flatten(staged_state(0))
    from holdfast.storage.format.fragment import decode_fragment, fragment_of
    from holdfast.storage.format.tables import ImageTable
    from holdfast.storage.state.plan import plan_save

    plan = plan_save(flat, 0, None)
    images = ImageTable(
        np.array([0]),
        np.array([plan.layout.hashed_end]),
        np.zeros((plan.layout.chunks, 16), np.uint8),
    )
    fragment = fragment_of(
        ("20260101T000000-00000000", 1, 1.0), 0, plan.reported, plan.shards, images, flat.tree
    )
    told = fragment.encode({plan.reported.key})
    known = {plan.reported.key: plan.reported}
    assert len(told) < len(fragment.encode()) / 2
    assert decode_fragment(told, "a fragment", known).encode() == fragment.encode()
    with pytest.raises(holdfast.DamagedError, match="a fragment"):
        decode_fragment(told, "a fragment", {})


RANKS = 256


def fragments() -> Iterator[Fragment]:
    """Yield the reports of all ranks of a job."""
    states, workload = FlatStates(RANKS), sized(64 << 20)
    for rank in range(RANKS):
        flat, agreed, _ = states.of(workload.specs(rank, RANKS), rank)
        yield fragment_told(plan_image(flat, rank, agreed), rank, flat)


@pytest.mark.nightly(11)
def test_a_merge_holds_shards_a_few_times() -> None:
    """The peak of a merge is a few times the shards' columns."""
    told = [fragment.encode() for fragment in by_host(fragments(), 8)]
    known: dict[bytes, StateLayout] = {}
    gc.collect()
    tracemalloc.start()
    try:
        decoded = [decode_fragment(data, "a fragment", known) for data in told]
        tracemalloc.reset_peak()
        shards = merge(decoded).shards
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    columns = (shards.tensor, shards.offsets, shards.lengths, shards.image, shards.start)
    assert peak_nbytes / sum(column.nbytes for column in columns) < 4.4
