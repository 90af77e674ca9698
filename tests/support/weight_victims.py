"""Processes that publish or follow weights, and die of SIGKILL in the middle of it."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from .victims import count_calls

SIZE = 40_000


def weights(version: int) -> dict[str, Any]:
    """Return weights; every version changes a few elements of them."""
    import torch

    made = torch.arange(SIZE, dtype=torch.int32).to(torch.bfloat16)
    made[: 10 * (version + 1)] = version
    return {"w": made, "version": torch.tensor([version])}


def published(state: Any) -> int:
    """Return the version of these weights, which must be complete."""
    import torch

    version = int(state["version"])
    assert torch.equal(state["w"], weights(version)["w"])
    return version


def publish_and_die_at(pipe: Connection, uri: str, count: int, at: int) -> None:
    """Publish more versions, and die before the ``at``-th changing call, or send the number of
    calls."""
    import holdfast

    calls = count_calls(at)
    with holdfast.publish(uri, keep=4, anchor=3) as publisher:
        first = publisher.newest
        for version in range(0 if first is None else first + 1, count):
            publisher.push(version, weights(version)).wait()
    pipe.send(calls())


def follow_and_die_at(pipe: Connection, uri: str, at: int) -> None:
    """Update to each version, and die before the ``at``-th request to the storage."""
    import holdfast
    from holdfast.drivers.local.driver import LocalDriver

    requests = 0

    def dying(plain: Any) -> Any:
        async def request(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal requests
            requests += 1
            if requests == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return await plain(self, *args, **kwargs)

        return request

    for name in ("get", "put", "read", "fetch", "stat", "delete"):
        setattr(LocalDriver, name, dying(getattr(LocalDriver, name)))
    with holdfast.subscribe(uri) as subscriber:
        while True:
            if subscriber.update(5) is not None:
                pipe.send(published(subscriber.state))
