"""The bytes of a state: how random they are.

Constants would compress ten thousandfold, and deduplicate: they measure nothing. So all content is
random but for the share of zeros that was asked for. Scope: pure; :mod:`.filling` fills memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import UsageError

__all__ = ["NORMAL", "PAGE_NBYTES", "Content", "parse_content"]

PAGE_NBYTES = 4096


@dataclass(frozen=True)
class Content:
    """``kind``: ``normal`` fills floating-point tensors with random normals, as weights are, and
    all others with random bits; ``uniform`` fills all with random bits, which no compressor makes
    smaller. ``random_share``: of each 4,096 bytes of a tensor such a part, the rest is zero."""

    kind: Literal["normal", "uniform"] = "normal"
    random_share: float = 1.0

    @property
    def name(self) -> str:
        """As :func:`parse_content` takes it."""
        if self.random_share < 1:
            return f"{self.random_share:g}"
        return self.kind


NORMAL = Content()


def parse_content(text: str) -> Content:
    """``normal``, ``uniform``, or the share of random bits among zeros: ``0.25`` or ``25%``. Raises
    UsageError."""
    if text == "normal":
        return NORMAL
    if text == "uniform":
        return Content("uniform")
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 1 / PAGE_NBYTES <= share <= 1:
        raise UsageError(
            f"--entropy {text!r} is no content",
            advice="Give normal, uniform, or the share of bytes that are random, such as 25%.",
        )
    return Content("uniform", share)
