"""What a peer is: how it saves and loads a state, and where it can."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...drivers.uri import Uri

__all__ = ["Peer"]

State = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """``save(uri, state)`` writes a new checkpoint; ``load(uri, state)`` fills the tensors of
    ``state`` in place. Either raises what the peer raises."""

    key: str
    """What ``--peer`` calls it. Peers that do the same on other storages share it."""
    name: str
    save: Callable[[Uri, State], None]
    load: Callable[[Uri, State], None]
    durable: bool = False
    """Whether what ``save`` wrote is durable when it returns. If not, the benchmark adds the
    fsyncs."""
    saves: bool = True
    """Whether saving is its own. A peer that only loads reads what another one, whose ``save`` it
    has, wrote."""
    loads: bool = True
    """Whether its loading differs from that of the peers before it."""
    schemes: tuple[str, ...] = ("file", "lustre")
    """Of the URIs that it takes; "fsspec+" stands for all that begin so."""
    modules: tuple[str, ...] = ()
    """What has to be installed."""
    packages: str = ""
    """Which packages bring that, for pip."""

    def serves(self, uri: Uri) -> bool:
        """Whether it can save to ``uri``, and load from it."""
        return any(
            uri.scheme == scheme or (scheme.endswith("+") and uri.scheme.startswith(scheme))
            for scheme in self.schemes
        )

    @property
    def is_installed(self) -> bool:
        """Whether all that it needs is."""
        return all(importlib.util.find_spec(module) is not None for module in self.modules)
