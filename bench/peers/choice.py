"""Selects the peers to measure: named ones, or all that are installed and support a storage.

Scope: imports neither the peers nor torch, so that bad requests fail at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...drivers.uri import Uri
from ...errors import UsageError
from .on_files import ON_FILES
from .peer import Peer
from .through_dcp import THROUGH_DCP

ALL = "all"
PEERS = (*THROUGH_DCP, *ON_FILES)


def chosen(text: str, uri: Uri) -> list[Peer]:
    """Return the peers in a comma-separated list of names, or all possible ones for "all". An empty
    text selects none.

    Raises UsageError for an unknown name, and for a peer that is not installed or does not support
    the storage of ``uri``. The advice names the possible ones.
    """
    names = _names(text)
    if names == [ALL]:
        found = _able(uri)
        if not found:
            raise UsageError(f"no peer can be measured on {uri.scheme}://", advice=_advice(uri))
        return found
    return [_named(name, uri) for name in names]


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _named(name: str, uri: Uri) -> Peer:
    known = [peer for peer in PEERS if peer.key == name]
    if not known:
        advice = f"Known names are {_keys(PEERS)}, and {ALL}."
        raise UsageError(f"no peer is called {name!r}", advice=advice)
    serving = [peer for peer in known if peer.serves(uri)]
    if not serving:
        raise UsageError(
            f"{name} cannot be measured on {uri.scheme}://",
            advice=_advice(uri),
        )
    (peer,) = serving
    if not peer.is_installed:
        raise UsageError(
            f"{name} is not installed",
            advice=f"pip install {peer.packages}. {_advice(uri)}",
        )
    return peer


def _able(uri: Uri) -> list[Peer]:
    return [peer for peer in PEERS if peer.serves(uri) and peer.is_installed]


def _advice(uri: Uri) -> str:
    """Return advice that names the possible peers."""
    able = _keys(_able(uri))
    if able:
        return f"These can be measured here: {able}."
    others = _keys(peer for peer in PEERS if peer.serves(uri))
    if others:
        return f"These could be measured once installed: {others}."
    return "Leave --peer out."


def _keys(peers: Iterable[Peer]) -> str:
    return ", ".join(dict.fromkeys(peer.key for peer in peers))
