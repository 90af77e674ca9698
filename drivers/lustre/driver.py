"""``lustre:///folder``: a folder on Lustre. The local driver, and files that are spread over the
storage targets.

A ``file://`` folder that lies on a Lustre mount is served by this driver too. What makes it Lustre
is next door: ``layout`` chooses a layout, ``files`` gives it to new files. The rest
(O_DIRECT, temporary names, fsync, rename) is the local driver's. Other hosts see the files, so
leftovers are swept once they were quiet for an hour.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ...core.units import round_up
from ..local.driver import LocalDriver
from ..options import Option, integer, option_values, size
from ..uri import Uri
from .files import Striper, facts_of, layout_of
from .layout import ALL_OSTS, STRIPE_COUNT_MAX, STRIPE_NBYTES, STRIPE_UNIT_NBYTES, Layout

__all__ = ["LustreDriver"]


def _stripe_count(text: str) -> int:
    if text in ("all", "-1"):
        return ALL_OSTS
    return integer(1, STRIPE_COUNT_MAX)(text)


def _stripe_size(text: str) -> int:
    nbytes = size(STRIPE_UNIT_NBYTES, (4 << 30) - STRIPE_UNIT_NBYTES)(text)
    if nbytes % STRIPE_UNIT_NBYTES:
        raise ValueError("is a multiple of 64KiB")
    return nbytes


class LustreDriver(LocalDriver):
    """Objects are files below a folder on Lustre."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **LocalDriver.OPTIONS,
        "stripe_count": Option(
            _stripe_count,
            None,
            "storage targets per file, or all; chosen by size and number of files",
        ),
        "stripe_size": Option(
            _stripe_size, None, "on one target before the next one's turn: 16MiB"
        ),
        "writers": Option(
            integer(1, 10_000_000), None, "processes that write at the same time: the job's ranks"
        ),
        "ost_count": Option(
            integer(1, STRIPE_COUNT_MAX),
            None,
            "storage targets of the file system: asked of Lustre",
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
        """``stripe_size`` is in bytes. ``local``: the local driver's."""
        uri = Uri(scheme, os.fspath(root))
        striper = Striper(
            uri.redacted,
            stripe_count=stripe_count,
            stripe_nbytes=stripe_size,
            writers=writers,
            facts=partial(facts_of, uri.location, ost_count),
        )
        super().__init__(
            root, scheme=scheme, fs_type=lambda path: "lustre", create=striper.create, **local
        )
        # Parts of whole stripes: no two writes share one, so none waits for another's lock.
        stripe_nbytes = stripe_size or STRIPE_NBYTES
        part_nbytes = round_up(self.traits.part_nbytes, stripe_nbytes)
        self.traits = dataclasses.replace(self.traits, part_nbytes=part_nbytes)

    @classmethod
    def open(cls, uri: Uri) -> LustreDriver:
        """The driver for ``uri``. Raises UriError for an option, or a value, that OPTIONS does not
        know."""
        driver = cls(uri.location, scheme=uri.scheme, **option_values(cls.OPTIONS, uri))
        return driver._closed_when_collected()

    async def layout(self, key: str) -> Layout | None:
        """How an object is spread; None where the file system does not say. Raises
        NotFoundError."""
        return await self._threads.operate("read layout", self._checked(key), self._layout, key)

    def _layout(self, key: str) -> Layout | None:
        folder, fd = self._tree.open_object(key)
        try:
            return layout_of(fd)
        finally:
            os.close(folder)
            os.close(fd)
