"""Code blocks in the documents.

A Python block that cannot run on every machine has the reason on the line before it:
``<!-- not run: needs a GPU -->``, which the site shows as a note. ``<!-- run twice -->`` marks a
block that the reader should run twice.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCERPT = "an excerpt of "
"""Prefix of the reason if the block is part of a tested file; the file's folder follows."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]+?) -->\n\n?)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?holdfast [a-z-]")


@dataclass(frozen=True)
class Block:
    """A block of Python. ``line``: of its first line in the document. ``reason``: why it does not
    run, or None."""

    line: int
    code: str
    reason: str | None = None
    times: int = 1


def documents() -> list[str]:
    """List every document with code for readers, relative to the root; omit decision records."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    return sorted(name for name in names if not name.startswith("docs/decisions/"))


def python_blocks(text: str) -> list[Block]:
    """Return the Python blocks of a document, in order. Raises ValueError for an unknown mark."""
    return [_block(text, match) for match in _BLOCK.finditer(text)]


def _block(text: str, match: re.Match[str]) -> Block:
    line = text.count("\n", 0, match.start("code")) + 1
    mark = match["mark"]
    if mark is None:
        return Block(line, match["code"])
    if mark == "run twice":
        return Block(line, match["code"], times=2)
    if mark.startswith("not run: "):
        return Block(line, match["code"], mark.removeprefix("not run: "))
    raise ValueError(f"line {line}: the mark {mark!r} is not known")


def commands_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document's blocks that call ``holdfast``, each with its number."""
    python = {
        number
        for match in _FENCED.finditer(text)
        if match[1] in ("python", "yaml", "toml")
        for number in _lines_of(text, match)
    }
    fenced = {number for match in _FENCED.finditer(text) for number in _lines_of(text, match)}
    for number, line in enumerate(text.splitlines(), 1):
        is_code = number in fenced or line.startswith("    ")
        if is_code and number not in python and _CALL.match(line.strip()):
            yield number, line.strip()


def _lines_of(text: str, match: re.Match[str]) -> range:
    first = text.count("\n", 0, match.start(2)) + 1
    return range(first, first + match[2].count("\n"))


def holdfast_calls(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of ``holdfast`` in a line of a shell, without pipes,
    redirections and comments."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    lexer.commenters = "#"
    lexer.whitespace_split = True
    call: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;<>"):
            if call and Path(call[0]).name == "holdfast":
                yield call[1:]
            call = []
        else:
            call.append(word)
