"""HTML and SVG elements, and pages built from them. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

from ..tables import Table
from ..text import printable
from .style import CSS

Element = ElementTree.Element

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: a page may apply its own style and do nothing else. Even a name that
escaped the escaping could run no code and reach no host."""


def element(tag: str, *children: Element | str, **attributes: str | float) -> Element:
    """Return an element. ``fill_opacity=…`` sets the attribute ``fill-opacity``, and ``class_=…``
    sets ``class``. Numbers are rounded to a hundredth, less than a pixel."""
    made = ElementTree.Element(tag)
    for name, value in attributes.items():
        made.set(name.rstrip("_").replace("_", "-"), _text(value))
    for child in children:
        if isinstance(child, ElementTree.Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + printable(child)
        else:
            made.text = (made.text or "") + printable(child)
    return made


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return printable(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def facts(known: Mapping[str, str]) -> Element:
    """Return the main facts of a page, by name."""
    pairs = [element("div", element("dt", n), element("dd", fact)) for n, fact in known.items()]
    return element("dl", *pairs)


def listed(alarms: Sequence[str], notes: Sequence[str] = ()) -> Iterator[Element]:
    """Yield a list of warnings and notes, if there are any."""
    lines = [element("li", line, class_="alarm") for line in alarms]
    lines += [element("li", note) for note in notes]
    if lines:
        yield element("ul", *lines)


def section(title: str, *content: Element, note: str = "") -> Iterator[Element]:
    """Yield a title, a note below it, and the content."""
    yield element("h2", title)
    if note:
        yield element("p", note, class_="soft")
    yield from content


def shown_table(shown: Table) -> Iterator[Element]:
    """Yield a table below its title, if it has rows."""
    if not shown.rows:
        return
    sides = ["left" if title in shown.left else "right" for title in shown.titles]
    columns = zip(shown.titles, sides, strict=True)
    head = element("tr", *[element("th", title, class_=side) for title, side in columns])
    body = [
        element("tr", *[element("td", cell, class_=s) for cell, s in zip(row, sides, strict=True)])
        for row in shown.rows
    ]
    made = element("table", element("thead", head), element("tbody", *body))
    title = shown.title[:1].upper() + shown.title[1:]
    yield from section(title, element("div", made, class_="wide"))


def page(title: str, *content: Element) -> str:
    """Return a page as HTML."""
    style = element("style")
    style.text = CSS  # as is, with its line breaks
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        style,
    )
    whole = element("html", head, element("body", element("main", *content)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(whole, encoding="unicode", method="html")
