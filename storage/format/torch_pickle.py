"""Reads the pickle of a ``torch.save`` file as data: tensors, their keys and their storage.

Nothing is unpickled. The reader interprets only the opcodes that torch writes for dicts, lists,
tuples, small values and tensors, and builds only the types of this module. Names of functions and
classes stay names: the few for tensors and dicts are known here, all others are refused. No name is
ever looked up, imported or called.

Callers may allow further class names for a format of their own. Objects of those become a
:class:`Record`: a name and the arguments and state in the pickle.

Scope: plain tensors that ``torch.load(weights_only=True)`` reads; no sparse or quantized tensors.
Every argument of a function is either interpreted or must have its neutral value. Otherwise the
file is refused, by name.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...core.garbage import collector_paused

STORAGES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1), "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}  # fmt: skip
"""Element dtype and size per storage class."""
NEW_DTYPES = {
    "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "complex32": 4, **dict(STORAGES.values()),
}  # fmt: skip
"""Element size per dtype that a tensor may name."""
_TENSOR = "torch.Tensor"
_UNTYPED = "torch.storage.UntypedStorage"
_BITS = {"conj": "conjugate", "neg": "negative"}
"""Bits of a view whose values differ from the stored elements, by torch's names."""
_UINT8 = struct.Struct("<B")
_UINT16 = struct.Struct("<H")
_UINT32 = struct.Struct("<I")
_INT32 = struct.Struct("<i")
_FLOAT64 = struct.Struct(">d")
_MEMOIZE = 0x94
_GET = ord("h")
_GET_ANY = ord("j")
_SHORT_TEXT = 0x8C
_MARK_ITEMS = ord("(")
_BYTE = ord("K")
_STOP = ord(".")
_NODES_MAX = 2_000_000
_DEPTH_MAX = 200
_DIMS_MAX = 64
COUNT_MAX = 1 << 62
"""Limit of sizes and offsets."""

Value = object
Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """A global of the pickle."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
    """An object of a class that the caller allows: its constructor arguments and state."""

    name: str
    arguments: Values
    state: Value = None


@dataclass(frozen=True, slots=True)
class _Storage:
    """The storage of a tensor's elements. ``dtype`` is None for untyped storage."""

    key: str
    dtype: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose elements are in the record ``storage``, from element ``offset`` on.

    ``dtype`` is torch's name. ``bits`` names set view bits, such as the conjugate bit: if any is
    set, the values differ from the stored elements.
    """

    storage: str
    dtype: str
    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bits: tuple[str, ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are contiguous, in row-major order."""
        expected = 1
        if 0 in self.shape:
            return True
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


_MARK = object()


def no_record(name: str) -> bool:
    """Accept no class; see :func:`read_pickle`."""
    return False


@collector_paused()
def read_pickle(data: bytes, is_record: Callable[[str], bool] = no_record) -> Value:
    """Return the contents of the pickle: nested dicts, lists and tuples of tensors and small
    values.

    Objects whose class name satisfies ``is_record`` become records. Raises ValueError for anything
    else; the message names what is unknown.
    """
    try:
        return _Machine(data, is_record).run()
    except (IndexError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ValueError(f"the pickle is malformed: {error!r}") from error


class _Machine:
    """The stack machine of pickles, without the opcodes that could run code."""

    def __init__(self, data: bytes, is_record: Callable[[str], bool]) -> None:
        self._data = data
        self._is_record = is_record
        self._at = 0
        self._stack: list[Value] = []
        self._push = self._stack.append
        self._memo: dict[int, Value] = {}
        self._names: dict[str, Name] = {}

    def run(self) -> Value:
        """Execute the opcodes up to STOP.

        A model has a million opcodes, most of a few kinds. Those are handled inline: a call for
        each would take three times as long.
        """
        data = self._data
        memo = self._memo
        stack = self._stack
        push = self._push
        handlers = _HANDLERS
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _GET:
                push(memo[data[at]])
                at += 1
            elif code == _GET_ANY:
                push(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _SHORT_TEXT:
                begin = at + 1
                at = begin + data[at]
                push(data[begin:at].decode("utf-8", "surrogatepass"))
            elif code == _MARK_ITEMS:
                push(_MARK)
            elif code == _BYTE:
                push(data[at])
                at += 1
            elif code == _STOP:
                return stack.pop()
            else:
                self._at = at
                handlers[code](self)
                at = self._at

    def _take(self, nbytes: int) -> bytes:
        taken = self._data[self._at : self._at + nbytes]
        if len(taken) != nbytes:
            raise ValueError("the pickle is truncated")
        self._at += nbytes
        return taken

    def _unpack(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return number

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _to_mark(self) -> list[Value]:
        """Remove the topmost mark and the values above it; return the values."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                items = self._stack[at + 1 :]
                del self._stack[at:]
                return items
        raise ValueError("the pickle has no mark")

    def text(self, form: struct.Struct) -> None:
        self._push(self._take(self._unpack(form)).decode("utf-8", "surrogatepass"))

    def put(self, form: struct.Struct) -> None:
        self._memo[self._unpack(form)] = self._stack[-1]

    def name(self) -> None:
        self._push(self._known(f"{self._line()}.{self._line()}"))

    def stacked_name(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        self._push(self._known(f"{module}.{name}"))

    def _known(self, text: str) -> Name:
        name = self._names.get(text)
        if name is None:
            if not (_is_known(text) or self._is_record(text)):
                raise ValueError(
                    f"the pickle names {text}, which files of plain tensors do not need"
                )
            name = self._names[text] = Name(text)
        return name

    def tuple_of(self, count: int) -> None:
        items = self._stack[-count:]
        if len(items) != count or _MARK in items:
            raise ValueError("the pickle has too few values for a tuple")
        self._stack[-count:] = [tuple(items)]

    def append(self) -> None:
        item = self._stack.pop()
        _list_of(self._stack[-1]).append(item)

    def appends(self) -> None:
        items = self._to_mark()
        _list_of(self._stack[-1]).extend(items)

    def set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        _set_items(self._stack[-1], [key, value])

    def set_items(self) -> None:
        items = self._to_mark()
        _set_items(self._stack[-1], items)

    def reduce(self) -> None:
        arguments = self._stack.pop()
        function = self._stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("the pickle calls something that is not a function")
        maker = _MAKERS.get(function.text)
        if maker is not None:
            self._push(maker(*arguments))
        else:
            self._push(self._record(function, arguments))

    def _record(self, name: Name, arguments: Values) -> Record:
        if not self._is_record(name.text):
            raise ValueError(f"the pickle makes an object of {name.text}")
        return Record(name.text, arguments)

    def build(self) -> None:
        """Set the state of a record. For a dict, ``_metadata`` (versions in a module's state) is
        dropped."""
        state = self._stack.pop()
        item = self._stack[-1]
        if isinstance(item, Record):
            item.state = state
        elif not isinstance(item, OrderedDict) or not isinstance(state, dict):
            raise ValueError("the pickle sets attributes of something that is not a dict")
        elif others := state.keys() - {"_metadata"}:
            raise ValueError(f"a dict has an attribute {min(map(str, others))!r:.100}")


_Handler = Callable[[_Machine], object]
_OPCODES: dict[bytes, _Handler] = {
    b"\x80": lambda m: m._take(1),  # the protocol number: opcodes mean the same in all protocols
    b"\x95": lambda m: m._take(8),  # the length of a frame
    b"X": lambda m: m.text(_UINT32),
    b"U": lambda m: m.text(_UINT8),
    b"T": lambda m: m.text(_INT32),
    b"C": lambda m: m._push(m._take(m._unpack(_UINT8))),
    b"B": lambda m: m._push(m._take(m._unpack(_UINT32))),
    b"J": lambda m: m._push(m._unpack(_INT32)),
    b"M": lambda m: m._push(m._unpack(_UINT16)),
    b"\x8a": lambda m: m._push(int.from_bytes(m._take(m._unpack(_UINT8)), "little", signed=True)),
    b"G": lambda m: m._push(m._unpack(_FLOAT64)),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"q": lambda m: m.put(_UINT8),
    b"r": lambda m: m.put(_UINT32),
    b"c": _Machine.name,
    b"\x93": _Machine.stacked_name,
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"t": lambda m: m._push(tuple(m._to_mark())),
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"Q": lambda m: m._push(_storage_of(m._stack.pop())),
    b"R": _Machine.reduce,
    b"\x81": _Machine.reduce,  # a new object, without a call of its constructor
    b"b": _Machine.build,
}


def _refusal(code: bytes) -> _Handler:
    def refuse(machine: _Machine) -> None:
        raise ValueError(f"the pickle has the opcode {code!r}, which files of tensors do not use")

    return refuse


_HANDLERS = [_OPCODES.get(code, _refusal(code)) for code in (bytes([i]) for i in range(256))]


def _is_known(text: str) -> bool:
    module, _, name = text.rpartition(".")
    is_storage = (module == "torch" and name in STORAGES) or text == _UNTYPED
    is_dtype = module == "torch" and name in NEW_DTYPES
    return text in _MAKERS or is_storage or is_dtype or text == _TENSOR


_KEYS = (str, int, Record)


def _list_of(value: Value) -> list[Value]:
    if isinstance(value, Record):
        return []  # the items of an object are dropped
    if not isinstance(value, list):
        raise ValueError("the pickle appends to something that is not a list")
    return value


def _set_items(container: Value, items: list[Value]) -> None:
    if isinstance(container, Record):
        return  # the items of an object are dropped
    if not isinstance(container, dict) or len(items) % 2:
        raise ValueError("the pickle sets items of something that is not a dict")
    for key in items[::2]:
        if not isinstance(key, _KEYS):
            raise ValueError(f"a dict has a key of type {type(key).__name__}")
    container.update(zip(items[::2], items[1::2], strict=True))


def _storage_of(identity: Value) -> _Storage:
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("the pickle names a storage in an unknown way")
    _, kind, key, location, numel = identity
    if not (isinstance(kind, Name) and isinstance(key, str) and isinstance(location, str)):
        raise ValueError("the pickle names a storage in an unknown way")
    dtype = STORAGES.get(kind.text.removeprefix("torch."))
    if dtype is None and kind.text != _UNTYPED:
        raise ValueError(f"a storage is a {kind.text:.100}, which is not known")
    counts((numel,))  # only checked: the record's own size is used
    return _Storage(key, dtype)


def _tensor(
    storage: Value,
    offset: Value,
    shape: Value,
    strides: Value,
    requires_grad: Value,
    hooks: Value,
    *metadata: Value,
) -> StoredTensor:
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise ValueError("a tensor has a storage of unknown dtype")
    _check_no_autograd(requires_grad, hooks)
    (first,) = counts((offset,))
    lengths = counts(shape)
    steps = counts(strides)
    if len(lengths) != len(steps):
        raise ValueError("a tensor has an invalid shape")
    return StoredTensor(storage.key, *storage.dtype, first, lengths, steps, _bits(*metadata))


def _tensor_of_dtype(storage: Value, *arguments: Value) -> StoredTensor:
    """Return a tensor whose dtype is named by an argument, before the metadata."""
    name = dtype_in(arguments[5])
    if not isinstance(storage, _Storage) or name is None:
        raise ValueError("a tensor has an unknown dtype")
    typed = _Storage(storage.key, (name, NEW_DTYPES[name]))
    return _tensor(typed, *arguments[:5], *arguments[6:])


def dtype_in(value: Value) -> str | None:
    """Return torch's name of the dtype that ``value`` names; None if it names none."""
    name = value.text.removeprefix("torch.") if isinstance(value, Name) else ""
    return name if name in NEW_DTYPES else None


def _check_no_autograd(requires_grad: Value, hooks: Value) -> None:
    """Raise ValueError for backward hooks. ``requires_grad`` is ignored: checkpoints do not
    store it."""
    if type(requires_grad) is not bool:
        raise ValueError(f"requires_grad of a tensor is {requires_grad!r:.100}")
    if hooks is not None and (not isinstance(hooks, dict) or hooks):
        raise ValueError("a tensor has backward hooks")


def _bits(metadata: Value = None) -> tuple[str, ...]:
    """Return the names of the view bits set in a tensor's metadata."""
    if metadata is None:
        return ()
    if not isinstance(metadata, dict):
        raise ValueError("the metadata of a tensor is not a dict")
    for key, is_set in metadata.items():
        if key not in _BITS or type(is_set) is not bool:
            raise ValueError(f"a tensor has the metadata {key!r:.100}: {is_set!r:.100}")
    return tuple(_BITS[key] for key, is_set in metadata.items() if is_set)


def counts(value: Value) -> tuple[int, ...]:
    """Return a tuple of non-negative integers, such as a shape. Raises ValueError."""
    if not isinstance(value, tuple) or len(value) > _DIMS_MAX:
        raise ValueError("there is an invalid shape or offset")
    for number in value:
        if type(number) is not int or not 0 <= number < COUNT_MAX:
            raise ValueError("there is an invalid shape or offset")
    return tuple(value)


def _parameter(data: Value, requires_grad: Value, hooks: Value) -> Value:
    if not isinstance(data, StoredTensor):
        raise ValueError("a parameter is not a tensor")
    _check_no_autograd(requires_grad, hooks)
    return data


def _with_attributes(function: Value, kind: Value, arguments: Value, state: Value) -> Value:
    """Return a plain tensor that has attributes of its own. They are dropped, as in a save."""
    if not isinstance(kind, Name) or kind.text != _TENSOR:
        raise ValueError("a tensor with attributes is of a class of its own")
    if not isinstance(function, Name) or not isinstance(arguments, tuple):
        raise ValueError("a tensor with attributes is made in an unknown way")
    if function.text not in _TENSOR_MAKERS:
        raise ValueError(f"a tensor with attributes is made by {function.text:.100}")
    if not isinstance(state, dict):
        raise ValueError("a tensor has attributes in slots")
    return _TENSOR_MAKERS[function.text](*arguments)


def _dict(*arguments: Value) -> dict[Value, Value]:
    if arguments:
        raise ValueError("a dict has constructor arguments")
    return OrderedDict()


def _size(items: Value = ()) -> Value:
    import torch

    return torch.Size(counts(items))


def _bytes(text: Value, encoding: Value) -> bytes:
    """Decode bytes as written by protocols that have no opcode for them."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are written in an unknown way")
    return text.encode("latin1")


_TENSOR_MAKERS: dict[str, Callable[..., Value]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
}
_MAKERS: dict[str, Callable[..., Value]] = {
    **_TENSOR_MAKERS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "collections.OrderedDict": _dict,
    "torch.Size": _size,
    "_codecs.encode": _bytes,
}


def leaves(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield (path, leaf) for everything in nested dicts, lists and tuples; keys are joined by dots.

    A key that is a record is yielded with the path of its dict. Raises ValueError for a value that
    contains itself or exceeds the size limits.
    """
    pending: list[tuple[tuple[str, ...], Value]] = [((), value)]
    count = 0
    while pending:
        path, node = pending.pop()
        count += 1
        if count > _NODES_MAX or len(path) > _DEPTH_MAX:
            raise ValueError("the pickle contains itself, or far too much")
        if isinstance(node, dict):
            yield from ((".".join(path), key) for key in node if isinstance(key, Record))
            items = [(str(key), item) for key, item in node.items()]
        elif isinstance(node, list | tuple):
            items = [(str(i), item) for i, item in enumerate(node)]
        else:
            yield ".".join(path), node
            continue
        pending += [((*path, key), item) for key, item in reversed(items)]
