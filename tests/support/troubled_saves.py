"""A save whose ranks have troubles of their own, for rank processes: one is late, one writes
slowly, one has to try again, one is held back by its storage."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.options import option_values
from holdfast.drivers.uri import Uri

__all__ = ["NasDriver", "troubled_save"]

LATE_S = 1.0
DELAY_S = 0.5
FAULTS = {
    "slow": {"faults": f"seed:1,delay:1,delay_s:{DELAY_S}"},
    "retries": {"faults": "seed:6832,error:0.5", "retries": 10},
    "throttled": {"faults": "seed:321,busy:0.5", "retries": 10},
}
"""By trouble, the options of the rank's storage. With these seeds the upload is begun at a later
try, and everything after it goes well."""


class NasDriver(LocalDriver):
    """A folder that counts as behind a network, so that operations are tried again."""

    remote: ClassVar[bool] = True

    @classmethod
    def open(cls, uri: Uri) -> LocalDriver:
        """The driver for ``nas:///folder``."""
        options = option_values(cls.OPTIONS, uri)
        return cls(uri.location, scheme="nas", **options)._closed_when_collected()


def register(folder: Path) -> None:
    """Register ``nas://`` by the metadata of a package in ``folder``."""
    package = folder / "nas-1.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nas\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[holdfast.drivers]\nnas = {__name__}:{NasDriver.__name__}\n"
    )
    sys.path.insert(0, str(folder))


def troubled_save(uri: str, packages: str, troubles: list[str]) -> None:
    """Save with the trouble of this rank: ``late``, one of FAULTS, or none."""
    register(Path(packages) / str(dist.get_rank()))
    trouble = troubles[dist.get_rank()]
    options: dict[str, Any] = FAULTS.get(trouble, {})
    state = {"own": torch.full((1 << 20,), float(dist.get_rank())), "step": 7}
    dist.barrier()
    if trouble == "late":
        time.sleep(LATE_S)
    holdfast.save(uri, state, storage_options=options)
