"""The baselines in the same contest as our own phases: the storage's limit, our driver alone,
and peers, which save and load the same state in turn with us."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...drivers.uri import Uri, join
from ..contest import Contestant, blamed, blaming
from ..limit.of import Alone, limit_of
from ..machine import sync_tree
from ..peers.choice import chosen
from ..peers.peer import Peer
from ..place import clear
from ..program import TINY_GIB
from ..states import State, build, digests, zero
from .course import Course
from .plan import Plan, local_folder
from .result import READ_ALONE, READ_LIMIT, WRITE_ALONE, WRITE_LIMIT

NOT_EQUAL = "it loaded other bytes than were saved"


class Beside:
    """The baselines of one rank.

    ``limits`` describes each limit. ``nbytes`` gives the bytes of phases that do not move the
    state, and ``invalid`` the reasons why figures of peers are invalid, by phase.
    """

    def __init__(self, plan: Plan, place: Uri, state: State, nbytes: int, course: Course) -> None:
        """Sweep the client's settings on all ranks at once, and try each peer with something
        small. ``nbytes`` is this rank's share of the state."""
        ranks = course.ranks
        self._uri = join(place, f"rank-{ranks.rank}")
        folder = local_folder(self._uri)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)

        def slowest(seconds: float) -> float:
            return float(max(ranks.gather(seconds)))

        with blaming("the client that measures the limit", self._uri):
            limit = limit_of(self._uri, nbytes, say=course.say, slowest=slowest)
        self._writers: dict[str, Any] = {WRITE_LIMIT: limit.writing}
        self._readers: dict[str, Any] = {READ_LIMIT: limit.reading}
        self._peers = PeerContest(chosen(plan.peers, plan.parsed), place, state, course)
        self.invalid = self._peers.invalid
        self.limits = {name: each.name for name, each in self._clients.items()}
        if plan.driver_alone:
            alone = Alone(self._uri, nbytes)
            self._writers[WRITE_ALONE] = self._readers[READ_ALONE] = alone
        self.nbytes = {name: each.nbytes for name, each in self._clients.items()}

    @property
    def _clients(self) -> dict[str, Any]:
        return self._writers | self._readers

    def writing(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Return our phases that write, with their baselines."""
        others = [
            Contestant(name, each.write, after=each.remove) for name, each in self._writers.items()
        ]
        return [*self._blamed(others), *ours, *self._blamed(self._peers.saving())]

    def reading(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Return our phases that read, with their baselines. Writes the baselines' objects."""
        for name, each in self._readers.items():
            with blaming(name, self._uri):
                each.write()
        self._peers.prepare()
        others = [Contestant(name, each.read) for name, each in self._readers.items()]
        return [*self._blamed(others), *ours, *self._blamed(self._peers.loading())]

    def _blamed(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        return [blamed(contestant, self._uri) for contestant in contestants]


class PeerContest:
    """Contestants for the peers. The tensors that a peer loads are compared with those it saved.
    ``invalid`` gives the problems found with a peer, by phase."""

    def __init__(self, peers: Sequence[Peer], place: Uri, state: State, course: Course) -> None:
        self.invalid: dict[str, tuple[str, ...]] = {}
        self._place = place
        self._state = state
        self._expected: dict[str, bytes] = {}
        self._course = course
        self._able = [peer for peer in peers if self._warm_up(peer)]

    def saving(self) -> list[Contestant]:
        """Return the contestants that save. Their times end when the data is durable."""
        in_background = [peer for peer in self._able if peer.async_save is not None]
        return [*map(self._saver, self._able), *map(self._async_saver, in_background)]

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

    def _async_saver(self, peer: Peer) -> Contestant:
        uri = self._at(peer)
        name = f"async save: {peer.name}"

        def save() -> None:
            assert peer.async_save is not None
            self._course.note(name).stall_s.append(peer.async_save(uri, self._state))
            _sync(peer, uri)

        return Contestant(name, save, after=lambda: _remove(uri))

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

    def _warm_up(self, peer: Peer) -> bool:
        """Return whether a peer can save and load a small state, and report its failure otherwise.
        This also imports the peer and starts its threads before any timing."""
        uri = self._at(peer, "warm-up")
        small = build(TINY_GIB)
        try:
            _save(peer, uri, small)
            peer.load(uri, small)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            self._course.say(f"{peer.name} is not measured: {reason}")
            self._reject(peer, f"not measured, because it failed: {reason}")
            return False
        finally:
            _remove(uri)
        return True

    def _reject(self, peer: Peer, reason: str) -> None:
        self.invalid[f"save: {peer.name}"] = (reason,)
        if peer.loads:
            self.invalid[f"load: {peer.name}"] = (reason,)

    def _at(self, peer: Peer, what: str = "peer") -> Uri:
        return join(self._place, f"{what}-{peer.key}")


def _save(peer: Peer, uri: Uri, state: State) -> None:
    peer.save(uri, state)
    _sync(peer, uri)


def _sync(peer: Peer, uri: Uri) -> None:
    """Make the peer's data in the page cache durable, if the peer does not."""
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
