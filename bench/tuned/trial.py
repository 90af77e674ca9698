"""Measures one candidate with the real engine: a durable save and a load.

Trials use saves and loads rather than the driver alone, because these are what tuning should speed
up. The driver alone would prefer other settings: it computes no checksums, copies no tensors and
has all memory and processors to itself; and it accepts any part size, while the engine writes
chunks of one size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import holdfast

from ...drivers.uri import Uri, join
from ..clearing import clear
from ..machine import evict
from ..measured.plan import local_folder
from ..states import State, build, flat_tensors, nbytes_of

__all__ = ["Taken", "Trials"]

_NAME = "tuned"


@dataclass(frozen=True)
class Taken:
    """Times of a save and a load of ``nbytes``."""

    save_s: float
    load_s: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Total of both. An option applies to both, and both count equally."""
        return self.save_s + self.load_s


class Trials:
    """Saves and loads below ``place``. The largest state, of about ``most_nbytes``, is built at
    once."""

    def __init__(self, place: Uri, most_nbytes: int) -> None:
        self._place = place
        self._folder = local_folder(place)
        self._whole = flat_tensors(build(most_nbytes / (1 << 30)))
        self._whole_nbytes = nbytes_of(self._whole)

    def run(self, options: Mapping[str, str], nbytes: int) -> Taken:
        """Save and load about ``nbytes`` with these options. The load is verified and, on a local
        file system, cold. Raises the errors of saves and loads."""
        state = self._part(nbytes)
        uri = str(join(self._place, _NAME))
        began_s = time.perf_counter()
        holdfast.save(uri, state, storage_options=options)
        save_s = time.perf_counter() - began_s
        if self._folder is not None:
            evict(Path(self._folder))  # enough after a durable save, which leaves no dirty pages
        began_s = time.perf_counter()
        holdfast.load(uri, into=state, storage_options=options)
        load_s = time.perf_counter() - began_s
        clear(join(self._place, _NAME))
        return Taken(save_s, load_s, nbytes_of(state))

    def _part(self, nbytes: int) -> State:
        """Return the first rows of all tensors: as many as make ``nbytes``."""
        part = nbytes / self._whole_nbytes
        if part >= 1:
            return self._whole
        return {
            name: tensor[: max(1, round(len(tensor) * part))]
            for name, tensor in self._whole.items()
        }
