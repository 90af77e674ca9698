"""The place of each document on the site, its links rewritten for that place, and the navigation.

Documents link to each other as files of the repository, which is what code hosts follow. On the
site the folder ``docs`` is the root, and documents outside it are in ``project``. A link to any
other file leads to a copy of it. A link to a folder leads to its README, or is dropped if there is
none.

The navigation has the links of ``docs/README.md``, in order, under its own headings. So readers of
the repository and of the site share one list of pages. A page missing from it is in no table of
contents, and Sphinx warns.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

__all__ = [
    "contents_of",
    "find_pages",
    "links_in",
    "on_site",
    "sections_of",
    "shown_markers",
    "table_of_contents",
]

PROJECT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Documents outside ``docs`` that are pages as well."""

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(<?([^)\s>]+)>?\)")
"""``[text](target)``; the text may span lines."""

_CODE = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)[ \t]*$|(?P<ticks>`+)(?:[^`]|(?!(?P=ticks))`)+(?P=ticks)",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"^<!-- not run: (.+?) -->$", re.MULTILINE)


def find_pages(root: Path) -> dict[Path, Path]:
    """Return every document that is a page: its path in the repository, mapped to its path on the
    site."""
    documents = sorted(path.relative_to(root) for path in (root / "docs").rglob("*.md"))
    found = {path: path.relative_to("docs") for path in documents}
    found[Path("docs/README.md")] = Path("index.md")
    found.update({Path(name): Path("project", name) for name in PROJECT_PAGES})
    return found


def links_in(text: str) -> Iterator[str]:
    """Yield the link targets of a document, in order, without those in code."""
    bare = _CODE.sub(lambda code: "`" * len(code[0]), text)
    yield from (match[2] for match in LINK.finditer(bare))


def on_site(
    text: str, document: Path, root: Path, pages: Mapping[Path, Path]
) -> tuple[str, set[Path]]:
    """Return a document with its links rewritten for the site, and the other repository files to
    which it links; the site needs copies of these.

    Raises ValueError for a broken link.
    """
    copies: set[Path] = set()
    here = pages[document].parent

    def rewrite(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, hash_sign, anchor = link.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", link) or not path:
            return match[0]
        target = Path(os.path.normpath(document.parent / path))
        if (root / target).is_dir():
            target /= "README.md"
            if not (root / target).exists():
                return label[1:-1]
        if not (root / target).is_file():
            raise ValueError(f"{document}: the link {link} has no target")
        if target not in pages:
            copies.add(target)
        placed = pages.get(target, Path("files", target))
        return f"{label}({os.path.relpath(placed, here)}{hash_sign}{anchor})"

    return _outside_code(text, lambda prose: LINK.sub(rewrite, prose)), copies


def shown_markers(text: str) -> str:
    """Return a document with a note at each block that the tests do not run, giving the
    reason."""

    def show(match: re.Match[str]) -> str:
        reason = html.escape(match[1])
        return f'<p class="not-run">The tests do not run this block: {reason}.</p>\n'

    return _outside_code(text, lambda prose: _MARKER.sub(show, prose))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to ``text`` without its code.

    Code is replaced by placeholders meanwhile, so that links with code in their text stay whole.
    """
    kept: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    changed = change(_CODE.sub(put_aside, text))
    return re.sub("\0(\\d+)\0", lambda number: kept[int(number[1])], changed)


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
