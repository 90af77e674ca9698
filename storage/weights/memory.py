"""Channels in the memory of the trainer's host: ``peer://`` URIs, without a disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...drivers.uri import Uri, join, parse
from ...errors import UsageError
from ..arenas.memory import available_nbytes
from ..operations.location import UriLike

if TYPE_CHECKING:
    from ..serving.store import MemoryStore

_TOKEN = "HOLDFAST_PEER_TOKEN"
_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Options for serving a ``peer://`` channel from memory.

    ``budget_nbytes``: limit of its objects, by default half of the host's available memory; an
    anchor takes as much as the weights. ``certificate`` and ``key``: PEM files for TLS.
    """

    budget_nbytes: int | None = None
    certificate: str = ""
    key: str = ""


def is_in_memory(uri: UriLike) -> bool:
    """Return whether ``uri`` is a channel in memory."""
    return parse(uri).scheme == "peer"


def served(uri: UriLike, serving: Serving) -> tuple[MemoryStore, str]:
    """Serve a new channel at the address in ``uri``; return the store, which is open, and the URI
    for other processes. Raises UsageError if aiohttp is not installed, the token is not set, or
    the address cannot be used."""
    token = os.environ.get(_TOKEN, "")
    if not token:
        raise UsageError(
            "a channel in memory needs a token, which its subscribers must know",
            uri=parse(uri).redacted,
            advice=f"Set {_TOKEN} in the environment of all of them, to a random text.",
        )
    try:
        from ..serving.store import MemoryStore
    except ModuleNotFoundError as error:
        raise UsageError(
            "serving weights from memory needs aiohttp, which is not installed",
            advice="pip install aiohttp",
        ) from error
    address, _, path = parse(uri).location.partition("/")
    budget_nbytes = serving.budget_nbytes or available_nbytes() // _SHARE
    store = MemoryStore(
        address,
        budget_nbytes=budget_nbytes,
        token=token,
        certificate=serving.certificate,
        key=serving.key,
    )
    store.__enter__()
    return store, str(join(store.uri, path) if path else store.uri)


def for_reading(uri: UriLike) -> Uri:
    """Return the URI that a subscriber opens. In memory, it puts leases, so it writes."""
    parsed = parse(uri)
    if parsed.scheme != "peer":
        return parsed
    return Uri(parsed.scheme, parsed.location, {"store": "on", **parsed.options})
