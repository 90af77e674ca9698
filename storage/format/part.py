"""A part of a state, by the name or the keys that a user gives for it."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .tree import Key, dotted

__all__ = ["Only", "Part"]

Only = str | Sequence[Key]
"""``"model.encoder"``, or the keys: ``("model", "encoder")``, ``("optim", 0)``."""


class Part:
    """What lies at ``keys``, and below; ``name`` is what the names of its tensors begin with."""

    def __init__(self, only: Only) -> None:
        """Parts of a name that are whole numbers are taken for indices. Raises UsageError."""
        if isinstance(only, str):
            keys: tuple[Key, ...] = tuple(_key(text) for text in only.split("."))
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
        """Whether what is called ``name`` lies in this part."""
        return name == self.name or name.startswith(f"{self.name}.")

    def around(self, state: object) -> object:
        """A state in which ``state`` is at this place, and nothing else is."""
        for key in reversed(self.keys):
            state = {key: state}
        return state

    def within(self, state: object) -> object:
        """What :meth:`around` has put there, after a load: a tuple is replaced."""
        for key in self.keys:
            assert isinstance(state, dict)
            state = state[key]
        return state


def _key(text: str) -> Key:
    if text.isdecimal():
        return int(text)
    return text
