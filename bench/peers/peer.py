"""The definition of a peer: how it saves and loads a state, and on which storage."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...drivers.uri import Uri

State = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    ``save(uri, state)`` writes a new checkpoint, and ``load(uri, state)`` fills the tensors of
    ``state`` in place. ``async_save`` saves in the background, waits for its end, and returns for
    how many seconds the call blocked. All raise the peer's errors.
    """

    key: str
    """Name for ``--peer``. Variants of a peer for different storages share it."""
    name: str
    save: Callable[[Uri, State], None]
    load: Callable[[Uri, State], None]
    async_save: Callable[[Uri, State], float] | None = None
    durable: bool = False
    """True if data is durable when ``save`` returns. If not, the benchmark adds the fsyncs."""
    loads: bool = True
    """True to measure its loads. False if they equal an earlier peer's."""
    schemes: tuple[str, ...] = ("file", "lustre")
    """Schemes that it supports. "fsspec+" stands for all schemes with that prefix."""
    modules: tuple[str, ...] = ()
    """Modules that it needs."""

    def serves(self, uri: Uri) -> bool:
        """Return whether it can save to ``uri`` and load from it."""
        return any(
            uri.scheme == scheme or (scheme.endswith("+") and uri.scheme.startswith(scheme))
            for scheme in self.schemes
        )

    @property
    def packages(self) -> str:
        """Packages with its modules, for pip. They have the same names."""
        return " ".join(self.modules).replace("_", "-")

    @property
    def is_installed(self) -> bool:
        """Return whether all its modules are installed."""
        return all(importlib.util.find_spec(module) is not None for module in self.modules)
