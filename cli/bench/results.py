"""Files with results of ``holdfast bench``."""

from __future__ import annotations

from ...bench.measured.result import Measurement, decoded
from ...errors import UsageError

__all__ = ["read_measurement", "read_result"]


def read_measurement(path: str) -> Measurement:
    """Return the measurement of checkpoints in a file. Raises UsageError if it holds none."""
    return decoded(read_result(path), path)


def read_result(path: str) -> str:
    """Return the text of a file. Raises UsageError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
