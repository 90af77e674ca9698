"""Files with results of ``holdfast bench``."""

from __future__ import annotations

from ...bench.measured.result import Measurement, decoded
from ...errors import UsageError

__all__ = ["read_measurement"]


def read_measurement(path: str) -> Measurement:
    """The result in a file. Raises UsageError where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return decoded(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
