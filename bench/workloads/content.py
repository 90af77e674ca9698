"""The randomness of a state's bytes.

Constant bytes would compress ten thousandfold and deduplicate, so a measurement with them shows
nothing. All content is therefore random, except for a requested share of zeros. Scope: pure;
:mod:`.filling` fills memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import UsageError

__all__ = ["NORMAL", "PAGE_NBYTES", "Content", "parse_content"]

PAGE_NBYTES = 4096


@dataclass(frozen=True)
class Content:
    """Content of tensors.

    ``normal`` fills floating-point tensors with random normals, like weights, and others with
    random bits. ``uniform`` fills all with random bits, which do not compress. ``random_share`` is
    the random part of each 4,096 bytes of a tensor; the rest is zero.
    """

    kind: Literal["normal", "uniform"] = "normal"
    random_share: float = 1.0

    @property
    def name(self) -> str:
        """The name that :func:`parse_content` accepts."""
        if self.random_share < 1:
            return f"{self.random_share:g}"
        return self.kind


NORMAL = Content()


def parse_content(text: str) -> Content:
    """Parse ``normal``, ``uniform``, or the share of random bits among zeros: ``0.25`` or ``25%``.
    Raises UsageError."""
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
            f"--entropy {text!r} is not a kind of content",
            advice="Give normal, uniform, or the share of bytes that are random, such as 25%.",
        )
    return Content("uniform", share)
