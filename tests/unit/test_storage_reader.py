"""An opened checkpoint: its contents, parts and shares of it, and differences from another."""

from __future__ import annotations

import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, flip, fresh_uri, from_bytes, image_in, random_bits, raw, saved
from support.commands import run
from support.copies import flipped, images
from support.drivers import storage_at
from support.given import Serve
from support.ranks import save_as_ranks, save_cut
from torch import nn

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.local.driver import LocalDriver
from holdfast.errors import MismatchError, UsageError
from holdfast.planner.box import Box
from holdfast.storage.format.part import Only
from holdfast.storage.state.gaps import gap_between

SLICES = [
    slice(None),
    slice(-2, None),
    slice(None, None, 2),
    slice(4, 0, -2),
    slice(3, 1),
    slice(0, 99),
]
INDICES: list[Any] = [
    (), None, 0, -1, slice(1, 2), *((s,) for s in SLICES), *itertools.product(SLICES, [0, -3, slice(1, 3), slice(None, None, -3)]),
    (0, 0, 0), (slice(None), 1, slice(2, 5)), (-1, slice(None, None, -2), -1), (slice(2, 2), 1), (slice(0, 5), slice(2), slice(1, None, 3)),
]  # fmt: skip


@pytest.fixture(scope="module")
def stored() -> tuple[str, torch.Tensor]:
    """Save a checkpoint of one tensor of shape (5, 4, 7)."""
    uri, tensor = fresh_uri(), torch.arange(140).reshape(5, 4, 7)
    holdfast.save(uri, {"x": tensor})
    return uri, tensor


def test_an_index_means_what_it_means_to_numpy(stored: tuple[str, torch.Tensor]) -> None:
    """Integers and slices with any step select the same as in numpy."""
    uri, tensor = stored
    with holdfast.open(uri) as c:
        for index in INDICES:
            read, expected = c.read("x", index), tensor.numpy()[() if index is None else index]
            assert read.shape == expected.shape
            assert read.tolist() == expected.tolist()


def test_an_index_that_does_not_fit_is_refused(stored: tuple[str, torch.Tensor]) -> None:
    """A read refuses an index out of range, and any other than integers and slices."""
    with holdfast.open(stored[0]) as c:
        for index in (5, -6, (0, 4), (0, 0, 0, 0), 1.0, (None,), True, ..., [0], np.ones(5, bool)):
            with pytest.raises(holdfast.UsageError):
                c.read("x", index)


def test_a_small_slice_reads_little(tmp_path: Path, serve: Serve) -> None:
    """A slice of 64 KiB reads no more than that, a block at each end, and checksums."""
    holdfast.save(tmp_path, {"x": torch.zeros(8 << 20)})
    asked: list[int] = []

    class Counting(LocalDriver):
        async def read(self, key: str, start: int, into: Buffer) -> None:
            asked.append(len(into))
            await super().read(key, start, into)

    with holdfast.open(serve(lambda path: Counting(tmp_path))) as c:
        asked.clear()
        c.read("x", slice(1_000_000, 1_016_384))
    assert 64 << 10 <= sum(asked) <= (64 << 10) * 3 + (8 << 10)


def test_tensors_are_described() -> None:
    """Name, shape, dtype, bytes, shards and alias are listed in the order of the state."""
    shared = torch.ones(2, 3, dtype=torch.bfloat16)
    uri = fresh_uri()
    holdfast.save(
        uri,
        {"m": {"w": shared, "again": shared}, "empty": torch.zeros(0, 4), "s": torch.tensor(1)},
        step=12,
    )
    with holdfast.open(uri) as c:
        described = [
            (i.name, i.shape, i.dtype, i.nbytes, i.shards, i.ranks, i.owners, i.alias_of)
            for i in c.tensors.values()
        ]
        assert described == [
            ("m.w", (2, 3), "bfloat16", 12, 1, (0,), (), "m.again"),
            ("m.again", (2, 3), "bfloat16", 12, 1, (0,), (), None),
            ("empty", (0, 4), "float32", 0, 0, (), (), None),
            ("s", (), "int64", 8, 1, (0,), (), None),
        ]
        assert (c.step, c.world, c.nbytes) == (12, 1, 20)
        assert torch.equal(c.read("m.w"), shared)
        assert "step 12" in repr(c)


def test_values_are_listed_by_path() -> None:
    """Values are listed under their paths in Python syntax."""
    uri = saved({"optim": {"lr": 0.5, "betas": (0.9, None)}, 3: {None: "x"}, "t": torch.ones(1)})
    with holdfast.open(uri) as c:
        assert dict(c.values()) == {
            'state["optim"]["lr"]': 0.5, 'state["optim"]["betas"][0]': 0.9, 'state["optim"]["betas"][1]': None, "state[3][None]": "x",
        }  # fmt: skip


def test_the_step_is_taken_from_the_state_unless_given() -> None:
    """``state["step"]`` if it is an int."""
    for state, step, expected in (
        ({"step": 5}, None, 5),
        ({"step": 5}, 6, 6),
        ({"step": 5.0}, None, None),
        ({}, None, None),
        ([5], None, None),
    ):
        uri = fresh_uri()
        holdfast.save(uri, state, step=step)
        with holdfast.open(uri) as c:
            assert c.step == expected


def test_a_checkpoint_replaced_after_it_was_opened_says_so() -> None:
    """A read from a replaced checkpoint raises ReplacedError, not DamagedError."""
    uri = saved({"x": torch.ones(3)})
    with holdfast.open(uri) as c:
        holdfast.save(uri, {"x": torch.zeros(3)})
        with pytest.raises(holdfast.ReplacedError):
            c.read("x")


def state() -> dict[str, Any]:
    """Matrices, vectors, a scalar, and tied tensors."""
    embed = torch.arange(70.0).view(10, 7)
    layers = {
        str(i): {"q": torch.arange(24.0).view(6, 4) + i, "o": torch.arange(20).view(4, 5)}
        for i in range(3)
    }
    return {
        "model": {"embed": embed, "head": embed, "layers": layers, "scale": torch.tensor(2.0)},
        "step": 1,
    }


@pytest.mark.parametrize("budget_nbytes", [0, 200, 1 << 20])
def test_whole_tensors_come_in_the_order_of_the_state(budget_nbytes: int) -> None:
    """A share has all tensors, or the selected ones, and tied ones under each of their names."""
    with holdfast.open(saved(state())) as c:
        found = dict(c.read_shares(budget_nbytes=budget_nbytes))
        assert list(found) == list(c.tensors)
        expected = {name: c.read(name) for name in c.tensors}
        assert difference(expected, found) is None
        assert [name for name, _ in c.read_shares(["*.q"])] == [
            f"model.layers.{i}.q" for i in range(3)
        ]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_shares_are_those_of_torch_chunk(world: int) -> None:
    """Shares follow patterns or a function; tensors without a rule are whole on every rank."""
    rules = {"*.q": 0, "*.o": -1, "model.embed": 0}
    with holdfast.open(saved(state())) as c:
        for rank in range(world):
            for split in (
                rules,
                lambda name, shape: {"q": 0, "o": 1, "embed": 0}.get(name.split(".")[-1]),
            ):
                for name, tensor in c.read_shares(rank=rank, world=world, split=split):
                    whole = c.read(name)
                    dim = {"q": 0, "o": 1, "embed": 0}.get(name.split(".")[-1])
                    if dim is not None:
                        chunks = whole.chunk(world, dim)
                        whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
                    assert difference(whole, tensor) is None, (name, rank)


def test_new_names_decide_what_is_skipped_and_how_it_is_divided() -> None:
    """``skip`` and ``split`` see the names that ``rename`` gives, as an engine knows them."""
    rules = {"model.layers.*.q": "h.*.wq", "model.*": "*"}
    with holdfast.open(saved(state())) as c:
        found = dict(
            c.read_shares(
                "model",
                rename=rules,
                skip=lambda name: name in ("head", "scale") or name.startswith("h.1."),
                rank=1,
                world=2,
                split={"h.*.wq": 0},
            )
        )
        names = ["embed", "h.0.wq", "layers.0.o", "layers.1.o", "h.2.wq", "layers.2.o"]
        assert list(found) == names
        assert difference(c.read("model.layers.2.q", slice(3, 6)), found["h.2.wq"]) is None


def test_what_is_skipped_is_not_read(tmp_path: Path) -> None:
    """Damage in another rank's tensor is not noticed."""
    holdfast.save(tmp_path, {"mine": torch.zeros(1 << 16), "other": torch.zeros(1 << 16)})
    flip(image_in(tmp_path), (1 << 18) + (1 << 17))
    with holdfast.open(tmp_path) as c:
        found = dict(c.read_shares(skip=lambda name: name == "other"))
        assert found.keys() == {"mine"}
        with pytest.raises(holdfast.DamagedError, match="other"):
            list(c.read_shares())


def test_tied_tensors_are_read_once() -> None:
    """All of their names follow one another, wherever they are in the state, and share memory."""
    tied = torch.arange(70_000.0)
    uri = saved({"a": tied, "b": torch.zeros(90_000), "c": tied})
    with holdfast.open(uri) as c:
        found = list(c.read_shares(budget_nbytes=0))
        assert [name for name, _ in found] == ["a", "c", "b"]
        assert found[0][1].data_ptr() == found[1][1].data_ptr()
        assert difference(tied, found[1][1]) is None


def test_what_cannot_be_is_refused_at_once() -> None:
    """The error comes before any read."""
    with holdfast.open(saved(state())) as c:
        with pytest.raises(holdfast.UsageError, match="rank 2 is not one of 2"):
            c.read_shares(rank=2, world=2)
        with pytest.raises(
            holdfast.UsageError, match=r"'model\.scale' of shape \[\] has no dimension 0"
        ):
            c.read_shares(split={"*": 0})
        with pytest.raises(holdfast.UsageError, match="no tensor has a name like 'x'"):
            c.read_shares(["x"])
        with pytest.raises(holdfast.UsageError, match="would both be named 'x'"):
            c.read_shares(rename={"model.layers.*.q": "x"})


def network() -> nn.Sequential:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.fixture
def objects() -> dict[str, Any]:
    """Return the saved state, as objects."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    pair = (1, torch.arange(3))
    return {"model": model, "optim": [optimizer, {"lr": 0.1}], "pair": pair, "step": 3}


@pytest.fixture
def uri(tmp_path: Path, objects: dict[str, Any]) -> str:
    """Return the checkpoint of ``objects``."""
    holdfast.save(tmp_path / "c", objects)
    return str(tmp_path / "c")


def test_part_is_built(uri: str, objects: dict[str, Any]) -> None:
    """A part is a container, a value in a list, a tuple or a single tensor."""
    weights = objects["model"].state_dict()
    built = holdfast.load(uri, only="model")
    assert built.keys() == weights.keys()
    assert all(torch.equal(built[name], t) for name, t in weights.items())
    assert torch.equal(holdfast.load(uri, only="model.0.weight"), weights["0.weight"])
    assert holdfast.load(uri, only=("optim", 1)) == {"lr": 0.1}
    assert holdfast.load(uri, only="step") == 3
    first, second = holdfast.load(uri, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.read_tree("optim.1") == {"lr": 0.1}
        assert checkpoint.read_tree("pair")[1].tolist() == [0, 1, 2]
        assert checkpoint.read_tree().keys() == objects.keys()
        with pytest.raises(UsageError, match="no 'modell'"):
            checkpoint.read_tree("modell")


@pytest.mark.parametrize("only", ["model", ("model",)])
def test_object_is_filled_with_a_part(uri: str, objects: dict[str, Any], only: Only) -> None:
    """Names outside the part are no difference. A tuple is replaced, since it cannot be filled."""
    model = network()
    assert holdfast.load(uri, into=model, only=only) is model
    assert all(map(torch.equal, model.parameters(), objects["model"].parameters()))
    into = (0, torch.zeros(3, dtype=torch.int64))
    first, second = holdfast.load(uri, into=into, only="pair")
    assert (first, second.tolist()) == (1, [0, 1, 2])


def test_names_within_the_part_are_strict(uri: str, objects: dict[str, Any]) -> None:
    """Differences within the part count."""
    with pytest.raises(MismatchError) as caught:
        holdfast.load(uri, into=nn.Linear(2, 3, bias=False), only="model.0")
    assert [text.split("'")[1] for text in caught.value.differences] == ["model.0.bias"]
    with pytest.raises(MismatchError, match=r"model\.2"):
        holdfast.load(uri, into={"0.weight": torch.zeros(3, 2), "2": torch.ones(1)}, only="model")
    layer = nn.Linear(2, 3, bias=False)
    holdfast.load(uri, into=layer, only="model.0", strict="state")
    assert torch.equal(layer.weight, objects["model"][0].weight)


def test_part_does_not_include_names_with_the_same_prefix(tmp_path: Path) -> None:
    """``modeling`` is not part of ``model``."""
    holdfast.save(tmp_path / "c", {"model": {"w": torch.ones(3)}, "modeling": torch.ones(2)})
    into = {"w": torch.zeros(3)}
    holdfast.load(tmp_path / "c", into=into, only="model")
    assert into["w"].sum() == 3


def test_missing_part_is_named(uri: str) -> None:
    """The error lists the parts of the checkpoint."""
    with pytest.raises(UsageError, match=r"no 'modell'.*'model', 'optim', 'pair'"):
        holdfast.load(uri, only="modell")
    with pytest.raises(MismatchError, match="nothing of the state"):
        holdfast.load(uri, into=network(), only="modell")


@pytest.mark.parametrize("only", ["", "model.", (), ("",), "model.*", [], ["model", "step"]])
def test_anything_but_one_name_is_refused(uri: str, only: Any) -> None:
    """An empty name, a pattern or a list is refused before anything is read."""
    with pytest.raises(UsageError, match="only="):
        holdfast.load(uri, only=only)


DTYPES = [torch.bool, torch.int8, torch.uint64, torch.float8_e5m2, torch.bfloat16, torch.complex64]


def whats(report: holdfast.DiffReport) -> list[tuple[str, str]]:
    """Which tensors differ, and in what."""
    return [(t.name, t.what) for t in report.tensors]


def test_a_copy_is_equal_and_not_read() -> None:
    """Tensors with equal digests are equal, and are not read."""
    state = {"w": torch.randn(100, 100), "tied": torch.ones(3), "step": 3}
    a = saved(state)
    b = fresh_uri()
    holdfast.copy(a, b)
    flipped(storage_at(b), images(storage_at(b))[0], 5000)
    report = holdfast.diff(a, b)
    assert report.equal
    assert (report.equal_tensors, report.equal_by_digest, report.read_nbytes) == (2, 2, 0)


def test_every_kind_of_difference_is_named() -> None:
    """Diff names tensors of one side only and differences in shape, dtype and values."""
    same = torch.randn(1000)
    a = saved(
        {"same": same, "a": same, "v": torch.arange(4), "s": torch.ones(3, 2), "t": torch.ones(2)}
    )
    b = saved(
        {
            "same": same,
            "b": same,
            "v": torch.tensor([0, 1, 5, 0]),
            "s": torch.ones(2, 3),
            "t": torch.ones(2, dtype=torch.float64),
        }
    )
    report = holdfast.diff(a, b)
    assert not report.equal
    assert sorted(whats(report)) == [
        ("a", "only in a"), ("b", "only in b"), ("s", "shape"), ("t", "dtype"), ("v", "values")
    ]  # fmt: skip
    values = report.tensors[-1]
    assert (values.name, values.differing, values.max_abs) == ("v", 2, 3)
    assert report.equal_tensors == 1


def test_tensors_of_different_layouts_are_compared_by_their_values() -> None:
    """Tensors cut in rows, cut in columns and whole are compared by their elements."""
    array = np.arange(24.0).reshape(4, 6)
    by_rows = fresh_uri()
    save_cut(storage_at(by_rows), {"w": array}, {"w": [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]})
    by_columns = fresh_uri()
    columns = [Box((0, at), (4, 2)) for at in (0, 2, 4)]
    save_cut(storage_at(by_columns), {"w": array}, {"w": columns})
    for uri in (by_columns, saved({"w": torch.from_numpy(array)})):
        report = holdfast.diff(by_rows, uri)
        assert report.equal, report
        assert (report.equal_tensors, report.equal_by_digest) == (1, 0)
        assert report.read_nbytes == array.nbytes
    array[3, 5] += 0.5
    report = holdfast.diff(by_rows, saved({"w": torch.from_numpy(array)}))
    assert [(t.differing, t.max_abs) for t in report.tensors] == [(1, 0.5)]


def test_a_small_budget_is_enough(rng: np.random.Generator) -> None:
    """Diff compares a large tensor in windows, and reports it once."""
    big = random_bits(rng, torch.int16, (50_001,))
    wide = random_bits(rng, torch.complex128, (4_099,))
    other = big.clone()
    other[::7] ^= 1
    a = saved({"big": big, "wide": wide})
    report = holdfast.diff(a, saved({"big": other, "wide": wide}), budget_nbytes=1 << 16)
    assert [(t.name, t.differing, t.max_abs) for t in report.tensors] == [("big", 7143, 1)]
    assert report.equal_tensors == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_decide_in_every_dtype(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Equal bits are equal, NaNs too; other bits differ, with a distance if there is one."""
    tensor = random_bits(rng, dtype, (257,))
    a = saved({"x": tensor, "y": 1})
    assert holdfast.diff(a, saved({"y": 1, "x": tensor})).equal
    other = from_bytes(raw(tensor), dtype, (257,))  # a clone of a bool has other bits
    other[13] = 0
    other[14] = 1
    tensor[13] = 1
    tensor[14] = 1
    (found,) = holdfast.diff(saved({"x": tensor}), saved({"x": other})).tensors
    assert (found.differing, found.max_abs) == (1, 1)


def test_distances_that_float64_does_not_have() -> None:
    """Integers are subtracted exactly; NaN on one side gives NaN."""
    cases: list[tuple[str, list[Any], list[Any], float]] = [
        ("int64", [2**53], [2**53 + 1], 1),
        ("int64", [-(2**63)], [2**63 - 1], 2**64 - 1),
        ("int8", [-128], [127], 255),
        ("uint64", [0], [2**64 - 1], 2**64 - 1),
        ("float32", [0.0], [-0.0], 0),
        ("float32", [math.inf], [-math.inf], math.inf),
    ]
    for dtype, ours, theirs, expected in cases:
        a = np.array(ours, dtype)
        gap = gap_between(
            a.view(np.uint8), np.array(theirs, dtype).view(np.uint8), dtype, a.itemsize
        )
        assert (gap.differing, gap.max_abs) == (1, expected), dtype
    quiet, loud = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.uint8).reshape(2, 4)
    assert gap_between(quiet, loud, "float32", 4).max_abs == 0
    one = np.ones(1, np.float32).view(np.uint8)
    lone = gap_between(quiet, one, "float32", 4) + gap_between(one, one, "float32", 4)
    assert lone.differing == 1
    assert lone.max_abs is not None
    assert math.isnan(lone.max_abs)


def test_small_values_are_compared() -> None:
    """Diff compares values and containers by type too."""
    a = saved({"x": 1, "t": (1, 2), "o": OrderedDict(a=1), "e": {}, "same": "é", "only": None})
    b = saved({"x": 1.0, "t": [1, 2], "o": {"a": 1}, "same": "é"})
    report = holdfast.diff(a, b)
    assert {v.path: (v.a and v.a[0][1], v.b and v.b[0][1]) for v in report.values} == {
        'state["x"]': (1, 1.0),
        'type(state["t"])': ("tuple", "list"),
        'type(state["o"])': ("OrderedDict", None),
        'type(state["e"])': ("dict", None),
        'state["only"]': (None, None),
    }
    assert not report.tensors


def test_the_number_of_ranks_is_no_difference_and_their_own_tensors_are_compared() -> None:
    """Per-rank tensors are compared by rank."""
    one = fresh_uri()
    save_as_ranks(storage_at(one), [{"n": 1, "w": torch.ones(3)}])
    two = fresh_uri()
    save_as_ranks(storage_at(two), [{"n": 1, "w": torch.ones(3)}] * 2)
    assert holdfast.diff(one, two).equal
    own = fresh_uri()
    save_as_ranks(storage_at(own), [{"n": 1, "w": torch.ones(3)}, {"n": 2, "w": torch.zeros(3)}])
    report = holdfast.diff(one, own)
    assert [(t.name, t.rank, t.what, t.max_abs) for t in report.tensors] == [("w", 1, "values", 1)]
    assert [v.path for v in report.values] == ['state["n"]']


def test_tied_tensors_are_equal_to_separate_ones() -> None:
    """Diff ignores whether equal tensors share their storage."""
    tensor = torch.randn(10)
    a = saved({"a": tensor, "b": tensor})
    assert holdfast.diff(a, saved({"a": tensor, "b": tensor.clone()})).equal
    report = holdfast.diff(a, saved({"a": tensor, "b": tensor + 1}))
    assert whats(report) == [("b", "values")]


def test_damage_is_an_error_and_no_difference() -> None:
    """Diff raises DamagedError for damage in data that it must read."""
    a, b = (saved({"w": torch.full((10_000,), value)}) for value in (0.0, 1.0))
    flipped(storage_at(b), images(storage_at(b))[0], 5000)
    with pytest.raises(holdfast.DamagedError, match="not what was written"):
        holdfast.diff(a, b)


def test_the_command_says_whether_they_are_equal() -> None:
    """The command exits with 0 if equal, with 1 and a line per difference if not, with 2 on errors."""
    state = {"m": {"w": torch.zeros(2, 2), "b": torch.zeros(2)}, "step": 1}
    a = saved(state)
    assert run("diff", a, a).stdout == "equal: 2 tensors; 0 B of each side read\n"
    state["m"]["w"] = torch.tensor([[0, 0.25], [0, 0]])
    b = saved({**state, "step": 2, "new": torch.ones(1, dtype=torch.int8)})
    assert run("diff", a, b, status=1).stdout.splitlines() == [
        'value  state["step"]  1 | 2',
        "only in b  new  int8 [1]",
        "values  m.w  float32 [2×2]  1 of 4 elements, by up to 0.25",
        "different: 2 tensors and 1 value; 1 tensor equal; 24 B of each side read",
    ]
    run("diff", a, "memory://nothing-at-all", status=2)


def test_the_command_speaks_json() -> None:
    """The command prints one JSON document without NaN constants."""
    a = saved({"w": torch.zeros(2), "n": 1})
    b = saved({"w": torch.tensor([0.0, math.nan])})

    def refuse(constant: str) -> Callable[[], None]:
        raise AssertionError(constant)

    found = json.loads(run("diff", a, b, "--json", status=1).stdout, parse_constant=refuse)
    kind = {"dtype": "float32", "shape": [2]}
    assert found.pop("seconds") > 0
    assert found == {
        "a": a, "b": b, "equal": False, "equal_tensors": 0, "equal_by_digest": 0, "read_nbytes": 8,
        "tensors": [
            {"name": "w", "rank": None, "what": "values", "a": kind, "b": kind,
             "differing": 1, "max_abs": "nan"}
        ],
        "values": [{"path": 'state["n"]', "a": [{"ranks": [0], "value": 1}], "b": None}],
    }  # fmt: skip
