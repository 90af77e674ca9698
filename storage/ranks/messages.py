"""Messages between ranks: dataclasses with a common encoding.

The wire format is one line of JSON, an array: the name of the message's class, then its fields in
order; trailing fields with default values are omitted. A field of bytes is represented by its
length, and its contents follow the line, so that digests and columns are sent unencoded.

The type annotation of a field determines how it is decoded: ``bool``, ``int``, ``float``, ``str``,
``bytes``, ``None``, enumerations, tuples, dicts with str keys, and dataclasses of such fields. Data
that does not match the expected message raises CoordinationError, so ranks that run different
versions of Holdfast get a clear error.

Scope: pure functions. ``team`` transports the messages.
"""

from __future__ import annotations

import enum
import functools
import io
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Generic, Protocol, TypeVar

from ...core.decoded_json import Json, list_in, object_in
from ...errors import CoordinationError

LEADER = 0
"""The rank that decides."""

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")


class Codec(Protocol[T]):
    """Converts values of one type to bytes and back. ``slow``: too slow for the event loop."""

    @property
    def slow(self) -> bool: ...

    def encode(self, message: T, /) -> bytes: ...

    def decode(self, data: bytes, what: str, /) -> T:
        """Decode the result of :meth:`encode`. ``what`` names the data in an error."""
        ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """An empty message."""


@dataclass(frozen=True, slots=True)
class Round(Generic[S, V]):
    """A round of a team: its name, the statement of each rank, and the leader's verdict."""

    name: str
    statement: Codec[S]
    verdict: Codec[V]

    @classmethod
    def of(cls, name: str, statement: type[S], verdict: type[V]) -> Round[S, V]:
        """Return a round with these message classes."""
        return Round(name, codec(statement), codec(verdict))

    def numbered(self, number: int) -> Round[S, V]:
        """Return this round with a number, for rounds held several times in a session."""
        return Round(f"{self.name}/{number}", self.statement, self.verdict)


class _Blobs(io.BytesIO):
    """The contents of a message's bytes fields, in order."""

    def take(self, nbytes: int) -> bytes:
        taken = self.read(nbytes)
        if len(taken) != nbytes:
            raise ValueError("a bytes field is truncated")
        return taken


@dataclass(frozen=True, slots=True)
class _Form:
    """How JSON becomes values of one type. ``scalars``: types that need no conversion."""

    read: Callable[[Json, _Blobs], object]
    scalars: frozenset[type] = frozenset()


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    form: _Form
    default: object


class _MessageCodec(Generic[T]):
    slow = False

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._name = kind.__name__
        self._fields = _fields_of(kind)

    def encode(self, message: T, /) -> bytes:
        blobs: list[bytes] = []

        def converted(value: object) -> object:
            """Convert a value that JSON does not have. The encoder asks in the order of fields."""
            if isinstance(value, bytes):
                blobs.append(value)
                return len(value)
            if isinstance(value, enum.Enum):
                return value.value
            return _sent_values(_fields_of(type(value)), value)

        encoder = json.JSONEncoder(separators=(",", ":"), default=converted)
        values = _sent_values(self._fields, message)
        line = encoder.encode([self._name, *values]).encode()
        if not blobs:
            return line
        return b"\n".join([line, b"".join(blobs)])

    def decode(self, data: bytes, what: str, /) -> T:
        line, _, rest = data.partition(b"\n")
        blobs = _Blobs(rest)
        try:
            values = list_in(_decoded(line.decode()), f"a {self._name}")
            if not values or values[0] != self._name:
                raise ValueError(f"it is not a {self._name}")
            del values[0]
            message = _read_fields(self._kind, self._fields, values, blobs)
            left = blobs.read()
            if left:
                raise ValueError(f"{len(left)} bytes belong to no field")
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CoordinationError(
                f"{what} cannot be understood: {error}",
                advice="Do all ranks run the same version of Holdfast?",
            ) from error
        return message


# json.loads spends more time on its options than on a short message.
_DECODER = json.JSONDecoder()


def _decoded(text: str) -> Json:
    value: Json
    value, end = _DECODER.raw_decode(text)
    if end != len(text):
        raise ValueError(f"{len(text) - end} characters are left over")
    return value


def codec(kind: type[T]) -> Codec[T]:
    """Return the codec of a message class."""
    return _MessageCodec(kind)


_known_fields: dict[type, list[_Field]] = {}


def _fields_of(kind: type) -> list[_Field]:
    known = _known_fields.get(kind)
    if known is None:
        types_of = typing.get_type_hints(kind)
        known = [_Field(f.name, _form_of(types_of[f.name]), _default_of(f)) for f in fields(kind)]
        _known_fields[kind] = known
    return known


def _default_of(field: Field[object]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _sent_values(known: list[_Field], message: object) -> list[object]:
    """Return the values of the fields, without those at the end that have their default."""
    values: list[object] = [getattr(message, field.name) for field in known]
    while values and values[-1] == known[len(values) - 1].default:
        values.pop()
    return values


def _read_fields(kind: type[T], known: list[_Field], values: list[Json], blobs: _Blobs) -> T:
    if len(values) > len(known):
        raise ValueError(f"a {kind.__name__} has {len(known)} fields")
    for field in known[len(values) :]:
        if field.default is MISSING:
            raise ValueError(f"a {kind.__name__} without its field {field.name!r}")
    return kind(
        *[
            value if type(value) in field.form.scalars else field.form.read(value, blobs)
            for field, value in zip(known, values, strict=False)
        ]
    )


@functools.cache
def _form_of(kind: object) -> _Form:
    """Return how to convert a field of this type."""
    if kind in (bool, int, str, float, type(None)):
        return _scalar({float, int} if kind is float else {kind})
    if kind is bytes:
        return _Form(_read_blob)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional([_form_of(argument) for argument in arguments], arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return _sequence(_form_of(arguments[0]))
    if origin is tuple:
        return _record([_form_of(argument) for argument in arguments])
    if origin is not None and issubclass(origin, Mapping) and arguments[0] is str:
        return _mapping(_form_of(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _Form(lambda value, blobs: kind(value))
    if isinstance(kind, type) and is_dataclass(kind):
        return _nested(kind)
    raise TypeError(f"a message cannot have a field of the type {kind}")


def _scalar(kinds: set[type]) -> _Form:
    allowed = frozenset(kinds)

    def read(value: Json, blobs: _Blobs) -> Json:
        if type(value) not in allowed:
            raise ValueError(f"{value!r:.100} is not {_names(allowed)}")
        return value

    return _Form(read, allowed)


def _read_blob(value: Json, blobs: _Blobs) -> bytes:
    if type(value) is not int:
        raise ValueError(f"{value!r:.100} is not a length")
    return blobs.take(value)


def _optional(forms: list[_Form], kinds: tuple[object, ...]) -> _Form:
    """Return the form of a union: of scalars, or of None and one other type."""
    if all(form.scalars for form in forms):
        return _scalar(set().union(*(form.scalars for form in forms)))
    others = [form for form, kind in zip(forms, kinds, strict=True) if kind is not type(None)]
    if len(others) != 1 or len(forms) != 2:
        raise TypeError("a field of a message has one type, or that and None")
    (other,) = others
    return _Form(lambda value, blobs: None if value is None else other.read(value, blobs))


def _sequence(item: _Form) -> _Form:
    scalars = item.scalars

    def read(values: Json, blobs: _Blobs) -> tuple[object, ...]:
        items = list_in(values, "a field")
        if not scalars:
            return tuple([item.read(value, blobs) for value in items])
        if not scalars.issuperset(map(type, items)):
            raise ValueError(f"a list has items that are not {_names(scalars)}")
        return tuple(items)

    return _Form(read)


def _record(forms: list[_Form]) -> _Form:
    def read(values: Json, blobs: _Blobs) -> tuple[object, ...]:
        items = list_in(values, "a field")
        if len(items) != len(forms):
            raise ValueError(f"{values!r:.100} is not a list of {len(forms)}")
        return tuple([form.read(value, blobs) for form, value in zip(forms, items, strict=True)])

    return _Form(read)


def _mapping(item: _Form) -> _Form:
    scalars = item.scalars

    def read(values: Json, blobs: _Blobs) -> dict[str, Json] | dict[str, object]:
        items = object_in(values, "a field")
        if not scalars:
            return {key: item.read(value, blobs) for key, value in items.items()}
        if not scalars.issuperset(map(type, items.values())):
            raise ValueError(f"an object has values that are not {_names(scalars)}")
        return items

    return _Form(read)


def _nested(kind: type) -> _Form:
    known = _fields_of(kind)

    def read(values: Json, blobs: _Blobs) -> object:
        return _read_fields(kind, known, list_in(values, f"a {kind.__name__}"), blobs)

    return _Form(read)


def _names(kinds: frozenset[type]) -> str:
    return " or ".join(sorted(kind.__name__ for kind in kinds))
