"""Peers in the same contest: each saves and loads the same state in turn with us.

The tensors that a peer loads are compared with those it saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ...drivers.uri import Uri, join
from ..clearing import clear
from ..contest import Contestant, blaming
from ..machine import sync_tree
from ..peers.peer import Peer
from ..program import TINY_GIB
from ..states import State, build, digests, zero
from .plan import local_folder

__all__ = ["PeerContest"]

NOT_EQUAL = "it loaded other bytes than were saved"
Say = Callable[[str], None]


class PeerContest:
    """Contestants for the peers. ``invalid`` gives the problems found with a peer, by phase."""

    def __init__(self, peers: Sequence[Peer], place: Uri, state: State, say: Say) -> None:
        self.invalid: dict[str, tuple[str, ...]] = {}
        self._place = place
        self._state = state
        self._expected: dict[str, bytes] = {}
        self._able = [peer for peer in peers if self._warm_up(peer, say)]

    def saving(self) -> list[Contestant]:
        """Return a contestant for each peer that saves. Its time ends when the data is durable."""
        return [self._saver(peer) for peer in self._able if peer.saves]

    def prepare(self) -> None:
        """Save the data for the loads. The state must still have its original values."""
        if self._loading:
            self._expected = digests(self._state)
        for peer in self._loading:
            uri = self._at(peer)
            with blaming(f"load: {peer.name}", uri):
                _save(peer, uri, self._state)

    def loading(self) -> list[Contestant]:
        """Return a contestant for each peer that loads, into the zeroed tensors of the state."""
        return [self._loader(peer) for peer in self._loading]

    @property
    def _loading(self) -> list[Peer]:
        return [peer for peer in self._able if peer.loads]

    def _saver(self, peer: Peer) -> Contestant:
        uri = self._at(peer)
        return Contestant(
            f"save: {peer.name}",
            lambda: _save(peer, uri, self._state),
            after=lambda: _remove(uri),
        )

    def _loader(self, peer: Peer) -> Contestant:
        checked = False

        def check_once() -> None:
            nonlocal checked
            if not checked and digests(self._state) != self._expected:
                self._reject(peer, NOT_EQUAL)
            checked = True

        return Contestant(
            f"load: {peer.name}",
            lambda: peer.load(self._at(peer), self._state),
            before=lambda: zero(self._state),
            after=check_once,
        )

    def _warm_up(self, peer: Peer, say: Say) -> bool:
        """Return whether a peer can save and load a small state, and report its failure otherwise.
        This also imports the peer and starts its threads before any timing."""
        uri = self._at(peer, "warm-up")
        small = build(TINY_GIB)
        try:
            _save(peer, uri, small)
            peer.load(uri, small)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            say(f"{peer.name} is not measured: {reason}")
            self._reject(peer, f"not measured, because it failed: {reason}")
            return False
        finally:
            _remove(uri)
        return True

    def _reject(self, peer: Peer, reason: str) -> None:
        if peer.saves:
            self.invalid[f"save: {peer.name}"] = (reason,)
        if peer.loads:
            self.invalid[f"load: {peer.name}"] = (reason,)

    def _at(self, peer: Peer, what: str = "peer") -> Uri:
        return join(self._place, f"{what}-{peer.key}")


def _save(peer: Peer, uri: Uri, state: State) -> None:
    """Save durably: sync the peer's data from the page cache."""
    peer.save(uri, state)
    folder = local_folder(uri)
    if folder is not None and not peer.durable:
        sync_tree(Path(folder))


def _remove(uri: Uri) -> None:
    """Delete a peer's data, including files with names that our drivers do not know."""
    folder = local_folder(uri)
    if folder is None:
        clear(uri)
    elif Path(folder).is_dir():
        shutil.rmtree(folder)
    else:
        Path(folder).unlink(missing_ok=True)
