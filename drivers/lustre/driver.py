"""``lustre:///folder``: a folder on Lustre. The local driver, with files striped over storage
targets.

It also serves ``file://`` folders on a Lustre mount. ``layout`` chooses a layout, and ``files``
applies it to new files. Everything else (O_DIRECT, temporary names, fsync, rename) is the local
driver's. Other hosts see the files, so leftovers are swept only after an hour without changes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ...core.units import round_up
from ..local.driver import LocalDriver
from ..mounts import Mount
from ..options import Option, integer, size
from ..uri import Uri
from .files import Striper, facts_of
from .layout import ALL_OSTS, STRIPE_COUNT_MAX, STRIPE_NBYTES, STRIPE_UNIT_NBYTES


def _stripe_count(text: str) -> int:
    if text in ("all", "-1"):
        return ALL_OSTS
    return integer(1, STRIPE_COUNT_MAX)(text)


def _stripe_size(text: str) -> int:
    nbytes = size(STRIPE_UNIT_NBYTES, (4 << 30) - STRIPE_UNIT_NBYTES)(text)
    if nbytes % STRIPE_UNIT_NBYTES:
        raise ValueError("must be a multiple of 64KiB")
    return nbytes


class LustreDriver(LocalDriver):
    """Objects stored as files below a folder on Lustre."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **LocalDriver.OPTIONS,
        "stripe_count": Option(
            _stripe_count,
            None,
            "storage targets per file, or all; default: by size and number of files",
        ),
        "stripe_size": Option(
            _stripe_size, None, "bytes on one target before the next; default: 16MiB"
        ),
        "writers": Option(
            integer(1, 10_000_000), None, "processes that write concurrently: the job's ranks"
        ),
        "ost_count": Option(
            integer(1, STRIPE_COUNT_MAX),
            None,
            "storage targets of the file system; default: as Lustre reports",
        ),
    }

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        scheme: str = "lustre",
        stripe_count: int | None = None,
        stripe_size: int | None = None,
        writers: int | None = None,
        ost_count: int | None = None,
        **local: Any,
    ) -> None:
        """Take the striping options (``stripe_size`` in bytes) and the local driver's options."""
        uri = Uri(scheme, os.fspath(root))
        striper = Striper(
            uri.redacted,
            stripe_count=stripe_count,
            stripe_nbytes=stripe_size,
            writers=writers,
            facts=partial(facts_of, uri.location, ost_count),
        )
        super().__init__(
            root,
            scheme=scheme,
            mount_of=lambda path: Mount("lustre"),
            create=striper.create,
            **local,
        )
        # Parts are whole stripes: no two writes share one, so none waits for another's lock.
        stripe_nbytes = stripe_size or STRIPE_NBYTES
        part_nbytes = round_up(self.traits.part_nbytes, stripe_nbytes)
        self.traits = dataclasses.replace(self.traits, part_nbytes=part_nbytes)
