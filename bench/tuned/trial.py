"""One choice of options, measured by the real engine: a durable save, and a load.

It is measured by saves and loads rather than by the driver alone, because they are what is to get
faster. The driver alone would prefer other settings: it has no checksum to compute, no tensor to
copy, and all of the memory and the processors, and it is given any size of parts, while the engine
writes chunks of one size.
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
    """How long a save and a load took, of ``nbytes``."""

    save_s: float
    load_s: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Of both: an option applies to both, and both count alike."""
        return self.save_s + self.load_s


class Trials:
    """Saves and loads below ``place``, of states of up to about ``most_nbytes``, of which the
    largest is made at once."""

    def __init__(self, place: Uri, most_nbytes: int) -> None:
        self._place = place
        self._folder = local_folder(place)
        self._whole = flat_tensors(build(most_nbytes / (1 << 30)))
        self._whole_nbytes = nbytes_of(self._whole)

    def run(self, options: Mapping[str, str], nbytes: int) -> Taken:
        """Save and load about ``nbytes`` with these options. The load is verified, and cold on a
        file system of this host. Raises what saves and loads raise."""
        state = self._part(nbytes)
        uri = str(join(self._place, _NAME))
        began_s = time.perf_counter()
        holdfast.save(uri, state, storage_options=options)
        save_s = time.perf_counter() - began_s
        if self._folder is not None:
            evict(Path(self._folder))  # enough, since a save is durable: no page of it is dirty
        began_s = time.perf_counter()
        holdfast.load(uri, into=state, storage_options=options)
        load_s = time.perf_counter() - began_s
        clear(join(self._place, _NAME))
        return Taken(save_s, load_s, nbytes_of(state))

    def _part(self, nbytes: int) -> State:
        """The first rows of all tensors: as many as make ``nbytes``."""
        part = nbytes / self._whole_nbytes
        if part >= 1:
            return self._whole
        return {
            name: tensor[: max(1, round(len(tensor) * part))]
            for name, tensor in self._whole.items()
        }
