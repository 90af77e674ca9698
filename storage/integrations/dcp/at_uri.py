"""What DCP asks of a reader and of a writer alike: where they read or write."""

from __future__ import annotations

import os

from ....drivers.uri import parse
from ....errors import HoldfastError
from ...operations.options import UriLike

__all__ = ["AtUri"]


class AtUri:
    """What reads or writes one checkpoint."""

    def __init__(self, uri: UriLike) -> None:
        self._uri = uri

    @property
    def checkpoint_id(self) -> UriLike:
        """The URI, as it was given."""
        return self._uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load or a save begins, of ``checkpoint_id`` where that is given."""
        if checkpoint_id:
            self._uri = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URI."""
        try:
            parse(checkpoint_id)
        except (HoldfastError, TypeError, ValueError):
            return False
        return True
