"""Hosts of a job, as keepers and trainers describe them to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...planner.parity import Lane, lanes, parity_of


@dataclass(frozen=True, slots=True)
class KeeperHost:
    """A keeper. ``name``: unique in the run; ``domain``: failure domain; ``address``: HTTP address
    as ``host:port``, "" if not served; ``token``: secret for reading over HTTP; ``tls``: whether it
    uses TLS; ``ranks``: ranks that it serves."""

    name: str
    domain: str
    address: str = ""
    token: str = field(default="", repr=False)
    tls: bool = False
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GuardedGroup:
    """Keepers that protect each other's images. ``mode``: ``copy``, ``xor`` or ``pq``; ``names`` of
    the keepers, and the ``ranks`` whose images each holds, both in the order used for blocks."""

    mode: str
    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def member_of(self, rank: int) -> int:
        """Return the index of the keeper that holds the image of ``rank``. Raises ValueError if
        none does."""
        for member, ranks in enumerate(self.ranks):
            if rank in ranks:
                return member
        raise ValueError(f"rank {rank} is not in this group")

    def lanes(self, nbytes: dict[int, int]) -> tuple[Lane, ...]:
        """Return how the images are cut into blocks. ``nbytes``: image size of each rank, 0 without
        an image. An image belongs to the lane given by its index among its keeper's ranks."""
        parity = parity_of(self.mode)
        if not parity:
            raise ValueError(f"{self.mode!r} is not a mode of protection")
        width = 1 if self.mode == "copy" else len(self.names) - parity
        return lanes([[nbytes[rank] for rank in ranks] for ranks in self.ranks], parity, width)
