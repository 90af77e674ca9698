"""The part that DCP requires of readers and writers alike: their location."""

from __future__ import annotations

import os
import uuid

from ....drivers.uri import parse
from ....errors import HoldfastError
from ...operations.location import UriLike

__all__ = ["AtUri", "new_id"]


def new_id() -> str:
    """Return the id of a new save or load, for DCP's metadata and logs."""
    return str(uuid.uuid4())


class AtUri:
    """Base of a reader or writer of one checkpoint."""

    def __init__(self, uri: UriLike) -> None:
        self._uri = uri

    @property
    def checkpoint_id(self) -> UriLike:
        """The URI, as given."""
        return self._uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load or save of ``checkpoint_id``, if given."""
        if checkpoint_id:
            self._uri = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a URI."""
        try:
            parse(checkpoint_id)
        except (HoldfastError, TypeError, ValueError):
            return False
        return True
