"""The API page, which Sphinx fills with signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import holdfast

__all__ = ["api_page"]

_SECTIONS = ("Functions", "A training run", "Classes", "Errors")
_TRAINING = ("Checkpointer", "Counters", "Keep", "Keeper", "Resumed")


def api_page() -> str:
    """Return a page with an autodoc directive for every name in ``holdfast.__all__``."""
    lines = [
        "# Every public name",
        "",
        "Generated from the code: signatures and docstrings of the public names.",
    ]
    for section in _SECTIONS:
        lines += ["", f"## {section}", ""]
        for name in holdfast.__all__:
            if _section_of(name) == section:
                lines += _directive(name)
    return "\n".join(lines) + "\n"


def _section_of(name: str) -> str:
    value = getattr(holdfast, name)
    if not inspect.isclass(value):
        return "Functions"
    if issubclass(value, BaseException):
        return "Errors"
    return "A training run" if name in _TRAINING else "Classes"


def _directive(name: str) -> Iterator[str]:
    is_class = inspect.isclass(getattr(holdfast, name))
    yield from (
        "",
        "```{eval-rst}",
        f".. auto{'class' if is_class else 'function'}:: holdfast.{name}",
    )
    if is_class:
        yield "   :members:"
        yield "   :show-inheritance:"
    yield "```"
