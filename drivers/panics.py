"""Detection of Rust panics in the libraries that drivers use."""

from __future__ import annotations

__all__ = ["is_panic"]


def is_panic(error: BaseException) -> bool:
    """Return whether ``error`` is a Rust panic. Its class may be a BaseException that cannot be
    imported."""
    return type(error).__name__ in ("PanicException", "RustPanic")
