"""A part of a state, addressed by a dotted name or by keys."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .tree import Key, dotted

Only = str | Sequence[Key]
"""``"model.encoder"``, or the keys: ``("model", "encoder")``, ``("optim", 0)``."""


class Part:
    """The item at ``keys`` and everything below. Its tensors' names begin with ``name``."""

    def __init__(self, only: Only) -> None:
        """Parse ``only``; decimal components of a dotted name become int keys. Raises
        UsageError."""
        if isinstance(only, str):
            keys: tuple[Key, ...] = tuple(
                int(text) if text.isdecimal() else text for text in only.split(".")
            )
        else:
            keys = tuple(only)
        if not keys or "" in keys:
            raise UsageError(
                f"only={only!r} names no part of a checkpoint",
                advice='Give a name such as "model", or the keys that lead to it.',
            )
        self.keys = keys
        self.name = dotted(keys)

    def holds(self, name: str) -> bool:
        """Return whether ``name`` lies in this part."""
        return name == self.name or name.startswith(f"{self.name}.")

    def around(self, state: object) -> object:
        """Return a state that contains only ``state``, at this part's place."""
        for key in reversed(self.keys):
            state = {key: state}
        return state

    def within(self, state: object) -> object:
        """Return the item that :meth:`around` placed. A load replaces tuples, so look it up
        again."""
        for key in self.keys:
            assert isinstance(state, dict)
            state = state[key]
        return state
