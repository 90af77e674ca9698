"""Names, keys, containers and values come back equal and of the same type, or are converted."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections import ChainMap, Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, saved
from support.wrapped import Given
from torch import nn
from torch.optim import lr_scheduler as schedules

import holdfast
from holdfast.storage.format.tree import Container, Tree, merge_trees


def saved_and_loaded(state: Any) -> Any:
    """Save a state; return the state that a load builds."""
    uri = fresh_uri()
    holdfast.save(uri, state, allow_empty=True)
    return holdfast.load(uri)


VALUES = {
    "none": None, "true": True, "5000 digits": -(10**5000), "minus zero": -0.0, "nan": math.nan, "text": "straße \U0001f600",
    "lone high surrogate": "\ud800", "both, not one character": "\ud83d\ude00", "bytes": bytes(range(256)),
    "bytearray": bytearray(b"\xff\0"), "complex nan": complex(math.nan, 1),
    "dtype": torch.bfloat16, "float8": torch.float8_e4m3fn, "device": torch.device("cuda:3"), "cpu": torch.device("cpu"),
    "size": torch.Size([2, 0, 3]), "no size": torch.Size([]),
    "np.float16 nan": np.float16(math.nan), "np.uint64": np.uint64(2**64 - 1), "np.bool": np.bool_(True),
    "np.str": np.str_("é\U0001f600"), "np.str empty": np.str_(""), "np.str nul at the end": np.str_("a\0"),
    "np.bytes": np.bytes_(b"ab"), "np.bytes empty": np.bytes_(b""), "np.bytes nul at the end": np.bytes_(b"a\0\0"),
    "like an encoding": {"$int": "0x10"}, "also like one": {"$type": 1, "$float": "nan"},
}  # fmt: skip


def test_values_come_back_equal_and_of_their_types() -> None:
    """Each kind of small value survives, in a dict, a list and a tuple, and replaces another."""
    state = {"a": VALUES, "b": [[value, (value,)] for value in VALUES.values()], "arrays": ARRAYS}
    assert difference(state, saved_and_loaded(state)) is None
    plain = {name: value for name, value in VALUES.items() if not isinstance(value, dict)}
    uri = saved(plain)
    into = dict.fromkeys(plain, "something else")
    holdfast.load(uri, into=into)
    assert difference(plain, into) is None


ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3), "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "reversed": np.arange(5)[::-1], "read-only": np.broadcast_to(np.int16(3), (2, 4)), "0-d": np.array(7), "bool": np.array([True]),
    "empty": np.zeros((0, 3), np.int8), "uint16": np.array([65535], np.uint16), "uint64": np.array([2**64 - 1], np.uint64),
    "complex": np.array([1j, -0.0]), "float16 nan": np.array([np.nan], np.float16),
}  # fmt: skip


def test_an_array_is_filled_in_place() -> None:
    """A writable array of any layout or subclass is a target, just as a tensor is."""
    uri = saved({"a": np.arange(12.0).reshape(3, 4), "b": np.arange(3), "m": np.ones((1, 2))})
    into = {
        "a": np.zeros((4, 3)).T,
        "b": np.zeros(6, np.int64)[::2],
        "m": np.zeros((1, 2)).view(np.matrix),
    }
    matrix = into["m"]
    assert holdfast.load(uri, into=into)["m"] is matrix
    assert into["a"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert into["b"].tolist() == [0, 1, 2]
    assert matrix.tolist() == [[1.0, 1.0]]


NAMES = [
    "", ".", "..", "/", "a/b", "../../etc/passwd", "/etc", "a.b", ".a", "a.", "0", "00", "-1", "1.5", "True", "None", "é\U0001f600",
    "\ud800", "\ud83d\ude00", "x" * 4096, " ", "\n", "\0", "\u2028", '"', "\\", "[0:1,0:2]", "w[0:1]", "w#2", "__metadata__",
    "__holdfast_blocks__", "checksum", "manifest.safetensors", "data", "con", "$int", "\x7f",
]  # fmt: skip


def test_names_are_kept_whatever_they_are() -> None:
    """Keys may be any text, even text with a meaning in paths and formats."""
    state = {
        "values": dict(zip(NAMES, range(len(NAMES)), strict=True)),
        "containers": {f"{name}~": {name: {"t": torch.tensor(i)}} for i, name in enumerate(NAMES)},
    }
    loaded = saved_and_loaded(state)
    assert difference(state, loaded) is None
    assert list(loaded["values"]) == NAMES
    uri = saved({name: torch.tensor([i]) for i, name in enumerate(NAMES)})
    with holdfast.open(uri) as c:
        assert list(c.tensors) == NAMES
        assert [c.read(name).item() for name in NAMES] == list(range(len(NAMES)))


def test_containers_keep_their_kind() -> None:
    """Dicts, lists and tuples come back as such; mappings of unknown types as dicts."""
    state = {
        "list": [], "tuple": (), "dict": {}, "nested": [[], [()], {"a": ({},)}], "mixed": [torch.tensor(0), 1, [torch.tensor(2)], (3,)],
        "long": [torch.tensor(i) if i % 2 else i for i in range(25)], "ordered": OrderedDict(b=1, a=torch.tensor(1)),
        "proxy": MappingProxyType({"a": 1}),
    }  # fmt: skip
    loaded = saved_and_loaded(state)
    assert difference(state, loaded) is None
    assert type(loaded["ordered"]) is OrderedDict
    assert type(loaded["proxy"]) is dict


class Phase(enum.Enum):
    """An enum in a state."""

    WARM_UP = "warm-up"
    DECAY = "decay"


@dataclasses.dataclass
class Progress:
    """A dataclass in a state."""

    phase: Phase
    seen: set[int]
    curve: torch.Tensor


Point = collections.namedtuple("Point", "x y")


class Marked(np.ndarray):
    """An array of a custom type."""


ARRAY = np.arange(2.0)
MAPS = ChainMap({"a": 1}, {"a": 2, "b": 3})
TYPES: dict[str, tuple[Any, str]] = {
    "matrix": (
        ARRAY.reshape(1, 2).view(np.matrix),
        "is a matrix, and would come back as a plain array",
    ),
    "recarray": (ARRAY.view(np.recarray), "is a recarray, and would come back"),
    "masked": (np.ma.array(ARRAY, mask=[0, 1]), "masked array, whose mask would be lost"),
    "subclass": (ARRAY.view(Marked), "is a Marked, and would come back"),
    "scalar": (np.zeros(()).view(Marked), "is a Marked, and would come back"),
    "chain": (MAPS, "is a ChainMap, whose dicts would be merged"),
    "texts": (np.array(["a", "b"]), "is an array of dtype <U1, which cannot be saved"),
    "objects": (np.array([None, 1]), "is an array of dtype object, which cannot be saved"),
    "set": ({1}, r"is a builtins\.set"),
    "enum": (Phase.DECAY, "is a .*Phase"),
    "path": (Path("a"), "is a pathlib"),
    "named tuple": (Point(1, 2), "is a Point"),
    "dataclass": (Progress(Phase.DECAY, set(), torch.ones(1)), "is a .*Progress"),
}


@pytest.mark.parametrize("name", list(TYPES))
def test_a_type_that_would_be_lost_is_refused_by_name(name: str) -> None:
    """This holds anywhere in a state. The error mentions default=, which stores a replacement."""
    value, message = TYPES[name]
    for state in ({"v": value}, {"v": [{"w": value}]}, {"v": Given({"value": value})}):
        with pytest.raises(holdfast.StateError, match=rf'"v"\].* {message}.*\. default= of a save'):
            holdfast.save(fresh_uri(), state)
    uri = fresh_uri()
    holdfast.save(uri, {"v": value}, default=lambda _: "instead")
    assert holdfast.load(uri) == {"v": "instead"}


def test_a_container_of_another_type_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning gives its type and place: a load that builds the state makes a plain one."""
    marked = type("MarkedDict", (dict,), {})
    for _ in range(2):
        holdfast.save(fresh_uri(), {"a": {"b": marked(c=1)}, "d": marked()})
    said = [record.message for record in caplog.records if "MarkedDict" in record.message]
    assert len(said) == 1
    assert said[0].startswith('state["a"]["b"] is a ')
    assert said[0].endswith("makes a plain dict")


def test_deep_nesting_comes_back() -> None:
    """Two hundred nested containers are no problem."""
    state: Any = {"t": torch.tensor(1), "v": 2}
    for i in range(200):
        state = {"d": state} if i % 2 else [state]
    assert difference(state, saved_and_loaded(state)) is None


def kinds(value: Any, path: str = "") -> dict[str, str]:
    """Return the type of everything in a nested state, by path."""
    found = {path: type(value).__qualname__}
    if isinstance(value, defaultdict):
        found[path] += f"({value.default_factory})"
    if isinstance(value, dict):
        for key, item in value.items():
            found |= kinds(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found |= kinds(item, f"{path}/{index}")
    return found


KINDS: dict[str, Any] = {
    "counter": Counter({2: 1, 4: 3}),
    "empty": Counter(),
    "ordered": OrderedDict(b=1, a=torch.tensor(1)),
    "lists": defaultdict(list, {"a": [1, (2,)], 3: []}),
    "counts": defaultdict(int, {"a": 1}),
    "none": defaultdict(None, {1: OrderedDict()}),
    "nested": [Counter("abca"), (OrderedDict({1: Counter()}),)],
    "plain": {"a": {}},
}


@pytest.mark.parametrize("other", [{}, KINDS], ids=["empty", "alike"])
def test_kinds_of_dicts_come_back(other: dict[str, Any]) -> None:
    """They come back in a built state, and in an object's state, whatever the object had before."""
    uri = fresh_uri()
    for _ in range(2):  # the second save recognises the layout of the first
        holdfast.save(uri, {"state": KINDS, "object": Given(KINDS)})
        built = holdfast.load(uri)
        assert kinds(built) == kinds({"state": KINDS, "object": KINDS})
        assert built["state"]["counter"] == KINDS["counter"]
        into = Given(dict(other))
        holdfast.load(uri, into={"object": into}, strict=False)
        assert kinds(into.state) == kinds(KINDS)
        assert difference(KINDS, into.state) is None
    into.state["lists"]["new"].append(1)


def optimizer() -> torch.optim.Optimizer:
    """Return an optimizer that schedulers can work with."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)


class Scale:
    """A callable object."""

    def __call__(self, step: int) -> float:
        return 0.9**step


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4]),
    "CyclicLR, an object": lambda o: schedules.CyclicLR(o, 0.1, 0.2, scale_fn=Scale()),
    "LambdaLR": lambda o: schedules.LambdaLR(o, Scale()),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.MultiStepLR(o, [2]), schedules.MultiStepLR(o, [5])], [3]
    ),
}


def stepped(scheduler: Any, optim: Any, steps: int) -> list[float]:
    """Return the learning rates of some steps."""
    rates = []
    for _ in range(steps):
        optim.step()
        scheduler.step()
        rates.append(optim.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_come_back_as_they_were(name: str) -> None:
    """Every type in their state is restored, and the next learning rates are the same."""
    optim, other = optimizer(), optimizer()
    scheduler, into = SCHEDULES[name](optim), SCHEDULES[name](other)
    stepped(scheduler, optim, 3)
    uri = saved({"optim": optim, "scheduler": scheduler})
    holdfast.load(uri, into={"optim": other, "scheduler": into})
    assert kinds(into.state_dict()) == kinds(scheduler.state_dict())
    assert stepped(into, other, 4) == stepped(scheduler, optim, 4)


class Own(dict[str, int]):
    """A custom dict."""


class OwnList(list[int]):
    """A custom list."""


@pytest.mark.parametrize(
    "value",
    [Own(a=1), OwnList([1]), defaultdict(lambda: 1), {1, 2}, namedtuple("Pair", "a b")(1, 2)],
    ids=["dict", "list", "factory", "set", "namedtuple"],
)
def test_a_type_that_an_object_would_not_get_back_is_refused(value: Any) -> None:
    """Refused in an object's state, by path; allowed in the user's own containers."""
    with pytest.raises(holdfast.StateError, match=r'state\["object"\]\["deep"\]\[0\] is a '):
        holdfast.save(fresh_uri(), {"object": Given({"deep": [value]})})
    if isinstance(value, dict | list):
        uri = fresh_uri()
        state = {"deep": [value]}
        holdfast.save(uri, state)
        assert holdfast.load(uri, into=state)["deep"][0] is value


def test_a_kind_of_a_later_release_is_a_dict() -> None:
    """Fields may contain more than this release knows; nothing is imported for them."""
    uri = fresh_uri()
    real = Tree.to_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "to_json", lambda self: real(self) | {"kinds": [[1, "os.system"]]})
        holdfast.save(uri, {"a": {"b": 1}})
    assert kinds(holdfast.load(uri)) == kinds({"a": {"b": 1}})


def test_ranks_that_disagree_on_a_kind_cannot_save() -> None:
    """One of them would get back another kind. Ranks that agree may differ in other containers."""
    trees = [
        Tree([Container(-1, None, "dict"), Container(0, key, "dict")]) for key in ("a", "b", "b")
    ]
    trees[1].kinds = {1: "Counter"}
    merged, _ = merge_trees(trees[:2])
    assert merged.kinds == {2: "Counter"}
    for order in (trees, trees[::-1]):
        with pytest.raises(
            holdfast.SaveError, match=r'state\["b"\] is a (Counter and a dict|dict and a Counter)'
        ):
            merge_trees(order)


def plain(value: Any) -> Any:
    """Convert values as a caller would."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, tuple):
        return value._asdict()
    raise TypeError("unknown kind")


def state() -> dict[str, Any]:
    """Return a nested state with a value of each kind."""
    progress = Progress(Phase.DECAY, {3, 1}, torch.arange(3.0))
    return {"at": [progress, Point(1, {"p": Path("a/b")})], "model": nn.Linear(2, 2), "n": 3}


def check(at: Any) -> None:
    """Fail unless the values equal those that ``plain`` returns."""
    at[0]["curve"] = at[0]["curve"].tolist()
    progress = {"phase": "DECAY", "seen": [1, 3], "curve": [0.0, 1.0, 2.0]}
    assert at == [progress, {"x": 1, "y": {"p": "a/b"}}]


@pytest.mark.parametrize("lazy", [False, True])
def test_returned_values_are_stored(lazy: bool, tmp_path: Path) -> None:
    """Values are converted at any depth, also within what the function has returned."""
    uri = fresh_uri()
    for _ in range(2):
        holdfast.async_save(uri, state(), lazy=lazy, default=plain).wait()
    check(holdfast.load(uri)["at"])
    into: dict[str, Any] = {
        "at": [{"phase": "", "seen": [0, 0], "curve": torch.zeros(3)}, {"x": 0, "y": {"p": ""}}],
        "model": nn.Linear(2, 2),
        "n": 0,
    }
    holdfast.load(uri, into=into)
    check(into["at"])
    with holdfast.Checkpointer(tmp_path, every=1, default=plain, lazy=lazy) as checkpointer:
        checkpointer.step(1, state())
    check(holdfast.load(tmp_path / "step-00000001")["at"])


def test_state_of_an_object_is_converted() -> None:
    """A load passes the converted values to the object's load_state_dict."""

    class Schedule:
        phase: object = Phase.WARM_UP

        def state_dict(self) -> dict[str, object]:
            return {"phase": self.phase}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.phase = Phase[str(state["phase"])]

    uri = fresh_uri()
    holdfast.save(uri, {"s": Schedule()}, default=plain)
    into = Schedule()
    into.phase = Phase.DECAY
    holdfast.load(uri, into={"s": into})
    assert into.phase is Phase.WARM_UP


def test_storable_values_are_not_converted() -> None:
    """The function is called once for each value that needs it."""
    asked = []

    def recorded(value: Any) -> Any:
        asked.append(value)
        return 0

    given = {"a": [1, None, 2.5, "x", b"y", torch.ones(1), nn.Linear(1, 1)], "b": {7}, "c": (1,)}
    holdfast.save(fresh_uri(), given, default=recorded)
    assert asked == [{7}]


@pytest.mark.parametrize(
    ("default", "said"),
    [
        (plain, "is a function, which can neither be saved nor.*unknown kind"),
        (lambda value: value, "function, which default.* has converted to a function"),
        (lambda value: {1}, "has converted to a set"),
        (lambda value: [value], "seem to be circular"),
        (None, "is a builtins.function"),
    ],
    ids=["type error", "itself", "another", "circular", "none"],
)
def test_unconverted_values_are_refused(default: Any, said: str) -> None:
    """A value that the function does not convert is refused by path, before any I/O."""
    with pytest.raises(holdfast.StateError, match=said) as caught:
        holdfast.save("memory://", {"a": [plain]}, default=default)
    assert caught.match(r'state\["a"\]\[0\]')


def test_other_errors_of_the_function_are_raised() -> None:
    """Errors of the function are not hidden."""

    def broken(value: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        holdfast.save("memory://", {"a": {1}}, default=broken)


def test_load_replaces_values_of_any_kind() -> None:
    """Stored replacements are loaded; a value that was not stored is a mismatch."""
    uri = fresh_uri()
    holdfast.save(uri, {"phase": Phase.DECAY}, default=plain)
    into: dict[str, Any] = {"phase": Phase.WARM_UP}
    holdfast.load(uri, into=into)
    assert into == {"phase": "DECAY"}
    into = {"phase": "", "seen": {1}}
    with pytest.raises(holdfast.MismatchError, match=r'state\["seen"\]: no such value'):
        holdfast.load(uri, into=into)
    holdfast.load(uri, into=into, strict=False)
    assert into == {"phase": "DECAY", "seen": {1}}
