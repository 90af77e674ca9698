"""The error tree is what its docstring draws, and errors survive the journeys that errors make."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
from collections.abc import Callable

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, MismatchError, StorageDownError, UriError

CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HoldfastError)),
    key=lambda c: c.__name__,
)
WHERE = {
    "uri": "s3://bucket/run",
    "key": "data/0.safetensors",
    "rank": 3,
    "advice": "Look at rank 3.",
}

# A line of the drawing: rules and spaces, the name, and in brackets the builtin errors that it also
# is.
LINE = re.compile(r"^(?P<rules>[ │├└─]*)(?P<name>\w+Error)(?: \((?P<others>[\w, ]+)\))?(?:  |$)")


def drawn() -> dict[str, tuple[str | None, list[str]]]:
    """The docstring's tree: a name to its parent's name and its builtin bases."""
    tree: dict[str, tuple[str | None, list[str]]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := LINE.match(line):
            depth = len(match["rules"])
            parent = max((d for d in above if d < depth), default=None)
            above = {d: name for d, name in above.items() if d < depth} | {depth: match["name"]}
            others = match["others"].split(", ") if match["others"] else []
            tree[match["name"]] = (None if parent is None else above[parent], others)
    return tree


def built() -> dict[str, tuple[str | None, list[str]]]:
    """The tree as the classes are: a name to its parent's name and its builtin bases."""
    tree: dict[str, tuple[str | None, list[str]]] = {}
    for error in CLASSES:
        house = [base.__name__ for base in error.__bases__ if issubclass(base, HoldfastError)]
        assert len(house) == (error is not HoldfastError), (
            f"{error.__name__} needs exactly one parent in the tree"
        )
        others = [base.__name__ for base in error.__bases__ if not issubclass(base, HoldfastError)]
        tree[error.__name__] = (
            house[0] if house else None,
            [] if error is HoldfastError else others,
        )
    return tree


def test_the_tree_is_the_one_that_is_drawn() -> None:
    """Every class stands where the module docstring draws it, with the builtin bases written beside
    it."""
    assert drawn() == built()


def test_all_is_complete() -> None:
    """``__all__`` names every error, in order, and nothing else."""
    assert errors.__all__ == [c.__name__ for c in CLASSES]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_an_error_can_be_caught_by_every_base_that_is_drawn(error: type[HoldfastError]) -> None:
    """Code that knows only builtin errors, or only a group, catches every error below it."""
    tree = drawn()
    name: str | None = error.__name__
    while name is not None:
        parent, others = tree[name]
        for base in (getattr(errors, name), *(getattr(builtins, other) for other in others)):
            with pytest.raises(base, match="gone"):
                raise error("gone")
        name = parent


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "travel",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_an_error_arrives_as_it_left(
    error: type[HoldfastError], travel: Callable[[HoldfastError], HoldfastError]
) -> None:
    """Pickling and copying keep the type, the message and every keyword, in all classes."""
    extra = {"differences": ("a: shape", "b: dtype")} if error is MismatchError else {}
    left = error("gone", temporary=True, **WHERE, **extra)
    arrived = travel(left)
    assert (type(arrived), str(arrived), vars(arrived)) == (error, str(left), vars(left))


def test_the_text_says_what_where_and_what_next() -> None:
    """``str()`` shows the message, then rank, key and URI, then the advice."""
    text = str(UriError("unknown option", **WHERE))
    assert (
        text
        == "unknown option (rank 3, key data/0.safetensors, in s3://bucket/run). Look at rank 3."
    )


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_error_shows_where(error: type[HoldfastError]) -> None:
    """No base class of any error, OSError above all, replaces the text."""
    text = str(error("gone", **WHERE))
    assert [part for part in ("gone", *map(str, WHERE.values())) if part not in text] == []


def test_the_text_leaves_out_what_is_not_known() -> None:
    """Without keywords the message stands alone; rank 0 is a rank."""
    assert (str(UriError("gone")), str(UriError("gone", rank=0))) == ("gone", "gone (rank 0)")


def test_marks() -> None:
    """Only a replaced checkpoint and a storage that is down, or busy, are temporary by nature; a
    raiser may say otherwise."""
    temporary = [c.__name__ for c in CLASSES if c("gone").temporary]
    assert temporary == ["BusyError", "ReplacedError", "StorageDownError"]
    assert StorageDownError("device fails", temporary=False).temporary is False
