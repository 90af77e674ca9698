"""HTML and SVG elements, and pages built from them. All text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from ..text import printable
from .style import CSS

__all__ = ["Element", "element", "page", "table"]

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


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Element:
    """Return a table. The columns in ``left`` are aligned to the left, the others to the right."""
    sides = ["left" if title in left else "right" for title in titles]
    columns = zip(titles, sides, strict=True)
    head = element("tr", *[element("th", title, class_=side) for title, side in columns])
    body = [
        element("tr", *[element("td", cell, class_=s) for cell, s in zip(row, sides, strict=True)])
        for row in rows
    ]
    made = element("table", element("thead", head), element("tbody", *body))
    return element("div", made, class_="wide")


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
