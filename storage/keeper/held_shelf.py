"""What a keeper holds, as other hosts and other tools see it: a folder of checkpoints, one for each
step that is agreed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...core.lru import LruCache
from ...errors import NotFoundError
from ..arenas.label import GenerationId
from ..format.manifest import MANIFEST_KEY
from .held import Held
from .shelf import Content, Item
from .status import KeeperStatus
from .tiers import manifest_of

__all__ = ["HeldShelf"]

_MANIFESTS_KEPT = 4


class HeldShelf:
    """A :class:`.shelf.Shelf` of the steps of ``run``. Of two epochs that have come to one step,
    the later one is shown."""

    def __init__(self, held: Held, run: str, status: Callable[[], KeeperStatus]) -> None:
        self._held = held
        self._run = run
        self._status = status
        self._manifests = LruCache[bytes](_MANIFESTS_KEPT)

    def listing(self) -> Sequence[Item]:
        """See :class:`.shelf.Shelf`."""
        items = []
        for prefix, generation in self._shown().items():
            images = self._held.images(generation)
            created_s = min(image.label.created_s for image in images)
            manifest = self._manifest(generation)
            items.append(Item(f"{prefix}/{MANIFEST_KEY}", len(manifest), created_s))
            items += [
                Item(f"{prefix}/{image.label.key}", image.memory.nbytes, image.label.created_s)
                for image in images
                if image.label.digests
            ]
        return items

    def _shown(self) -> dict[str, GenerationId]:
        """The generations that can be read, by the folders that they are shown as."""
        whole = [
            one
            for one in self._held.generations.restorable()
            if one.agreed and len(one.ranks) == one.world
        ]
        return {f"{self._run}/step-{one.id.step:08d}": one.id for one in reversed(whole)}

    def _manifest(self, generation: GenerationId) -> bytes:
        known = self._manifests.get(generation)
        if known is None:
            known = manifest_of([image.label for image in self._held.images(generation)])
            self._manifests.put(generation, known)
        return known

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """See :class:`.shelf.Shelf`."""
        run, _, rest = key.partition("/")
        folder, _, name = rest.partition("/")
        generation = self._shown().get(f"{run}/{folder}")
        if generation is None:
            raise NotFoundError("no such step is in memory", key=key)
        self._held.generations.flushing(generation)
        try:
            yield self._content(generation, name, key)
        finally:
            self._held.generations.flushed(generation)

    def _content(self, generation: GenerationId, name: str, key: str) -> Content:
        images = self._held.images(generation)
        if name == MANIFEST_KEY:
            created_s = min(image.label.created_s for image in images)
            return Content(memoryview(self._manifest(generation)), created_s)
        for image in images:
            if image.label.key == name and image.label.digests:
                return Content(image.memory.view, image.label.created_s)
        raise NotFoundError("no such image is in memory", key=key)

    def status(self) -> Mapping[str, object]:
        """See :class:`.shelf.Shelf`."""
        return self._status().as_json()

    def metrics(self) -> str:
        """See :class:`.shelf.Shelf`."""
        status = self._status()
        agreed = [held.generation.step for held in status.generations if held.agreed]
        gauges = {
            "epoch": status.epoch,
            "held_bytes": status.held_nbytes,
            "budget_bytes": status.budget_nbytes,
            "ranks": len(status.ranks),
            "newest_agreed_step": max(agreed, default=-1),
        }
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE holdfast_keeper_{name} gauge", f"holdfast_keeper_{name} {value}"]
        for name, value in vars(status.counters).items():
            lines += [
                f"# TYPE holdfast_keeper_{name}_total counter",
                f"holdfast_keeper_{name}_total {value}",
            ]
        return "\n".join([*lines, ""])
