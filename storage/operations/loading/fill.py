"""Builds the state of a checkpoint, or a part of it, and fills tensors: plans the reads, verifies
the data and scatters it."""

from __future__ import annotations

from collections.abc import Callable

from ....core.forks.renewal import new_lock
from ....core.spans import Where, counting, span
from ....drivers.contract import Driver
from ....errors import UsageError
from ....planner.loading import LoadPlan, Targets
from ...format.manifest import Manifest
from ...format.part import Part
from ...format.tree import dotted
from ...pipeline.image_reader import Deliver, ImageReader, plan_reads
from ...runtime.buffers import HostBuffer
from ...runtime.engine import offload
from ...state.filling.build import build
from ...state.filling.scatter import Scatter
from ...state.filling.targets import TypedPath, Wanted, typed, typed_paths

_LISTED = 10

Report = Callable[[int, int], None]
"""Called with (done bytes, total bytes), on any thread."""


async def fill(
    driver: Driver,
    manifest: Manifest,
    wanted: Wanted,
    budget_nbytes: int,
    report: Report = lambda done_nbytes, total_nbytes: None,
) -> ImageReader:
    """Read everything wanted into its tensors, once and verified. ``driver`` is that for images."""
    reader = ImageReader(driver, manifest, budget_nbytes)
    targets = wanted.targets(manifest.tensors.shape)
    with span("plan"):
        plan = await offload(plan_reads, driver, manifest, targets)
    await reader.run(plan, delivery(manifest, wanted, targets, plan, report))
    return reader


def delivery(
    m: Manifest, wanted: Wanted, targets: Targets, plan: LoadPlan, report: Report
) -> Deliver:
    """Return a callback that scatters each read, then reports the delivered bytes: zero at once."""
    scatter = Scatter(m.tensors, m.shards, targets, plan, wanted.buffers, wanted.memory())
    sizes = (plan.stop - plan.start).tolist()
    total_nbytes = sum(sizes)
    done_nbytes = 0
    lock = new_lock()
    scattering = counting("scatter")

    def delivered(read: int, buffer: HostBuffer) -> None:
        nonlocal done_nbytes
        with scattering(Where(nbytes=sizes[read])):
            scatter.deliver(read, buffer)
        with lock:
            done_nbytes += sizes[read]
            report(done_nbytes, total_nbytes)

    if sizes:
        report(0, total_nbytes)
    return delivered


def build_part(
    manifest: Manifest, rank: int, wanted: Wanted, part: Part | None, uri: str
) -> object:
    """Return the state as ``rank`` saved it, or a part of it. Its tensors are still uninitialized,
    and are added to ``wanted``. Raises UsageError if the part does not exist."""
    path: TypedPath = () if part is None else _path_of(manifest, part)
    try:
        state, _rows = build(manifest, rank, wanted, path)
    except KeyError:
        assert part is not None
        raise UsageError(
            f"there is no {part.name!r} in this checkpoint", uri=uri, advice=_advice(manifest)
        ) from None
    return state


def _path_of(manifest: Manifest, part: Part) -> TypedPath:
    """Return the path of a part. Keys with equal text are distinguished by type if both exist."""
    exact = tuple(map(typed, part.keys))
    containers = typed_paths(manifest.tree)
    found = [path for path in containers if dotted(key for _, key in path) == part.name]
    for row in manifest.tensors.rows.get(part.name, ()):
        found.append(_path_of_tensor(manifest, row, containers))
    if not found or exact in found:
        return exact
    return found[0]


def _path_of_tensor(manifest: Manifest, row: int, containers: list[TypedPath]) -> TypedPath:
    tree = manifest.tree
    container = int(manifest.container[row])
    prefix = tree.prefixes()[container]
    key = tree.tensor_key(container, manifest.tensors.names[row].removeprefix(prefix))
    return (*containers[container], typed(key))


def _advice(manifest: Manifest) -> str:
    tops = dict.fromkeys(path[0][1] for path in typed_paths(manifest.tree) if path)
    names = [repr(key) for key in tops]
    if not names:
        return "`holdfast show` lists what is there."
    listed = ", ".join(names[:_LISTED])
    return f"At its top there are {listed}; `holdfast show` lists all."
