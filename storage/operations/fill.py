"""Filling tensors from one checkpoint: plan the reads, verify what comes, copy it to where it
belongs."""

from __future__ import annotations

from collections.abc import Callable

from ...core.forks.renewal import new_lock
from ...drivers.contract import Driver
from ...planner.loading import LoadPlan, Targets
from ..format.manifest import Manifest
from ..pipeline.image_reader import Deliver, ImageReader, plan_reads
from ..runtime.buffers import HostBuffer
from ..runtime.engine import offload
from ..state.scatter import Scatter
from ..state.targets import Wanted

__all__ = ["Report", "fill", "reporting", "scatter_of"]


Report = Callable[[int, int], None]
"""Called with the bytes that are done, and those that there are in all; on any thread."""


async def fill(
    driver: Driver,
    manifest: Manifest,
    wanted: Wanted,
    budget_nbytes: int,
    report: Report = lambda done_nbytes, total_nbytes: None,
) -> ImageReader:
    """Read all that is wanted, once, verified, straight to where it belongs; return the reader, for
    its figures. ``driver`` is that of the images (``images_of``)."""
    reader = ImageReader(driver, manifest, budget_nbytes)
    targets = wanted.targets(manifest.tensors.shape)
    plan = await offload(plan_reads, driver, manifest, targets)
    await reader.run(
        plan, reporting(scatter_of(manifest, wanted, targets, plan).deliver, plan, report)
    )
    return reader


def scatter_of(m: Manifest, wanted: Wanted, targets: Targets, plan: LoadPlan) -> Scatter:
    """What copies that which is read to where it is wanted."""
    return Scatter(m.tensors, m.shards, targets, plan, wanted.buffers)


def reporting(deliver: Deliver, plan: LoadPlan, report: Report) -> Deliver:
    """``deliver``, which then reports how many bytes of the plan have been delivered; at once, that
    none have been."""
    sizes = (plan.stop - plan.start).tolist()
    total_nbytes = sum(sizes)
    done_nbytes = 0
    lock = new_lock()

    def delivered(read: int, buffer: HostBuffer) -> None:
        nonlocal done_nbytes
        deliver(read, buffer)
        with lock:
            done_nbytes += sizes[read]
            report(done_nbytes, total_nbytes)

    if sizes:
        report(0, total_nbytes)
    return delivered
