"""Settings of the demo, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError
from .data import SEQUENCES

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Train ``steps`` steps on ``before`` ranks, save every ``every`` steps, kill a rank in the
    save of ``kill_at``, and resume with ``after`` ranks. Raises UsageError for settings that cannot
    work."""

    steps: int
    kill_at: int
    every: int
    before: int
    after: int
    seed: int

    def __post_init__(self) -> None:
        for ranks in (self.before, self.after):
            if ranks < 1 or SEQUENCES % ranks:
                raise UsageError(f"{ranks} ranks cannot share {SEQUENCES} sequences evenly")
        if self.before < 2:
            raise UsageError("with one rank, none survives the kill")
        if self.seed < 0:
            raise UsageError("a seed is not negative")
        if (
            self.every < 1
            or self.kill_at % self.every
            or not 2 * self.every <= self.kill_at <= self.steps
        ):
            raise UsageError(
                f"no save can be torn at step {self.kill_at} of {self.steps} with a save every "
                f"{self.every}",
                advice=(
                    "The kill falls on a save, and not on the first: one must be there to "
                    "resume from."
                ),
            )

    @property
    def victim(self) -> int:
        """The rank that is killed. Not rank 0, which leads the save and tells the others how it
        ended."""
        return min(2, self.before - 1)
