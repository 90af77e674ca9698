"""Imports of ``torch.save`` files: the tensors that torch loads, bit for bit, and nothing that a
pickle asks for."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bits import difference, fresh_uri, random_bits
from support.given import Serve
from support.importing import LAUGHS, Canary, imported, noted, objects_at

import holdfast
from holdfast.storage.format.torch_pickle import StoredTensor, leaves, read_pickle
from holdfast.storage.operations.conversion.archive_reader import (
    EarlierError,
    ZipError,
    ZipRecord,
    directory,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]  # fmt: skip


def test_tensors_are_imported(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors of every dtype and shape, and parameters, are named by their paths."""
    flat = {str(dtype): random_bits(rng, dtype, (51, 17)) for dtype in DTYPES}
    state = {
        "flat": flat,
        "module": torch.nn.Linear(30, 30).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "list": [torch.tensor(3.5), (torch.empty(0, 3),)],
        7: {},
    }
    torch.save(state, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {f"flat.{name}": tensor for name, tensor in loaded["flat"].items()}
    expected |= {f"module.{name}": tensor for name, tensor in loaded["module"].items()}
    expected |= {"parameter": loaded["parameter"].data}
    expected |= {"list.0": loaded["list"][0], "list.1.0": loaded["list"][1][0]}
    assert difference(expected, imported(tmp_path / "a.pt")) is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    """Values of all kinds are skipped if only tensors are selected, in every pickle protocol."""
    state = {
        "w": torch.ones(3),
        "v": [1, -1, 300, 70_000, 1 << 40, -(1 << 70), 0.5, "é", b"\xff", None, True],
    }
    torch.save(state, tmp_path / "a.pth", pickle_protocol=protocol)
    assert difference({"w": torch.ones(3)}, imported(tmp_path / "a.pth", only=["w"])) is None
    with pytest.raises(holdfast.UsageError, match=r"these are not tensors: 'v\.0', 'v\.1'"):
        imported(tmp_path / "a.pth")


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Equal tensors are tied; parts of one storage are separate tensors."""
    tensor = torch.arange(1000.0).reshape(10, 100)
    torch.save(
        {"a": tensor, "b": tensor, "c": tensor[2:5], "d": tensor.view(-1)}, tmp_path / "a.bin"
    )
    uri = fresh_uri()
    holdfast.import_(tmp_path / "a.bin", uri)
    with holdfast.open(uri) as c:
        assert {name: t.alias_of for name, t in c.tensors.items()} == {
            "a": None, "b": "a", "c": None, "d": None
        }  # fmt: skip
    expected = {"a": tensor, "b": tensor, "c": tensor[2:5], "d": tensor.view(-1)}
    assert difference(expected, holdfast.load(uri)) is None


def test_small_records_are_read_together(tmp_path: Path, serve: Serve) -> None:
    """Tens of thousands of small records share requests, also with a long directory."""
    state = {f"layers.{n}.a-rather-long-name": torch.full((1,), float(n)) for n in range(9000)}
    torch.save(state, tmp_path / "a.pt")
    uri, keys = noted(serve, tmp_path)
    assert difference(state, imported(f"{uri}/a.pt")) is None
    assert len(keys) < 30


def rewrite(path: Path, changed: Callable[[str, bytes], bytes | None]) -> Path:
    """Replace the records of a file, by name without the folder; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            data = changed(name.partition("/")[2], content)
            if data is not None:
                archive.writestr(name, data)
    return path


def hostile_pickles(trace: Path) -> dict[str, bytes]:
    """Return pickles that run code or exhaust memory when unpickled."""
    command = f"touch {trace}".encode()
    short = b"\x8c" + bytes([len(command)]) + command
    return {
        "posix.system": pickle.dumps({"w": Canary(trace)}, 2),
        "builtins.eval": b"\x80\x02cbuiltins\neval\n(X\x04\x00\x00\x001+1*tR.",
        "stacked": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + short + b"\x85R.",
        "opcode b'i'": b"(" + short + b"iposix\nsystem\n.",
        "opcode b'o'": b"\x80\x02(" + short + short + b"o.",
        "makes an object of": b"\x80\x02ctorch\nFloatStorage\n)\x81.",
        "opcode b'\\\\x82'": b"\x80\x02\x82\x01.",
        "torch.load": b"\x80\x02ctorch\nload\n" + short + b"\x85R.",
        "of a class of its own": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR.",
        "made in an unknown way": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(Nctorch\nTensor\nNNtR.",
        "not a function": b"\x80\x02" + short + short + b"\x85R.",
        "names torch._utils": b"\x80\x02ctorch._utils\n_rebuild_sparse_tensor\n.",
        "in an unknown way": b"\x80\x02" + short + b"Q.",
        "not a dict": b"\x80\x02ctorch\nFloatStorage\n}b.",
        "contains itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        "far too much": LAUGHS + b".",
        "truncated": b"\x80\x02X\xff\xff\xff\xff.",
        "no mark": b"\x80\x02t.",
        "key of type tuple": b"\x80\x02})K\x01s.",
    }


@pytest.mark.nightly(14)
@pytest.mark.parametrize("what", list(hostile_pickles(Path("x"))))
def test_hostile_pickle_is_refused(tmp_path: Path, what: str) -> None:
    """The error names the request of the pickle; nothing runs, and nothing is made."""
    trace = tmp_path / "trace"
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    hostile = hostile_pickles(trace)[what]
    file = rewrite(tmp_path / "a.pt", lambda name, data: hostile if name == "data.pkl" else data)
    uri = fresh_uri()
    message = {"stacked": "posix.system"}.get(what, what)
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        holdfast.import_(file, uri)
    assert not trace.exists()
    assert not objects_at(uri)
    if what == "posix.system":
        pickle.loads(hostile)
        assert trace.exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.nn.Linear(2, 2), "names torch.nn.modules.linear.Linear"),
        ({"t": torch.ones(2, 3).t()}, "tensor 't' is not contiguous"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "the same dotted path"),
        ({"m": torch.empty(2, device="meta")}, "_rebuild_meta_tensor_no_storage"),
        ({"c": torch.ones(2, dtype=torch.complex64).conj()}, "tensor 'c' .* conjugate bit"),
        ({"n": torch.ones(1, dtype=torch.complex64).conj().imag}, "tensor 'n' .* negative bit"),
    ],
    ids=str,
)  # fmt: skip
def test_other_than_plain_tensors_is_refused(tmp_path: Path, state: Any, message: str) -> None:
    """Modules, meta tensors, views and colliding names are refused by name."""
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(holdfast.UnsupportedFormatError, match=message):
        holdfast.import_(tmp_path / "a.pt", fresh_uri())


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.arguments = arguments
        self.function = function

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.function, self.arguments


def pickled(value: object, storage: tuple[object, ...]) -> bytes:
    """Return a pickle with ``storage`` in the place of an ellipsis."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return storage if value is ... else None

    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


STORAGE = ("storage", torch.FloatStorage, "0", "cpu", 3)
BYTES = ("storage", torch.UntypedStorage, "0", "cpu", 12)
V2 = (torch._utils._rebuild_tensor_v2, ..., 0, (3,), (1,), False, OrderedDict())
V3 = (torch._utils._rebuild_tensor_v3, ..., 0, (3,), (1,), False, OrderedDict(), torch.float32)
FROM_TYPE = torch._tensor._rebuild_from_type_v2  # type: ignore[attr-defined]
HOOKS = OrderedDict({1: 2})
PARAMETER = torch._utils._rebuild_parameter


def changed(call: tuple[Any, ...], at: int, value: object) -> Call:
    """Return the same call with another argument."""
    arguments = list(call)
    arguments[at : at + 1] = [value]
    return Call(*arguments)


@pytest.mark.parametrize(
    ("value", "storage"),
    [
        (Call(*V2), STORAGE),
        (Call(*V2, None), STORAGE),
        (Call(*V2, {"conj": False, "neg": False}), STORAGE),
        (changed(V2, 5, True), STORAGE),
        (changed(V2, 6, None), STORAGE),
        (Call(*V2), (*STORAGE[:3], "cuda:7", 3)),
        (Call(*V3), BYTES),
        (Call(*V3, {}), BYTES),
        (Call(PARAMETER, Call(*V2), True, OrderedDict()), STORAGE),
        (Call(FROM_TYPE, V2[0], torch.Tensor, V2[1:], {"note": 1}), STORAGE),
    ],
)
def test_neutral_arguments_are_accepted(value: object, storage: tuple[object, ...]) -> None:
    """Arguments that do not change the values lead to the same tensor."""
    expected = StoredTensor("0", "float32", 4, 0, (3,), (1,))
    assert read_pickle(pickled(value, storage)) == expected


@pytest.mark.parametrize(
    ("value", "storage", "message"),
    [
        (changed(V2, 1, None), STORAGE, "unknown dtype"),
        (changed(V2, 2, -1), STORAGE, "invalid shape"),
        (changed(V2, 3, [3]), STORAGE, "invalid shape"),
        (changed(V2, 4, (1, 1)), STORAGE, "invalid shape"),
        (changed(V2, 5, 1), STORAGE, "requires_grad of a tensor is 1"),
        (changed(V2, 6, HOOKS), STORAGE, "backward hooks"),
        (Call(*V2, {"wired": False}), STORAGE, "the metadata 'wired'"),
        (Call(*V2, {"conj": 1}), STORAGE, "the metadata 'conj'"),
        (Call(*V2, True), STORAGE, "metadata of a tensor is not a dict"),
        (Call(*V2, None, None), STORAGE, "malformed"),
        (Call(*V2), BYTES, "unknown dtype"),
        (Call(*V3[:-1], 7), BYTES, "unknown dtype"),
        (changed(V3, 6, HOOKS), BYTES, "backward hooks"),
        (Call(*V3, {"wired": True}), BYTES, "the metadata 'wired'"),
        (Call(*V3, {}, None), BYTES, "malformed"),
        (Call(PARAMETER, 7, True, None), STORAGE, "a parameter is not a tensor"),
        (Call(PARAMETER, Call(*V2), 7, None), STORAGE, "requires_grad of a tensor is 7"),
        (Call(PARAMETER, Call(*V2), True, HOOKS), STORAGE, "backward hooks"),
        (Call(PARAMETER, Call(*V2), True, None, {}), STORAGE, "malformed"),
        (Call(torch._utils._rebuild_qtensor), STORAGE, "_rebuild_qtensor"),
        (Call(FROM_TYPE, V2[0], torch.nn.Parameter, V2[1:], {}), STORAGE, "names torch.nn.param"),
        (Call(FROM_TYPE, V2[0], torch.Tensor, V2[1:], ({}, {"a": 1})), STORAGE, "in slots"),
        (Call(FROM_TYPE, OrderedDict, torch.Tensor, (), {}), STORAGE, "made by collections.Ord"),
        (Call(OrderedDict, [("a", 1)]), STORAGE, "a dict has constructor arguments"),
        (Call(torch.Size, (-1,)), STORAGE, "invalid shape"),
        (Call(V2[0]), ("view", *STORAGE[1:]), "malformed"),
        (..., ("view", *STORAGE[1:]), "a storage in an unknown way"),
        (..., (*STORAGE, None), "a storage in an unknown way"),
        (..., ("storage", 7, *STORAGE[2:]), "a storage in an unknown way"),
        (..., ("storage", torch.Tensor, *STORAGE[2:]), "a storage is a torch.Tensor"),
        (..., (*STORAGE[:2], 0, "cpu", 3), "a storage in an unknown way"),
        (..., (*STORAGE[:3], None, 3), "a storage in an unknown way"),
        (..., (*STORAGE[:4], -3), "invalid shape"),
    ],
)  # fmt: skip
def test_unknown_arguments_are_refused(
    value: object, storage: tuple[object, ...], message: str
) -> None:
    """An argument that is not understood is named: ignoring it would make another tensor."""
    with pytest.raises(ValueError, match=message):
        read_pickle(pickled(value, storage))


def test_attributes_of_dicts() -> None:
    """An OrderedDict keeps its type, and may have the versions of modules only."""
    versions = OrderedDict(a=1)
    versions._metadata = OrderedDict()  # type: ignore[attr-defined]
    read = read_pickle(pickle.dumps(versions, 2))
    assert type(read) is OrderedDict
    assert read == {"a": 1}
    versions.note = "mine"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a dict has an attribute 'note'"):
        read_pickle(pickle.dumps(versions, 2))


def test_format_before_1_6_is_refused(tmp_path: Path) -> None:
    """A pickle without a zip file, and an empty file, are refused."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "b.pt").write_bytes(b"")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(holdfast.UnsupportedFormatError, match=r"since version 1\.6"):
            holdfast.import_(tmp_path / name, fresh_uri())


def test_cut_file_is_damage(tmp_path: Path) -> None:
    """Without its end a file has no directory."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for nbytes in (5, 1000, len(data) - 1):
        (tmp_path / "a.pt").write_bytes(data[:nbytes])
        with pytest.raises(holdfast.DamagedError, match="not a complete zip file"):
            holdfast.import_(tmp_path / "a.pt", fresh_uri())


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("larger than its record", lambda data: data[:-1]),
        ("no record 'data/0'", lambda data: None),
    ],
)
def test_short_or_missing_record_is_damage(
    tmp_path: Path, message: str, change: Callable[[bytes], bytes | None]
) -> None:
    """A tensor's elements must be in its record, whatever shape it claims."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", lambda name, data: change(data) if name == "data/0" else data)
    with pytest.raises(holdfast.DamagedError, match=message):
        imported(tmp_path / "a.pt")


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_compressed_record_is_refused(tmp_path: Path, record: str) -> None:
    """A compressed record is not damage: torch reads it."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, data in records.items():
            packs = name.partition("/")[2] == record
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if packs else zipfile.ZIP_STORED)
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], torch.ones(1000))
    with pytest.raises(holdfast.UnsupportedFormatError, match=f"'{record}' is compressed"):
        holdfast.import_(tmp_path / "b.pt", fresh_uri())


def small_file() -> bytes:
    """Return a file of torch.save."""
    into = io.BytesIO()
    torch.save({"w": torch.ones(4), "l": [torch.zeros(2, dtype=torch.int8)], "n": 1}, into)
    return into.getvalue()


SMALL = small_file()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_damage_ends_well(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """Any damage is an error of ours, or leaves a checkpoint."""
    data = bytearray(SMALL)
    for at, byte in changes:
        data[at] = byte
    (tmp_path / "a.pt").write_bytes(data)
    with contextlib.suppress(holdfast.HoldfastError):
        imported(tmp_path / "a.pt")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_pickle_is_read_or_refused(tail: bytes, keep: int) -> None:
    """Any bytes are read or refused, and make only known types."""
    with zipfile.ZipFile(io.BytesIO(SMALL)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        data = archive.read(name)
    try:
        found = list(leaves(read_pickle(data[:keep] + tail)))
    except ValueError:
        return
    known = (StoredTensor, str, int, float, bytes, bool, type(None))
    for _, value in found:
        assert isinstance(value, known) or type(value).__module__.endswith("torch_pickle")


def zipped(contents: dict[str, bytes], comment: bytes = b"") -> bytes:
    """Return a zip file with these records in a folder."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        archive.comment = comment
        for name, content in contents.items():
            archive.writestr(f"folder/{name}", content)
    return into.getvalue()


TWO_RECORDS = zipped({"data.pkl": b"pickle", "data/0": bytes(100)})


@pytest.mark.nightly(4)
@pytest.mark.parametrize(("count", "comment"), [(0, b""), (3, b"a comment"), (66_000, b"")])
def test_records_are_where_zipfile_finds_them(count: int, comment: bytes) -> None:
    """The archive may have more records than 16 bits can count, or a comment at its end."""
    data = zipped({f"data/{number}": bytes(number % 7) for number in range(count)}, comment)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = {
            info.filename.removeprefix("folder/"): ZipRecord(
                info.header_offset, info.file_size, is_stored=True
            )
            for info in archive.infolist()
        }
        assert (expected, archive.start_dir) == directory(data, 0)


def test_what_is_not_stored_as_it_is_says_so() -> None:
    """Compressed records, and encrypted ones."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/data/0", bytes(1000))
    records, _ = directory(into.getvalue(), 0)
    assert not records["data/0"].is_stored
    _, start = directory(TWO_RECORDS, 0)
    encrypted = bytearray(TWO_RECORDS)
    encrypted[start + 8] |= 1
    records, _ = directory(bytes(encrypted), 0)
    assert [record.is_stored for record in records.values()] == [False, True]


def test_numbers_of_64_bits() -> None:
    """Sizes and places beyond 4 GiB are in the extra field, behind other fields or not."""
    full = 0xFFFF_FFFF
    size = 5 << 30
    extra = struct.pack("<HHI", 0x5455, 4, 0) + struct.pack("<HH3Q", 1, 24, size, size, 2 << 30)
    entry = struct.pack(
        "<4s4xHH8xIIHHH8xI", b"PK\x01\x02", 0, 0, full, full, 3, len(extra), 0, full
    )
    entry += b"f/a" + extra
    end = struct.pack("<4s8xII2x", b"PK\x05\x06", len(entry), 3 << 30)
    with pytest.raises(ZipError, match="not in it"):
        directory(entry + end, 0)
    records, _ = directory(entry + end, 3 << 30)
    assert records == {"a": ZipRecord(2 << 30, size, is_stored=True)}
    with pytest.raises(ZipError, match="not in it"):
        directory(
            entry.replace(struct.pack("<HH", 1, 24), struct.pack("<HH", 2, 24)) + end, 3 << 30
        )


def test_what_was_not_read_is_asked_for() -> None:
    """The whole directory."""
    _, start = directory(TWO_RECORDS, 0)
    with pytest.raises(EarlierError) as raised:
        directory(TWO_RECORDS[start + 1 :], start + 1)
    assert raised.value.start == start
