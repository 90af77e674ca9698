"""Sources of imports, and their results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from support.bits import fresh_uri
from support.drivers import HookedDriver, storage_at
from support.given import Serve


def imported(source: Path | str, **options: Any) -> Any:
    """Return the state of the checkpoint that an import makes, after verifying it."""
    uri = fresh_uri()
    holdfast.import_(source, uri, **options)
    with holdfast.open(uri) as c:
        assert c.verify().ok
    return holdfast.load(uri)


def built_by_dcp(reader: Any) -> dict[str, Any]:
    """Return the state that torch's distributed checkpoint makes of all that a reader finds."""
    made: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(made, reader, no_dist=True, planner=planner)
    return made


def objects_at(uri: str) -> dict[str, Any]:
    """Return the objects in a storage in memory."""
    return storage_at(uri).objects


def noted(serve: Serve, folder: Path) -> tuple[str, list[str]]:
    """Return a URI of ``folder``, and a list that gets the key of each read and stat."""
    keys: list[str] = []

    async def note(operation: str, key: str) -> None:
        if operation in ("read", "stat"):
            keys.append(key)

    return serve(lambda path: HookedDriver(LocalDriver(folder), before=note)), keys


class Canary:
    """Pickled as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


LAUGHS = b"\x80\x02]q\x00" + b"".join(
    b"]q%c(h%ch%ce" % (number + 1, number, number) for number in range(200)
)
"""A pickle without its end. Its nested lists double in size at each level."""
