"""Errors keep their text and their context. ``test_reference`` compares the tree with its drawings."""

from __future__ import annotations

import copy
import pickle

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, MismatchError, StorageDownError, UriError

CLASSES = [getattr(errors, name) for name in errors.__all__]
WHERE = {"uri": "s3://bucket/run", "key": "data/0.safetensors", "rank": 3, "advice": "Look there."}


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_error_survives_pickling_and_copying(error: type[HoldfastError]) -> None:
    """The type, the text and every keyword are kept; no base class, such as OSError, is in the way."""
    extra = {"differences": ("a: shape", "b: dtype")} if error is MismatchError else {}
    left = error("gone", temporary=True, **WHERE, **extra)
    for arrived in (pickle.loads(pickle.dumps(left)), copy.copy(left), copy.deepcopy(left)):
        assert (type(arrived), str(arrived), vars(arrived)) == (error, str(left), vars(left))
    assert str(left) == "gone (rank 3, key data/0.safetensors, in s3://bucket/run). Look there."


def test_text_leaves_out_unknown_parts() -> None:
    """Without keywords the message stands alone. Rank 0 is shown."""
    assert (str(UriError("gone")), str(UriError("gone", rank=0))) == ("gone", "gone (rank 0)")


def test_temporary_errors() -> None:
    """Replaced checkpoints and storage that is down or busy are temporary, unless raised otherwise."""
    temporary = [c.__name__ for c in CLASSES if c("gone").temporary]
    assert temporary == ["BusyError", "ReplacedError", "StorageDownError"]
    assert StorageDownError("device fails", temporary=False).temporary is False
