"""Turns of phrase that no native engineer would use stay rare in docstrings, comments and pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_10_000_WORDS_MAX = {"code": 30, "pages": 30, "guides": 15}
STILTED = re.compile(
    r"""
    ^(?:what|those|that|of|whose|who|where|how|whether)\b      # a docstring that begins with a clause
    | \bwhat(?:ever)?\s(?:is|was|are|were|has|have|had|it|they|there|each|comes|goes|makes?|needs?)\b
    | \b(?:that|those)\sof\b
    | \b(?:of|for|in|to|by|from)\s(?:which|whom)\b
    | \bwhere\sthere\s(?:is|are)\b | \bthere\s(?:is|are)\s(?:none|no\smore)\b
    | \b(?:anew|but\sfor|by\sitself|go(?:es)?\son|gone\son|going\son|give[sn]?\sway|let\sgo|so\smany)\b
    | \b(?:made\sof|not\sany\smore|none\sof\sthem|the\sone\sbefore|told|heard|asked\sfor|is\sabout\sto)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
CODE = ("bench", "cli", "core", "docs/site", "drivers", "errors", "planner", "storage")
PAGES = ("docs/decisions", "docs/explanation", "docs/reference")
GUIDES = ("README.md", "docs/README.md", "docs/how-to", "docs/tutorial")


def texts_of_code(source: str) -> Iterator[str]:
    """Yield each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def texts_of_page(page: str) -> Iterator[str]:
    """Yield the page, without headings and code."""
    fenced, lines = False, list[str]()
    for line in page.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "#")):
            lines.append(re.sub(r"`[^`]*`", "", line))
    yield "\n".join(lines)


def found_in(text: str) -> list[str]:
    """Return the stilted phrases of a text."""
    return [match[0] for match in STILTED.finditer(text)]


def folders() -> Iterator[tuple[str, str, list[Path]]]:
    """Yield (kind, folder, files): code by folder, pages by part of the documentation."""
    for room in CODE:
        for folder in (ROOT / room, *(path for path in (ROOT / room).rglob("*") if path.is_dir())):
            if files := sorted(folder.glob("*.py")):
                yield "code", str(folder.relative_to(ROOT)), files
    for kind, parts in (("pages", PAGES), ("guides", GUIDES)):
        for part in parts:
            files = [ROOT / part] if part.endswith(".md") else sorted((ROOT / part).glob("*.md"))
            yield kind, part, files


@pytest.mark.parametrize(("kind", "folder", "files"), [*folders()])
def test_stilted_phrases_are_rare(kind: str, folder: str, files: list[Path]) -> None:
    """A hit is a place to read aloud; only a room full of them, more than five, is an error."""
    words, hits = 0, Counter[str]()
    for file in files:
        texts = texts_of_code if file.suffix == ".py" else texts_of_page
        for text in texts(file.read_text()):
            words += len(text.split())
            hits.update({f"{file.relative_to(ROOT)}: {hit!r}": 1 for hit in found_in(text)})
    most = max(5, words * PER_10_000_WORDS_MAX[kind] / 10_000)
    assert hits.total() <= most, f"{hits.total()} in {words} words: {hits.most_common(20)}"


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("Return the retained checkpoints.", 0),
        ("What is kept of a run.", 1),
        ("Steps, for which what is to be told goes on anew.", 5),
    ],
)
def test_the_phrases_are_found(text: str, hits: int) -> None:
    """The detector sees them, and leaves plain sentences alone."""
    assert len(found_in(text)) == hits
