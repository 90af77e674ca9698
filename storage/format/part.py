"""A part of a state, addressed by a dotted name or by keys."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .tree import Key, dotted

Only = str | tuple[Key, ...]
"""An item and everything below it: ``"model.encoder"``, or the keys: ``("model", "encoder")``,
``("optim", 0)``."""

Selection = Only | Sequence[Only]
"""One or, in a list, several such names, in which ``*`` stands for any text. An empty list is
everything."""


def names_in(only: Selection) -> list[str]:
    """Return the names of a selection, each with dots between its keys."""
    if isinstance(only, str | tuple):
        only = [only] if only else []
    return [name if isinstance(name, str) else dotted(name) for name in only]


class Part:
    """The item at ``keys`` and everything below. Its tensors' names begin with ``name``."""

    def __init__(self, only: Selection) -> None:
        """Parse ``only``; decimal components of a dotted name become int keys. Raises UsageError,
        also for a list or a pattern."""
        keys: tuple[Key, ...] = ()
        if isinstance(only, tuple):
            keys = only
        elif isinstance(only, str) and "*" not in only:
            keys = tuple(int(text) if text.isdecimal() else text for text in only.split("."))
        if not keys or "" in keys:
            raise UsageError(
                f"only={only!r} does not name one part of a checkpoint",
                advice='Give a name such as "model", or a tuple of the keys that lead to it.',
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
