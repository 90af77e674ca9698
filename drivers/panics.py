"""Panics of Rust code in the libraries that drivers use."""

from __future__ import annotations

__all__ = ["is_panic"]


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of a library panicked. That may be a BaseException, of a class that cannot
    be imported."""
    return type(error).__name__ in ("PanicException", "RustPanic")
