"""The navigation: the links of ``docs/README.md``, in order, under its own headings.

So readers of the repository and of the site share one list of pages. A page missing from it is in
no table of contents, and Sphinx warns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from .pages import links_in

__all__ = ["contents_of", "sections_of", "table_of_contents"]

_HEADING = re.compile(r"^\*\*(.+)\*\*$", re.MULTILINE)


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the pages under each line ``**Heading**`` of a document, in order, each once."""
    _, *parts = _HEADING.split(text)
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        found[heading] = [page for page in _pages_of(body) if page not in seen]
        seen.update(found[heading])
    return found


def contents_of(text: str) -> list[str]:
    """Return the pages that a document links to, in order, each once."""
    return list(dict.fromkeys(_pages_of(text)))


def table_of_contents(caption: str, pages: Iterable[str]) -> str:
    """Return a table of contents for the navigation, hidden on its page."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def _pages_of(text: str) -> list[str]:
    paths = [PurePosixPath(link.partition("#")[0]) for link in links_in(text) if ":" not in link]
    return [str(path) for path in paths if path.suffix == ".md"]
