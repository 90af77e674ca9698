"""Watches which tensors are written to between a save's copy and the next optimizer step.

The save itself can no longer lose anything: it has copied those tensors, or failed. The watch
informs later saves. It ends at the next fence or the next lazy save. It keeps no tensor alive:
memory may be freed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ....core.forks.renewal import new_lock
from ..compat import WeakStorage
from .device_snapshot import BlockSums
from .host_snapshot import HostSnapshot

Tensor = tuple[str, int]
"""A tensor's name in the state, and the bytes of it that this rank holds."""
COUNT_MAX = 1 << 18


class WriteHistory:
    """Remembers, by tensor, whether it was ever written to early. Thread-safe.

    Forgets all tensors once it has more than ``COUNT_MAX``.
    """

    def __init__(self) -> None:
        self._early: dict[Tensor, bool] = {}
        self._lock = new_lock()

    def is_early(self, tensor: Tensor) -> bool | None:
        """Return whether it was written to early; None if it was never watched."""
        return self._early.get(tensor)

    def learn(self, tensors: Iterable[Tensor], *, early: bool) -> list[Tensor]:
        """Record observations of ``tensors``, and return the newly early ones.

        A tensor once seen as early stays early.
        """
        with self._lock:
            news = [tensor for tensor in tensors if early and not self.is_early(tensor)]
            if len(self._early) > COUNT_MAX:
                self._early.clear()
            for tensor in tensors:
                self._early[tensor] = early or bool(self.is_early(tensor))
        return news

    def forget(self) -> None:
        with self._lock:
            self._early.clear()


write_history = WriteHistory()
"""The history of this process."""


_log = logging.getLogger(__name__)


class Watched:
    """One tensor under watch, with a weak reference to its storage.

    ``sums``: its bits as of the save; None if its pages are tracked.
    """

    def __init__(self, known_as: Tensor, local: torch.Tensor, sums: BlockSums | None) -> None:
        self.known_as = known_as
        self.sums = sums
        self._storage = WeakStorage(local.untyped_storage())
        self._address = local.untyped_storage().data_ptr()
        self._offset_nbytes = local.storage_offset() * local.itemsize
        self._nbytes = local.nbytes

    @property
    def gone(self) -> bool:
        """True once its memory was freed, so that nobody writes there."""
        return self._storage.expired

    @property
    def moved(self) -> bool:
        """True if its storage was given other memory."""
        storage = self._storage.get()
        return storage is not None and storage.data_ptr() != self._address

    def bytes(self) -> torch.Tensor | None:
        """Return its current bytes; None if its memory is gone or has shrunk."""
        storage = self._storage.get()
        if storage is None or storage.nbytes() < self._offset_nbytes + self._nbytes:
            return None
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, self._offset_nbytes, (self._nbytes,), (1,))


@dataclass(frozen=True, slots=True)
class Watch:
    """The watched rows of one save. ``host`` tracks some of them."""

    rows: Mapping[int, Watched]
    host: HostSnapshot
    write_history: WriteHistory

    def end(self) -> None:
        """End the watch, and record in the history which tensors were written to."""
        early, unknown = set[int](), set[int]()
        for row, watched in self.rows.items():
            try:
                if not watched.gone and self._written(row, watched):
                    early.add(row)
            except torch.OutOfMemoryError:  # no room for sums: the next save watches it again
                unknown.add(row)
        self.host.close()
        calm = [w.known_as for row, w in self.rows.items() if row not in early | unknown]
        self.write_history.learn(calm, early=False)
        news = self.write_history.learn([self.rows[row].known_as for row in early], early=True)
        if news:
            _log.info(
                "%d tensors (%s, ...) are written to before an optimizer steps: they are copied "
                "at the call from now on",
                len(news),
                news[0][0],
            )

    def _written(self, row: int, watched: Watched) -> bool:
        if watched.moved:
            return True
        if watched.sums is None:
            return self.host.written(row)
        now = watched.bytes()
        return now is None or not BlockSums.of(now).equals(watched.sums)
