"""Capture of the warnings that the package logs during a probe."""

from __future__ import annotations

import logging

__all__ = ["Warnings"]


class Warnings(logging.Handler):
    """Collects the warnings logged in a ``with`` block instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._logger = logging.getLogger("holdfast")
        self._propagated = True

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        self._propagated = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *raised: object) -> None:
        self._logger.propagate = self._propagated
        self._logger.removeHandler(self)
