"""Shows a keeper's memory to other hosts as a folder of checkpoints, one per complete agreed step.

Other keepers and trainers of the run can also read single images, labels and parity, see
:mod:`..reading`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ....core.lru import LruCache
from ....drivers.contract import ObjectInfo
from ....errors import NotFoundError
from ...arenas.label import GenerationId
from ...arenas.messages import Inventory
from ...format.manifest import MANIFEST_KEY
from ...ranks.messages import codec
from ..parity.guards import Guards
from ..reading import INVENTORY_KEY, parse_held
from ..slot_memory import SlotPool
from ..status import KeeperStatus
from ..tiers import manifest_of

_MANIFESTS_KEPT = 4


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """The bytes of an object, not copied."""

    view: memoryview
    modified_s: float


class MemoryCatalog:
    """Read-only objects in the memory of a keeper of ``run``. If two epochs have the same step, it
    shows the later epoch. ``inventory()`` returns the full inventory, and ``keepers()`` the number
    of keepers of the job. No method blocks."""

    def __init__(
        self,
        pool: SlotPool,
        guards: Guards,
        run: str,
        status: Callable[[], KeeperStatus],
        inventory: Callable[[], Inventory],
        keepers: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._guards = guards
        self._run = run
        self._status = status
        self._inventory = inventory
        self.keepers = keepers
        self._manifests = LruCache[bytes](_MANIFESTS_KEPT)

    def listing(self) -> Sequence[ObjectInfo]:
        """Return all objects, in any order. Keys start with the name of the run, as in
        ``<run>/step-00000500/manifest.safetensors``."""
        items = []
        for prefix, generation in self._shown().items():
            images = self._pool.images(generation)
            created_s = min(image.label.created_s for image in images)
            manifest = self._manifest(generation)
            items.append(ObjectInfo(f"{prefix}/{MANIFEST_KEY}", len(manifest), created_s))
            items += [
                ObjectInfo(
                    f"{prefix}/{image.label.key}", image.memory.nbytes, image.label.created_s
                )
                for image in images
                if image.label.digests
            ]
        return items

    def _shown(self) -> dict[str, GenerationId]:
        whole = [
            one
            for one in self._pool.generations.restorable()
            if one.agreed and len(one.ranks) == one.world
        ]
        return {
            f"{self._run}/step-{one.generation.step:08d}": one.generation for one in reversed(whole)
        }

    def _manifest(self, generation: GenerationId) -> bytes:
        known = self._manifests.get(generation)
        if known is None:
            known = manifest_of([image.label for image in self._pool.images(generation)])
            self._manifests.put(generation, known)
        return known

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """Pin an object for the body. Raises NotFoundError, at the call or on entry."""
        if key == INVENTORY_KEY:
            data = codec(Inventory).encode(self._inventory())
            yield Content(memoryview(data), time.time())
            return
        named = parse_held(key)
        if named is not None:
            generation, kind, numbers = named
            opened = self._opened_parity if kind == "parity" else self._opened_image
            with opened(generation, kind, numbers, key) as content:
                yield content
            return
        run, _, rest = key.partition("/")
        folder, _, name = rest.partition("/")
        shown = self._shown().get(f"{run}/{folder}")
        if shown is None:
            raise NotFoundError("no such step is in memory", key=key)
        with self._pool.pinned(shown):
            yield self._content(shown, name, key)

    @contextmanager
    def _opened_image(
        self, generation: GenerationId, kind: str, numbers: tuple[int, ...], key: str
    ) -> Iterator[Content]:
        """Pin an image, or return its label, which other members of the group have copies of."""
        (rank,) = numbers
        with self._pool.pinned(generation), self._guards.opened(generation) as guarded:
            slot = self._pool.slot_of(generation, rank)
            if slot is not None and slot.label is not None:
                is_label = kind == "label"
                view = memoryview(slot.label.encode()) if is_label else slot.memory.view
                yield Content(view, slot.label.created_s)
            elif guarded is not None and kind == "label" and rank in guarded.labels:
                yield Content(memoryview(guarded.labels[rank]), time.time())
            else:
                raise NotFoundError("no such image is in memory", key=key)

    @contextmanager
    def _opened_parity(
        self, generation: GenerationId, kind: str, numbers: tuple[int, ...], key: str
    ) -> Iterator[Content]:
        lane, row = numbers
        with self._guards.opened(generation) as guarded:
            parities = guarded.parities if guarded is not None else []
            for held in parities:
                if (held.lane, held.block.row) == (lane, row) and held.memory is not None:
                    yield Content(held.memory.view, time.time())
                    return
        raise NotFoundError("no such parity is in memory", key=key)

    def _content(self, generation: GenerationId, name: str, key: str) -> Content:
        images = self._pool.images(generation)
        if name == MANIFEST_KEY:
            created_s = min(image.label.created_s for image in images)
            return Content(memoryview(self._manifest(generation)), created_s)
        for image in images:
            if image.label.key == name and image.label.digests:
                return Content(image.memory.view, image.label.created_s)
        raise NotFoundError("no such image is in memory", key=key)

    def status(self) -> Mapping[str, object]:
        """Return the status of the keeper as a JSON object, without secrets."""
        return self._status().as_json()

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        status = self._status()
        agreed = [held.generation.step for held in status.generations if held.agreed]
        gauges = {
            "epoch": status.epoch,
            "held_bytes": status.held_nbytes,
            "budget_bytes": status.budget_nbytes,
            "ranks": len(status.ranks),
            "newest_agreed_step": max(agreed, default=-1),
            "newest_protected_step": -1 if status.protected is None else status.protected.step,
            "parity_bytes": status.parity_nbytes,
        }
        lines = [
            f"# TYPE holdfast_keeper_{name} gauge\nholdfast_keeper_{name} {value}\n"
            for name, value in gauges.items()
        ]
        return "".join(lines) + counters_text(vars(status.counters))


def counters_text(counters: Mapping[str, int]) -> str:
    """Return counters in the text format of Prometheus."""
    return "".join(
        f"# TYPE holdfast_keeper_{name}_total counter\nholdfast_keeper_{name}_total {value}\n"
        for name, value in counters.items()
    )
