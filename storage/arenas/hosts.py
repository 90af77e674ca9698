"""The hosts of a job, as their keepers and trainers name them to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...planner.parity import Lane, Mode, Protection, lanes

__all__ = ["GuardedGroup", "KeeperHost"]


@dataclass(frozen=True, slots=True)
class KeeperHost:
    """A keeper. ``name``: no other keeper of the run has it; ``domain``: what fails together with
    it; ``address``: where it serves its memory over HTTP, as ``host:port``, "" where it does not;
    ``token``: what whoever reads it there has to know; ``tls``: whether it speaks TLS; ``ranks``:
    those whose trainers it serves."""

    name: str
    domain: str
    address: str = ""
    token: str = field(default="", repr=False)
    tls: bool = False
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GuardedGroup:
    """Keepers that guard each other's images. ``mode``: ``copy``, ``xor`` or ``pq``; ``names`` of
    the keepers, and the ``ranks`` whose images each holds, both in the order that blocks go by."""

    mode: str
    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    def member_of(self, rank: int) -> int:
        """The place of the keeper that holds the image of ``rank``. Raises ValueError where none
        does."""
        for member, ranks in enumerate(self.ranks):
            if rank in ranks:
                return member
        raise ValueError(f"rank {rank} is in no place of this group")

    def lanes(self, nbytes: dict[int, int]) -> tuple[Lane, ...]:
        """How the images are cut; ``nbytes``: the size of each rank's image, 0 where it has
        none. The image of a rank is in the lane of its place among its keeper's ranks."""
        parity = Protection(_mode(self.mode)).parity
        width = 1 if self.mode == "copy" else len(self.names) - parity
        return lanes([[nbytes[rank] for rank in ranks] for ranks in self.ranks], parity, width)


def _mode(text: str) -> Mode:
    """Raises ValueError for what protects nothing."""
    if text == "copy":
        return "copy"
    if text == "xor":
        return "xor"
    if text == "pq":
        return "pq"
    raise ValueError(f"{text!r} is no way to protect a group")
