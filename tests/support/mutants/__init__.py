"""Small changes of the engine that its tests must notice, a table for each part of it."""

from __future__ import annotations

from . import (
    capture,
    drivers,
    format,
    layouts,
    loading,
    pipeline,
    planner,
    protocol,
    ranks,
    training,
)

TABLES = [
    capture.MUTANTS,
    drivers.MUTANTS,
    format.MUTANTS,
    layouts.MUTANTS,
    loading.MUTANTS,
    pipeline.MUTANTS,
    planner.MUTANTS,
    protocol.MUTANTS,
    ranks.MUTANTS,
    training.MUTANTS,
]
