"""What is measured beside our own phases, in the same contest: the limit of the storage, our driver
alone where that is asked for, and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...drivers.uri import Uri, join
from ..contest import Contestant
from ..limit.alone import Alone
from ..limit.of import limit_of
from ..peers.choice import chosen
from ..states import State
from .peers import PeerContest
from .plan import Plan, local_folder
from .ranks import Ranks
from .result import READ_ALONE, READ_LIMIT, WRITE_ALONE, WRITE_LIMIT

__all__ = ["Beside"]

Say = Callable[[str], None]


class Beside:
    """``limits``: what each limit is, in words; ``nbytes``: what phases move that do not move the
    state, by name."""

    def __init__(
        self, plan: Plan, place: Uri, state: State, nbytes: int, ranks: Ranks, say: Say
    ) -> None:
        """Sweeps the settings of the client, on all ranks at once, and has each peer save and load
        something small. ``nbytes``: what this rank holds of the state."""
        own = join(place, f"rank-{ranks.rank}")
        folder = local_folder(own)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        if ranks.rank:
            say = _say_nothing
        self._limit = limit_of(own, nbytes, say=say, slowest=lambda s: max(ranks.gather(s)))
        self._alone = Alone(own, nbytes) if plan.driver_alone else None
        self._peers = PeerContest(chosen(plan.peers, plan.parsed), place, state, say)
        self.limits = {
            WRITE_LIMIT: self._limit.writing.name,
            READ_LIMIT: self._limit.reading.name,
        }
        self.nbytes = dict.fromkeys((WRITE_LIMIT, READ_LIMIT), self._limit.nbytes)
        if self._alone is not None:
            self.nbytes |= dict.fromkeys((WRITE_ALONE, READ_ALONE), self._alone.nbytes)

    @property
    def invalid(self) -> dict[str, tuple[str, ...]]:
        """By phase, what was found to be wrong with peers."""
        return self._peers.invalid

    def writing(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Our phases that write, with all that is held against them."""
        limit = Contestant(WRITE_LIMIT, self._limit.write, after=self._limit.writing.remove)
        alone = []
        if self._alone is not None:
            alone.append(Contestant(WRITE_ALONE, self._alone.write, after=self._alone.remove))
        return [limit, *alone, *ours, *self._peers.saving()]

    def reading(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Our phases that read, with all that is held against them, whose objects are written
        here."""
        self._limit.prepare()
        limit = Contestant(READ_LIMIT, self._limit.read)
        alone = []
        if self._alone is not None:
            self._alone.write()
            alone.append(Contestant(READ_ALONE, self._alone.read))
        self._peers.prepare()
        return [limit, *alone, *ours, *self._peers.loading()]


def _say_nothing(line: str) -> None:
    """Rank 0 speaks for all."""
