"""Fixtures of the tests with keepers."""

from support.kept_runs import run

__all__ = ["run"]
