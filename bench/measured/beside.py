"""The baselines in the same contest as our own phases: the storage's limit, our driver alone, fio
and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...drivers.uri import Uri, join
from ..contest import Contestant, blamed, blaming
from ..limit.alone import Alone
from ..limit.fio import Fio
from ..limit.of import limit_of
from ..limit.raw_file import RawFile
from ..peers.choice import asks_for_fio, chosen
from ..states import State
from .peers import PeerContest
from .plan import Plan, local_folder
from .ranks import Ranks
from .result import FIO_READ, FIO_WRITE, READ_ALONE, READ_LIMIT, WRITE_ALONE, WRITE_LIMIT

__all__ = ["Beside"]

Say = Callable[[str], None]


class Beside:
    """``limits`` describes each limit. ``nbytes`` gives the bytes of phases that do not move the
    state, by name."""

    def __init__(
        self, plan: Plan, place: Uri, state: State, nbytes: int, ranks: Ranks, say: Say
    ) -> None:
        """Sweep the client's settings on all ranks at once, and try fio and each peer with
        something small. ``nbytes`` is this rank's share of the state."""
        own = join(place, f"rank-{ranks.rank}")
        folder = local_folder(own)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        if ranks.rank:
            say = _say_nothing
        with blaming("the client that measures the limit", own):
            self._limit = limit_of(own, nbytes, say=say, slowest=lambda s: max(ranks.gather(s)))
        self._uri = own
        self._alone = Alone(own, nbytes) if plan.driver_alone else None
        self._peers = PeerContest(chosen(plan.peers, plan.parsed), place, state, say)
        self.limits = {
            WRITE_LIMIT: self._limit.writing.name,
            READ_LIMIT: self._limit.reading.name,
        }
        self.nbytes = dict.fromkeys((WRITE_LIMIT, READ_LIMIT), self._limit.nbytes)
        if self._alone is not None:
            self.nbytes |= dict.fromkeys((WRITE_ALONE, READ_ALONE), self._alone.nbytes)
        self._fio: dict[str, Fio] = {}
        self.invalid = self._peers.invalid
        """Reasons why figures of fio and peers are invalid, by phase."""
        if asks_for_fio(plan.peers, plan.parsed):
            self._try_fio(say)

    def _try_fio(self, say: Say) -> None:
        for name, client in ((FIO_WRITE, self._limit.writing), (FIO_READ, self._limit.reading)):
            assert isinstance(client, RawFile)  # so it is a file system
            fio = Fio(replace(client, path=client.path.with_name(name.replace(" ", "-"))))
            try:
                fio.try_out()
            except OSError as error:
                say(f"fio is not measured: {error}")
                self.invalid[name] = (f"not measured, because it failed: {error}",)
            else:
                self._fio[name] = fio
                self.limits[name] = fio.name
                self.nbytes[name] = fio.nbytes

    def writing(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Return our phases that write, with their baselines."""
        limit = Contestant(WRITE_LIMIT, self._limit.write, after=self._limit.writing.remove)
        alone = []
        if self._alone is not None:
            alone.append(Contestant(WRITE_ALONE, self._alone.write, after=self._alone.remove))
        fio = self._fio.get(FIO_WRITE)
        also = [Contestant(FIO_WRITE, fio.write, after=fio.remove)] if fio else []
        others = [limit, *also, *alone]
        return [*self._blamed(others), *ours, *self._blamed(self._peers.saving())]

    def reading(self, ours: Sequence[Contestant]) -> list[Contestant]:
        """Return our phases that read, with their baselines. Writes the baselines' objects."""
        with blaming(READ_LIMIT, self._uri):
            self._limit.prepare()
        limit = Contestant(READ_LIMIT, self._limit.read)
        alone = []
        if self._alone is not None:
            self._alone.write()
            alone.append(Contestant(READ_ALONE, self._alone.read))
        also = []
        fio = self._fio.get(FIO_READ)
        if fio is not None:
            with blaming(FIO_READ, self._uri):
                fio.write()
            also.append(Contestant(FIO_READ, fio.read))
        self._peers.prepare()
        others = [limit, *also, *alone]
        return [*self._blamed(others), *ours, *self._blamed(self._peers.loading())]

    def _blamed(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        return [blamed(contestant, self._uri) for contestant in contestants]


def _say_nothing(line: str) -> None:
    """Say nothing: rank 0 speaks for all."""
