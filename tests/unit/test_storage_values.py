"""Names, keys, containers and small values come back equal and of the same type."""

from __future__ import annotations

import math
from collections import ChainMap, OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri

import holdfast


def saved_and_loaded(state: Any) -> Any:
    """What a load builds of a saved state."""
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
    uri = fresh_uri()
    holdfast.save(uri, plain)
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
    """A writable array of any layout or subclass is a target like a tensor is."""
    uri = fresh_uri()
    holdfast.save(
        uri, {"a": np.arange(12.0).reshape(3, 4), "b": np.arange(3), "m": np.ones((1, 2))}
    )
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
    """Keys may be any text, also text that means something to paths and formats."""
    state = {
        "values": dict(zip(NAMES, range(len(NAMES)), strict=True)),
        "containers": {f"{name}~": {name: {"t": torch.tensor(i)}} for i, name in enumerate(NAMES)},
    }
    loaded = saved_and_loaded(state)
    assert difference(state, loaded) is None
    assert list(loaded["values"]) == NAMES
    uri = fresh_uri()
    holdfast.save(uri, {name: torch.tensor([i]) for i, name in enumerate(NAMES)})
    with holdfast.open(uri) as c:
        assert list(c.tensors) == NAMES
        assert [c.read(name).item() for name in NAMES] == list(range(len(NAMES)))


def test_keys_keep_their_type() -> None:
    """Dict keys may be text, numbers, booleans and None; each comes back as what it was."""
    keys = [0, 1, -7, 10**30, 1.5, -0.0 + 1e22, math.inf, None, "text"]
    state = {
        "tensors": {key: torch.tensor(i) for i, key in enumerate(keys)},
        "values": {**dict(zip(keys, range(len(keys)), strict=True)), "0": ("the text, not " "the number")},
        "containers": {key: {"t": torch.tensor(i), "v": i} for i, key in enumerate(keys)},
        "booleans": {True: torch.tensor(1), False: torch.tensor(0)}, "more": {True: 1, False: {}},
    }  # fmt: skip
    loaded = saved_and_loaded(state)
    assert difference(state, loaded) is None
    assert [type(key) for key in loaded["booleans"]] == [bool, bool]


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


class Marked(np.ndarray):
    """An array of a type of its own."""


class Keeping:
    """An object whose state has a value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        """The value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take another one."""
        self.value = state["value"]


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
}


@pytest.mark.parametrize("name", list(TYPES))
def test_a_type_that_would_be_lost_is_refused_by_name(name: str) -> None:
    """Wherever it is; default= says what is stored instead, and a load fills one that is there."""
    value, message = TYPES[name]
    for state in ({"v": value}, {"v": [{"w": value}]}, {"v": Keeping(value)}):
        with pytest.raises(holdfast.StateError, match=rf'"v"\].* {message}'):
            holdfast.save(fresh_uri(), state)
    uri = fresh_uri()
    holdfast.save(uri, {"v": value}, default=lambda _: "instead")
    assert holdfast.load(uri) == {"v": "instead"}


def test_a_container_of_another_type_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """By its type and place, since a load that builds the state makes a plain one."""
    marked = type("MarkedDict", (dict,), {})
    for _ in range(2):
        holdfast.save(fresh_uri(), {"a": {"b": marked(c=1)}, "d": marked()})
    said = [record.message for record in caplog.records if "MarkedDict" in record.message]
    assert len(said) == 1
    assert said[0].startswith('state["a"]["b"] is a ')
    assert said[0].endswith("makes a plain dict")


def test_deep_nesting_comes_back() -> None:
    """Two hundred containers in each other are no problem."""
    state: Any = {"t": torch.tensor(1), "v": 2}
    for i in range(200):
        state = {"d": state} if i % 2 else [state]
    assert difference(state, saved_and_loaded(state)) is None
