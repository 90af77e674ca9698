"""What a keeper holds, read from another host: images, labels and parity, as they lie.

Below ``held`` a keeper shows to other keepers and to trainers of its run:

    held/inventory                          what there is, as :class:`~..arenas.messages.Inventory`
    held/<epoch>-<step>/<rank>.label        the label of an image
    held/<epoch>-<step>/<rank>.safetensors  an image
    held/<epoch>-<step>/<lane>.<row>.parity a block of parity
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...errors import DamagedError
from ..arenas.hosts import KeeperHost
from ..arenas.label import GenerationId, Label, check_sizes

__all__ = [
    "HELD",
    "INVENTORY_KEY",
    "Peers",
    "generation_folder",
    "image_file",
    "label_file",
    "opened_peer",
    "parity_file",
    "parse_held",
]

HELD = "held"
INVENTORY_KEY = f"{HELD}/inventory"
QUIET_S = 20.0
"""For how long nothing may come from a keeper that is read from."""
TRIES = 3

_HELD = re.compile(
    r"held/(\d{1,18})-(\d{1,18})/(?:(\d{1,9})\.(label|safetensors)|(\d{1,9})\.(\d)\.parity)",
    re.ASCII,
)


def generation_folder(generation: GenerationId) -> str:
    """Below what its images are."""
    return f"{generation.epoch}-{generation.step}"


def label_file(rank: int) -> str:
    """The name of a label."""
    return f"{rank}.label"


def image_file(rank: int) -> str:
    """The name of an image."""
    return f"{rank}.safetensors"


def parity_file(lane: int, row: int) -> str:
    """The name of a block of parity."""
    return f"{lane}.{row}.parity"


def parse_held(key: str) -> tuple[GenerationId, str, tuple[int, ...]] | None:
    """What a key names: of which generation; ``label``, ``safetensors`` or ``parity``; and its
    rank, or its lane and row. None where it names none of these."""
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
    """A driver for what ``host`` serves below ``folder``. ``certificate``: a file in PEM, of those
    who are trusted. ``tries``: of each request. Raises UriError, UsageError."""
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
    """The keepers that images of a generation are read from, each opened once."""

    def __init__(
        self, generation: GenerationId, hosts: Sequence[KeeperHost], certificate: str = ""
    ) -> None:
        self.generation = generation
        self._hosts: Mapping[str, KeeperHost] = {host.name: host for host in hosts}
        self._certificate = certificate
        self._drivers: dict[str, Driver] = {}

    def driver(self, name: str) -> Driver:
        """For what the keeper ``name`` holds of the generation. Raises DamagedError where it is
        not known."""
        driver = self._drivers.get(name)
        if driver is None:
            host = self._hosts.get(name)
            if host is None or not host.address:
                raise DamagedError(f"the keeper {name} cannot be reached")
            folder = f"{HELD}/{generation_folder(self.generation)}"
            driver = self._drivers[name] = opened_peer(host, folder, self._certificate)
        return driver

    async def label(self, name: str, rank: int, run: str) -> Label:
        """The label of an image. Raises DamagedError where it is another's, StorageError."""
        label = Label.decode(await self.driver(name).get(label_file(rank)))
        if (label.run, label.generation, label.rank) != (run, self.generation, rank):
            raise DamagedError(f"the keeper {name} has the label of another image for rank {rank}")
        check_sizes(label)
        return label

    async def close(self) -> None:
        """Close all of them."""
        while self._drivers:
            _, driver = self._drivers.popitem()
            await driver.close()


@asynccontextmanager
async def peers_of(
    generation: GenerationId, hosts: Sequence[KeeperHost], certificate: str
) -> AsyncIterator[Peers]:
    """:class:`Peers`, closed at the end."""
    peers = Peers(generation, hosts, certificate)
    try:
        yield peers
    finally:
        await peers.close()
