"""Reads images, labels and parity from the memory of keepers on other hosts.

A keeper serves these keys to other keepers and to trainers of its run:

    held/inventory                          :class:`~..arenas.messages.Inventory`
    held/<epoch>-<step>/<rank>.label        the label of an image
    held/<epoch>-<step>/<rank>.safetensors  an image
    held/<epoch>-<step>/<lane>.<row>.parity a block of parity
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...errors import DamagedError, HoldfastError, StorageDownError
from ..arenas.hosts import KeeperHost
from ..arenas.label import GenerationId, Label
from ..arenas.messages import Inventory
from ..ranks.messages import codec
from .decisions.choice import Stock

HELD = "held"
INVENTORY_KEY = f"{HELD}/inventory"
QUIET_S = 20.0
"""Time without any data after which a read fails."""
TRIES = 3
ASK_S = 5.0
"""Deadline for the inventory of another keeper."""

_HELD = re.compile(
    r"held/(\d{1,18})-(\d{1,18})/(?:(\d{1,9})\.(label|safetensors)|(\d{1,9})\.(\d)\.parity)",
    re.ASCII,
)

_log = logging.getLogger(__name__)


def generation_folder(generation: GenerationId) -> str:
    """Return the name of a generation's folder."""
    return f"{generation.epoch}-{generation.step}"


def parse_held(key: str) -> tuple[GenerationId, str, tuple[int, ...]] | None:
    """Parse a key into its generation, its kind (``label``, ``safetensors`` or ``parity``), and its
    rank or its lane and row. Return None for any other key."""
    match = _HELD.fullmatch(key)
    if match is None:
        return None
    epoch, step, rank, kind, lane, row = match.groups()
    generation = GenerationId(int(epoch), int(step))
    if kind is not None:
        return generation, kind, (int(rank),)
    return generation, "parity", (int(lane), int(row))


def opened_peer(
    host: KeeperHost,
    folder: str,
    certificate: str = "",
    *,
    timeout_s: float = QUIET_S,
    tries: int = TRIES,
) -> Driver:
    """Return a driver for the folder that ``host`` serves. ``certificate``: PEM file to verify it
    with; ``tries``: attempts per request. Raises UriError, UsageError."""
    options: dict[str, object] = {
        "token": host.token,
        "timeout": f"{timeout_s:g}s",
        "retries": tries - 1,
    }
    if host.tls:
        options["tls"] = "true"
        options["ca"] = certificate
    return open_driver(f"peer://{host.address}/{folder}", **options)


class Peers:
    """Drivers for the keepers that hold a generation, each opened on first use."""

    def __init__(
        self, generation: GenerationId, hosts: Sequence[KeeperHost], certificate: str = ""
    ) -> None:
        self.generation = generation
        self._hosts: Mapping[str, KeeperHost] = {host.name: host for host in hosts}
        self._certificate = certificate
        self._drivers: dict[str, Driver] = {}

    def driver(self, name: str) -> Driver:
        """Return the driver for the keeper ``name``. Raises DamagedError if it is unknown or not
        served."""
        driver = self._drivers.get(name)
        if driver is None:
            host = self._hosts.get(name)
            if host is None or not host.address:
                raise DamagedError(f"the keeper {name} cannot be reached")
            folder = f"{HELD}/{generation_folder(self.generation)}"
            driver = self._drivers[name] = opened_peer(host, folder, self._certificate)
        return driver

    async def label(self, name: str, rank: int, run: str) -> Label:
        """Read the label of an image. Raises StorageError, and DamagedError if it belongs to
        another one."""
        label = Label.decode(await self.driver(name).get(f"{rank}.label"))
        if (label.run, label.generation, label.rank) != (run, self.generation, rank):
            raise DamagedError(f"the keeper {name} has the label of another image for rank {rank}")
        return label

    async def close(self) -> None:
        """Close all drivers."""
        while self._drivers:
            _, driver = self._drivers.popitem()
            await driver.close()


@asynccontextmanager
async def peers_of(
    generation: GenerationId, hosts: Sequence[KeeperHost], certificate: str
) -> AsyncIterator[Peers]:
    """Open :class:`Peers` for the body."""
    peers = Peers(generation, hosts, certificate)
    try:
        yield peers
    finally:
        await peers.close()


@dataclass(frozen=True, slots=True)
class Unheard:
    """A keeper that may hold images, but has not answered. ``listens``: its host accepts
    connections, so the host is not lost."""

    host: KeeperHost
    listens: bool


async def stock_of(host: KeeperHost, certificate: str) -> Stock | Unheard | None:
    """Return the inventory of a keeper; None if it is gone. ``certificate``: PEM file to verify it
    with."""
    listens = False
    try:
        driver = opened_peer(host, HELD, certificate, timeout_s=ASK_S, tries=1)
        try:
            async with asyncio.timeout(ASK_S):
                listens = await _listens(host)
                data = await driver.get("inventory")
        finally:
            await driver.close()
        return Stock(replace(host, ranks=()), codec(Inventory).decode(data, "an inventory"))
    except (HoldfastError, OSError) as error:
        text = str(error) or f"no answer within {ASK_S:g} s"
        _log.warning("the keeper %s at %s does not answer: %s", host.name, host.address, text)
        # After any other error nobody listens there, or another server: its images are lost.
        is_late = isinstance(error, StorageDownError | TimeoutError)
        return Unheard(host, listens) if is_late else None


async def _listens(host: KeeperHost) -> bool:
    """Return True once the keeper's host accepts a connection. Raises OSError."""
    address, _, port = host.address.rpartition(":")
    _, writer = await asyncio.open_connection(address.strip("[]"), int(port))
    writer.close()
    return True
