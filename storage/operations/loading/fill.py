"""Fills tensors from one checkpoint: plans the reads, verifies the data and scatters it."""

from __future__ import annotations

from collections.abc import Callable

from ....core.forks.renewal import new_lock
from ....core.spans import Where, counting, span
from ....drivers.contract import Driver
from ....planner.loading import LoadPlan, Targets
from ...format.manifest import Manifest
from ...pipeline.image_reader import Deliver, ImageReader, plan_reads
from ...runtime.buffers import HostBuffer
from ...runtime.engine import offload
from ...state.filling.scatter import Scatter
from ...state.filling.targets import Wanted

__all__ = ["Report", "delivery", "fill"]


Report = Callable[[int, int], None]
"""Called with (done bytes, total bytes), on any thread."""


async def fill(
    driver: Driver,
    manifest: Manifest,
    wanted: Wanted,
    budget_nbytes: int,
    report: Report = lambda done_nbytes, total_nbytes: None,
) -> ImageReader:
    """Read everything wanted, once and verified, directly into its tensors.

    Returns the reader, for its counts. ``driver`` must be the driver for images (``image_driver``).
    """
    reader = ImageReader(driver, manifest, budget_nbytes)
    targets = wanted.targets(manifest.tensors.shape)
    with span("plan"):
        plan = await offload(plan_reads, driver, manifest, targets)
    await reader.run(plan, delivery(manifest, wanted, targets, plan, report))
    return reader


def delivery(
    m: Manifest, wanted: Wanted, targets: Targets, plan: LoadPlan, report: Report
) -> Deliver:
    """Return a callback that scatters each completed read, then reports the delivered bytes.

    Reports zero bytes immediately.
    """
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
