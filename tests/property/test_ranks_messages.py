"""Messages between ranks round-trip; anything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

import holdfast
from holdfast.storage.exchange import broadcast, exchange
from holdfast.storage.operations import rounds
from holdfast.storage.ranks import calls, failures, messages, rendezvous
from holdfast.storage.ranks.messages import Nothing, codec
from holdfast.storage.training import decisions, keeper_inventory, load_attempts, resume

MODULES = [rounds, decisions, resume, load_attempts, keeper_inventory]
KINDS: list[Any] = [
    Nothing,
    broadcast.Offer,
    exchange.Connected,
    exchange.Request,
    calls.RankStatus,
    failures.Failure,
    rendezvous.Answer,
    rendezvous.Verdict,
    decisions.QuestionRecord,
]
KINDS += sorted(
    {
        spec.__dict__["_kind"]
        for module in MODULES
        for made in vars(module).values()
        if isinstance(made, messages.Round)
        for spec in (made.statement, made.verdict)
    }
    - set(KINDS),
    key=lambda kind: str(kind.__name__),
)
"""All messages: those sent alone, and those of rounds."""

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters()),  # also lone surrogates, which names may have
    bytes: st.binary(),
    type(None): st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field type."""
    if kind in SCALARS:
        return SCALARS[kind]
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(SCALARS[str], values_of(arguments[1]), max_size=4)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)})


MESSAGES = st.sampled_from(KINDS).flatmap(values_of)


@examples(200)
@given(MESSAGES)
def test_what_is_sent_is_what_is_received(message: Any) -> None:
    """Decoding preserves the type of each field: a tuple stays a tuple, an int no bool."""
    kind = codec(type(message))
    received = kind.decode(kind.encode(message), "a message")
    assert received == message
    assert repr(received) == repr(message)


@examples(200)
@given(MESSAGES, st.data())
def test_data_that_is_cut_short_or_longer_is_refused(message: Any, data: st.DataObject) -> None:
    """A truncated or extended message is never taken for another message."""
    kind = codec(type(message))
    encoded = kind.encode(message)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    if cut + b"\n" != encoded:  # the message has fields of bytes, all of them empty
        with pytest.raises(holdfast.CoordinationError, match="the statement of rank 7"):
            kind.decode(cut, "the statement of rank 7")
    with pytest.raises(holdfast.CoordinationError, match="same version"):
        kind.decode(encoded + (b"x" if b"\n" in encoded else b"\nx"), "it")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.nightly(4)
@examples(300)
@given(st.sampled_from(KINDS), st.lists(JSON, max_size=9), st.binary(max_size=9))
def test_any_fields_are_a_message_of_the_right_types_or_a_clear_error(
    kind: Any, values: list[Any], rest: bytes
) -> None:
    """Any fields either raise a clear error or form a message that round-trips."""
    data = json.dumps([kind.__name__, *values]).encode() + b"\n" + rest
    try:
        message = codec(kind).decode(data, "it")
    except holdfast.CoordinationError:
        return
    assert repr(codec(kind).decode(codec(kind).encode(message), "it")) == repr(message)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_another_kind_is_refused(kind: Any) -> None:
    """A message of another kind is refused: a rank of another version may be in another round."""
    other = Nothing if kind is not Nothing else rounds.Begun
    data = codec(other).encode(rounds.Begun("x") if kind is Nothing else Nothing())
    with pytest.raises(holdfast.CoordinationError, match=f"it is not a {kind.__name__}"):
        codec(kind).decode(data, "what rank 3 sent")


def test_last_fields_with_their_defaults_are_not_sent() -> None:
    """Messages stay short: no field names, no default values at the end, binary digests."""
    plan = rounds.PlanFollowed(b"p" * 16, {"0": b"a" * 16}, {})
    data = codec(rounds.SaveStatement).encode(rounds.SaveStatement("file:///x", plan))
    assert data == b'["SaveStatement","file:///x",[16,{"0":16},{}]]\n' + b"p" * 16 + b"a" * 16
