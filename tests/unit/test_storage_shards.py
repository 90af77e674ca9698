"""Shards, several parts of a tensor per rank, and tensors that consist of other tensors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri, saved
from support.drivers import storage_at
from support.ranks import load_as_ranks, save_as_ranks, saved_as_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast import Shard
from holdfast.storage.state.flattening.flatten import flatten

WHOLE = torch.arange(60.0).reshape(3, 4, 5)


def flat(start: int, stop: int, whole: torch.Tensor = WHOLE) -> Shard:
    """Return a range of a tensor."""
    part = whole.reshape(-1)[start:stop].clone()
    return Shard(part, shape=whole.shape, flat=(start, stop))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard(torch.ones(2), shape=(2,)), "a box or a flat range"),
        (lambda: Shard(torch.ones(3), shape=(2, 1), flat=(0, 3)), "not a range of the 2 elements"),
        (lambda: Shard(torch.ones(1), shape=(2,), flat=(-1, 0)), "not a range"),
        (lambda: Shard(torch.ones(4), shape=(2, 3), flat=(0, 3)), "3 elements, and the tensor"),
        (lambda: Shard(torch.ones(3, 1), shape=(2, 3), flat=(0, 3)), r"shape \[3, 1\].*view"),
        (lambda: Shard(torch.ones(2, 3), shape=(4, 3), offset=(3, 0)), "sticks out"),
        (lambda: Shard(torch.ones(2), shape=(4, 3), offset=(0,)), "numbers of dimensions differ"),
        (lambda: Shard(torch.ones(0), shape=(-1,), flat=(0, 0)), r"of shape \[-1\]"),
        (lambda: Shard([1.0], shape=(1,), flat=(0, 1)), "a Shard of a list"),
        (
            lambda: holdfast.mark_part(nn.Parameter(torch.ones(2)), shape=(3,), offset=(2,)),
            "sticks out",
        ),
    ],
)
def test_what_is_no_part_is_refused_where_it_is_made(make: Callable[[], Any], text: str) -> None:
    """The error says what is wrong, and what to pass instead."""
    with pytest.raises(holdfast.UsageError, match=text):
        make()


def test_a_range_stands_anywhere_in_a_state() -> None:
    """Shards may stand anywhere in a state; loads without shards give whole tensors."""
    uri = fresh_uri()
    state = {"a": [flat(0, 60), (1, {"b": flat(0, 60)})], "c": torch.ones(2), "d": 3}
    holdfast.save(uri, state)
    expected = {"a": [WHOLE, (1, {"b": WHOLE})], "c": torch.ones(2), "d": 3}
    assert difference(expected, holdfast.load(uri)) is None
    into = {"a": [flat(7, 8), (0, {"b": flat(5, 49)})], "c": torch.zeros(2), "d": 0}
    for part in (into["a"][0], into["a"][1][1]["b"]):  # type: ignore[index]
        part.tensor.zero_()
    assert holdfast.load(uri, into=into) is into
    first, (value, second) = into["a"]  # type: ignore[misc]
    assert first.tensor.tolist() == [7.0]
    assert second["b"].tensor.tolist() == list(range(5, 49))
    assert (value, into["d"]) == (1, 3)


class Experts(nn.Module):
    """A module with two of four experts, and a tensor that all groups of ranks have."""

    def __init__(self, first: int, fill: float = 0.0) -> None:
        super().__init__()
        self.first = first
        self.experts = nn.Parameter(torch.full((2, 3), fill) + first)
        self.alias = self.experts
        self.router = nn.Parameter(torch.full((3,), fill))

    def mark(self) -> Experts:
        """Mark the experts."""
        holdfast.mark_part(self.experts, shape=(4, 3), offset=(self.first, 0))
        return self


def test_marked_parameters_of_all_ranks_make_up_one_tensor() -> None:
    """A mark covers all names of a parameter, wherever the module is. Others stay whole."""
    driver = saved_as_ranks([{"m": [Experts(first, 5.0).mark()]} for first in (0, 2)])
    (whole,) = load_as_ranks(driver, [{"m": [{"experts": torch.zeros(4, 3)}]}], strict="state")
    assert whole["m"][0]["experts"][:, 0].tolist() == [5, 5, 7, 7]
    into = Experts(1).mark()
    load_as_ranks(driver, [{"m": [into]}])
    assert into.experts[:, 0].tolist() == [5, 7]
    assert into.router.tolist() == [5, 5, 5]
    assert into.alias is into.experts


def test_a_mark_that_comes_after_a_save_is_in_force() -> None:
    """The next save of the same state is one of a part, which lacks the rest."""
    module = Experts(0)
    state = {"m": module}
    holdfast.save(fresh_uri(), state)
    module.mark()
    with pytest.raises(holdfast.CoverageError, match=r"2:4,0:3\] is missing"):
        holdfast.save(fresh_uri(), state)


def test_state_that_no_part_describes_is_refused() -> None:
    """Adafactor keeps sums of rows and columns, which are not elements of the whole tensor."""
    module = Experts(0).mark()
    optimizer = torch.optim.Adafactor(module.parameters())
    module.experts.grad = torch.ones(2, 3)
    optimizer.step()
    with pytest.raises(holdfast.StateError, match=r'"experts".*in holdfast\.mark_part'):
        holdfast.save(fresh_uri(), {"m": module, "o": optimizer})


def test_elements_of_a_range_may_lie_apart() -> None:
    """Values between the elements are neither saved nor changed."""
    uri = fresh_uri()
    rows = torch.stack([torch.arange(44.0), torch.full((44,), -1.0)], dim=1)
    part = Shard(rows[:, 0], shape=WHOLE.shape, flat=(5, 49))
    driver = storage_at(uri)
    save_as_ranks(driver, [{"w": flat(0, 5)}, {"w": part}, {"w": flat(49, 60)}])
    filled = torch.full((44, 3), -2.0)
    holdfast.load(uri, into={"w": Shard(filled[:, 1], shape=WHOLE.shape, flat=(5, 49))})
    assert filled[:, 1].tolist() == list(range(44))
    assert set(filled[:, 0].tolist() + filled[:, 2].tolist()) == {-2.0}


def test_a_part_that_cannot_be_filled_is_named() -> None:
    """The error comes before any read: for shared memory, another shape, or another dtype."""
    uri = saved({"w": flat(0, 60)})
    shared = torch.zeros(1).expand(60)
    for part, text in (
        (Shard(shared, shape=(3, 4, 5), flat=(0, 60)), r'state\["w"\].*share memory'),
        (
            Shard(torch.zeros(2), shape=(60,), flat=(0, 2)),
            r"shape \[3, 4, 5\].*\[60\] in the state",
        ),
        (Shard(torch.zeros(2).int(), shape=(3, 4, 5), flat=(0, 2)), "dtype float32"),
    ):
        with pytest.raises(holdfast.MismatchError, match=text):
            holdfast.load(uri, into={"w": part})


class Fused:
    """A custom optimizer that keeps the moments of all parameters in one flat buffer."""

    def __init__(self, fill: float) -> None:
        self.buffer = torch.arange(70.0) * fill
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return moments by parameter, each a range of the buffer."""
        return {
            "w": Shard(self.buffer[:60], shape=(3, 4, 5), flat=(0, 60)),
            "b": Shard(self.buffer[60:], shape=(10,), flat=(0, 10)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


def test_objects_may_give_parts() -> None:
    """The parts in an object's state are filled in place, and the object gets them back."""
    uri = saved({"optim": Fused(1.0)})
    other = Fused(0.0)
    holdfast.load(uri, into={"optim": other})
    assert torch.equal(other.buffer, torch.arange(70.0))
    assert isinstance(other.given["w"], Shard)
    expected = {"w": WHOLE, "b": torch.arange(60.0, 70)}
    assert difference(expected, holdfast.load(uri, only="optim")) is None


def test_a_state_of_parts_is_recognised() -> None:
    """A second save of the same layout need not be planned; other ranges are another layout."""
    first, again, other = (
        flatten({"w": flat(0, stop), "v": flat(stop, 60)}).layout_id for stop in (20, 20, 21)
    )
    assert first is not None
    assert first is again
    assert first is not other


def test_ranks_that_hold_the_same_part_are_replicas() -> None:
    """Data of two ranks is stored once, and each of them writes a share of it."""
    uri = fresh_uri()
    driver = storage_at(uri)
    whole = torch.arange(40_000.0).reshape(200, 200)
    ranges = [(0, 15_050), (15_050, 40_000), (0, 15_050), (15_050, 40_000)]
    save_as_ranks(driver, [{"w": flat(*ends, whole)} for ends in ranges])
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(checkpoint.read("w"), whole)
        headers_nbytes = 3 * 4096
        for rank, nbytes in checkpoint.images.items():
            start, stop = ranges[rank]
            assert nbytes < 0.55 * (stop - start) * 4 + headers_nbytes
        assert sorted(checkpoint.images) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([flat(0, 30), flat(31, 60)], holdfast.CoverageError, "missing"),
        ([flat(0, 31), flat(30, 60)], holdfast.CoverageError, "stored twice"),
        ([flat(0, 60), flat(0, 60, -WHOLE)], holdfast.SaveError, r"different values of 'w\[flat"),
        ([flat(0, 30), flat(30, 60, WHOLE.double())], holdfast.SaveError, "'w' has another.*dtype"),
        ([flat(0, 30), flat(30, 60, WHOLE.reshape(60))], holdfast.SaveError, "another shape"),
    ],
)
def test_ranks_that_disagree_are_told(
    parts: list[Shard], error: type[Exception], text: str
) -> None:
    """A gap, an overlap, replicas that differ, and other dtypes and shapes fail the save."""
    with pytest.raises(error, match=text):
        saved_as_ranks([{"w": part} for part in parts])


MATRIX = torch.arange(48.0).reshape(6, 8)
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]
"""Boxes as (offsets, sizes)."""


class Cut:
    """Boxes of a matrix, reported as DCP expects. ``shape``: the shape of the whole."""

    shape: tuple[int, ...] = (6, 8)

    def __init__(self, boxes: Boxes, whole: torch.Tensor = MATRIX) -> None:
        self.boxes = boxes
        self.parts = [
            whole[r : r + rows, c : c + columns].clone() for (r, c), (rows, columns) in boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [SimpleNamespace(offsets=offsets, sizes=sizes) for offsets, sizes in self.boxes]

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        properties = SimpleNamespace(dtype=torch.float32)
        return [
            SimpleNamespace(tensor_data=SimpleNamespace(size=self.shape, properties=properties))
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        (part,) = (
            part
            for part, (offsets, _) in zip(self.parts, self.boxes, strict=True)
            if offsets == tuple(index.offset)
        )
        return part

    def is_right(self) -> bool:
        """Return whether each part equals its part of MATRIX."""
        expected = Cut(self.boxes).parts
        return all(map(torch.equal, self.parts, expected))


LEFT: Boxes = [((0, 0), (6, 2)), ((0, 6), (6, 2))]
MIDDLE: Boxes = [((0, 2), (2, 4)), ((2, 2), (4, 4))]
ROWS: Boxes = [((0, 0), (1, 8)), ((5, 0), (1, 8))]
REST: Boxes = [((1, 0), (4, 8))]


def empty(boxes: Boxes) -> Cut:
    """Return parts to fill."""
    return Cut(boxes, torch.full((6, 8), -1.0))


def test_parts_go_to_any_other_layout_and_back() -> None:
    """Ranks with several boxes, or none, are loaded in place into any other layout."""
    driver = saved_as_ranks([{"a": [Cut(LEFT)]}, {"a": [Cut(MIDDLE)]}, {"a": [Cut([])]}])
    with holdfast.open(driver.uri) as checkpoint:
        assert torch.equal(checkpoint.read("a.0"), MATRIX)
    for layouts in ([ROWS, REST], [LEFT, MIDDLE, []], [LEFT + MIDDLE]):
        into = [{"a": [empty(boxes)]} for boxes in layouts]
        memory = [part.data_ptr() for state in into for part in state["a"][0].parts]
        load_as_ranks(driver, into)
        assert all(state["a"][0].is_right() for state in into)
        assert memory == [part.data_ptr() for state in into for part in state["a"][0].parts]
    plain = torch.zeros(6, 8)
    holdfast.load(driver.uri, into={"a": [plain]})
    assert torch.equal(plain, MATRIX)


class Silent(Cut):
    """Does not report the shape of the whole."""

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        return []


class Lying(Cut):
    """Reports another size than its parts have."""

    def __create_chunk_list__(self) -> list[Any]:
        return [
            SimpleNamespace(offsets=offsets, sizes=(rows - 1, columns))
            for offsets, (rows, columns) in self.boxes
        ]


def sticking_out() -> Cut:
    """Return parts that report a smaller matrix than they lie in."""
    cut = Cut(LEFT)
    cut.shape = (6, 7)
    return cut


@pytest.mark.parametrize(
    ("cut", "said"),
    [(Silent(LEFT), "0 shapes"), (Lying(LEFT), "part 0"), (sticking_out(), "sticks out")],
    ids=["silent", "lying", "sticking out"],
)
def test_hooks_that_do_not_fit_together_are_refused_by_path(cut: Cut, said: str) -> None:
    """A save and a load both fail."""
    uri = fresh_uri()
    for call in (lambda: holdfast.save(uri, {"w": cut}), lambda: holdfast.load(uri, {"w": cut})):
        with pytest.raises(holdfast.StateError, match=rf'state\["w"\].*{said}'):
            call()


class Rounding(enum.Enum):
    """The rounding of a number."""

    NEAREST = "nearest"
    DOWN = "down"


@dataclasses.dataclass(frozen=True)
class Block:
    """The number of columns that share a scale."""

    columns: int


class Scaled(torch.Tensor):
    """A matrix in small integers, with a scale for each row."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> Scaled:
        """Make an empty shell of that shape."""
        shape = codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> None:
        self.codes = codes
        self.scale = scale
        self.context = context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        """Fail: no load makes a new tensor."""
        raise AssertionError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Support the operations that a module and an optimizer need."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (of,) = args
            return cls(of.codes.detach(), of.scale.detach(), of.context)
        if func is torch.ops.aten.copy_.default:
            into, source, *_ = args
            into.codes.copy_(source.codes)
            into.scale.copy_(source.scale)
            return into
        if func is torch.ops.aten._to_copy.default:
            return args[0]
        raise NotImplementedError(func)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Owner:
    """An object whose state contains such a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.tensor], "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.given,) = state["inner"]


CONTEXT = {"block": Block(2), "rounding": Rounding.NEAREST, "sizes": [1, 2.5, None]}


def scaled(value: int, context: Any = None) -> Scaled:
    """Return a matrix with one value."""
    codes = torch.full((3, 4), value, dtype=torch.int8)
    return Scaled(codes, torch.full((3, 1), value / 2), CONTEXT if context is None else context)


def values(tensor: Any) -> tuple[float, float]:
    """Return one number of each inner tensor."""
    return tensor.codes[2, 3].item(), tensor.scale[2, 0].item()


def module(value: int, context: Any = None) -> nn.Module:
    """Return a module with a scaled parameter, a scaled buffer, and a plain parameter."""
    net = nn.Linear(4, 3)
    net.weight = nn.Parameter(scaled(value, context), requires_grad=False)
    net.register_buffer("table", scaled(value + 1, context))
    nn.init.constant_(net.bias, value)
    return net


def test_inner_tensors_are_stored_by_name() -> None:
    """A load without a target gives dicts; so does a load into dicts."""
    uri = saved({"m": module(3), "w": [scaled(5)]})
    with holdfast.open(uri) as checkpoint:
        assert set(checkpoint.tensors) == {
            *("m.weight.codes", "m.weight.scale", "m.table.codes", "m.table.scale"),
            *("m.bias", "w.0.codes", "w.0.scale"),
        }
    loaded = holdfast.load(uri)["w"][0]
    assert loaded["codes"].tolist() == scaled(5).codes.tolist()
    assert '"Rounding.NEAREST"' in loaded["__tensor_flatten__"]
    into = {"w": [{"codes": torch.zeros(3, 4, dtype=torch.int8), "scale": torch.zeros(3, 1)}]}
    holdfast.load(uri, into=into, strict="state")
    assert torch.equal(into["w"][0]["scale"], loaded["scale"])


@pytest.mark.parametrize("lazy", [False, True])
def test_a_tensor_that_is_there_is_filled(lazy: bool) -> None:
    """A load fills it in place, in a module and in a list; it makes no new tensors."""
    uri = fresh_uri()
    state = {"m": module(3), "w": [scaled(5)]}
    for _ in range(2):
        holdfast.async_save(uri, state, lazy=lazy).wait()
    into: Any = {"m": module(1), "w": [scaled(1)]}
    held = [into["m"].weight, into["m"].table, into["w"][0]]
    memory = [(each.codes.data_ptr(), each.scale.data_ptr()) for each in held]
    holdfast.load(uri, into=into)
    now = [into["m"].weight, into["m"].table, into["w"][0]]
    assert [id(each) for each in now] == [id(each) for each in held]
    assert memory == [(each.codes.data_ptr(), each.scale.data_ptr()) for each in held]
    assert [values(each) for each in held] == [(3, 1.5), (4, 2.0), (5, 2.5)]
    assert into["m"].bias.tolist() == [3.0] * 3


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [{"block": Block(4)}, {"rounding": Rounding.DOWN}])
@pytest.mark.parametrize("where", ["module", "list", "object"])
def test_a_tensor_of_another_kind_is_not_filled(
    where: str, other: dict[str, Any], strict: bool
) -> None:
    """Its inner tensors would have another meaning. The error names both kinds, and nothing is
    loaded."""
    uri = fresh_uri()
    tensor = scaled(1, CONTEXT | other)
    stored: dict[str, Any] = {
        "module": module(3),
        "list": [scaled(3)],
        "object": Owner(scaled(3)),
    }
    into: dict[str, Any] = {
        "module": module(1, CONTEXT | other),
        "list": [tensor],
        "object": Owner(tensor),
    }
    holdfast.save(uri, {"a": stored[where]})
    same = Owner(scaled(1))
    if where == "object":
        holdfast.load(uri, into={"a": same})
        assert same.given is same.tensor
        assert values(same.given) == (3, 1.5)
    with pytest.raises(holdfast.MismatchError, match=r"Block.*the checkpoint.*Block.*the state"):
        holdfast.load(uri, into={"a": into[where]}, strict=strict)
    assert values(tensor) == (1, 0.5)
    assert values(into["module"].weight) == (1, 0.5)


def test_tensors_within_tensors() -> None:
    """Tensors nest to any depth, also those of torch's own classes."""
    uri = fresh_uri()

    def nested(value: float) -> TwoTensor:
        inner = TwoTensor(torch.full((2,), value), torch.full((2,), value + 1))
        return TwoTensor(inner, torch.full((2,), value + 2))

    holdfast.save(uri, {"w": nested(1.0)})
    assert set(holdfast.load(uri)["w"]["a"]) == {"a", "b", "__tensor_flatten__"}
    into = nested(0.0)
    holdfast.load(uri, into={"w": into})
    assert (into.a.a[0].item(), into.a.b[0].item(), into.b[0].item()) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("stored", ["a", "b"])
@pytest.mark.parametrize("strict", [True, "state", False])
def test_a_tied_tensor_made_of_tensors_is_filled_by_either_name(stored: str, strict: Any) -> None:
    """Its inner tensors are tied. Its description is only required next to stored inner tensors."""
    uri, into = fresh_uri(), scaled(1)
    holdfast.save(uri, {stored: scaled(3)})
    holdfast.load(uri, into={"a": into, "b": into}, strict=strict)
    assert values(into) == values(scaled(3))
    with pytest.raises(holdfast.MismatchError, match=r"no tensor 'c\.codes'") as caught:
        holdfast.load(uri, into={stored: into, "c": scaled(1)})
    assert "'c.scale'" in str(caught.value)


def test_a_plain_tensor_is_not_loaded_into_one_that_is_made_of_tensors() -> None:
    """The reverse is also refused, because the names differ."""
    uri = fresh_uri()
    into = scaled(1)
    holdfast.save(uri, {"w": torch.ones(3, 4)})
    with pytest.raises(holdfast.MismatchError, match=r'state\["w"\]\["\w+"\]: no tensor'):
        holdfast.load(uri, into={"w": into})
    holdfast.save(uri, {"w": into})
    with pytest.raises(holdfast.MismatchError, match="no tensor 'w'"):
        holdfast.load(uri, into={"w": torch.ones(3, 4)})


def test_a_context_without_a_description_is_refused_by_path() -> None:
    """A function has no description, for example."""
    state = {"a": [scaled(1, {"round": max})]}
    for call in (lambda: holdfast.save(fresh_uri(), state), lambda: holdfast.load("/x", state)):
        with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[0\].*context'):
            call()


class Coarse(torch.optim.SGD):
    """Keeps a moment that consists of tensors, from its first step on."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = scaled(int(group["lr"]))


@pytest.mark.parametrize("named", [True, False])
def test_an_optimizer_that_has_stepped_gets_its_moments_back(named: bool) -> None:
    """An optimizer without a step has no such tensor, and a load makes none."""
    uri = fresh_uri()
    nets = [nn.Linear(4, 3, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    optims = [
        Coarse(net.parameters(), lr=lr) for net, lr in zip(nets, (3.0, 1.0, 1.0), strict=True)
    ]
    states = [
        {"net": net, "optim": optim} if named else {"optim": optim}
        for net, optim in zip(nets, optims, strict=True)
    ]
    optims[0].step()
    optims[1].step()
    holdfast.save(uri, states[0])
    moment = optims[1].state[nets[1].weight]["moment"]
    holdfast.load(uri, into=states[1])
    assert optims[1].state[nets[1].weight]["moment"] is moment
    assert values(moment) == (3, 1.5)
    with pytest.raises(holdfast.MismatchError, match=r"moment: a tensor made.*first step"):
        holdfast.load(uri, into=states[2])


def test_a_plain_moment_is_not_loaded_into_a_coarse_one() -> None:
    """An optimizer of another kind wrote the checkpoint."""
    net = nn.Linear(4, 3, bias=False)
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    plain.state[net.weight]["moment"] = torch.ones(3, 4)
    uri = saved({"optim": plain})
    coarse = Coarse(net.parameters(), lr=1.0)
    coarse.step()
    with pytest.raises(holdfast.MismatchError, match="moment: something other than a Scaled in"):
        holdfast.load(uri, into={"optim": coarse})
