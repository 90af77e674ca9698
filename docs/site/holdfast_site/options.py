"""The page of URI options, generated from the drivers' declarations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.options import Option
from holdfast.drivers.registry import driver_class
from holdfast.drivers.schemes import SCHEMES

from .tables import cell, table

__all__ = ["options_page"]


def options_page() -> str:
    """Return a page with the options of each scheme, and the shared ones."""
    lines = [
        "# Options by scheme",
        "",
        "Generated from the drivers' declarations. `holdfast drivers URI` shows the values in use",
        "and their sources; `name=value` after the `?` of a URI sets one.",
    ]
    for scheme in SCHEMES:
        name = "fsspec+X" if scheme == "fsspec" else scheme
        lines += ["", f"## {name}://", "", *_options(driver_class(_uri_scheme(scheme)).OPTIONS)]
    for remote, title in ((True, "Every scheme behind a network"), (False, "Every other scheme")):
        lines += ["", f"## {title}", "", *_options(common_options(remote=remote))]
    return "\n".join(lines) + "\n"


def _uri_scheme(scheme: str) -> str:
    return "fsspec+memory" if scheme == "fsspec" else scheme


def _options(options: Mapping[str, Option]) -> Iterator[str]:
    if not options:
        yield "Only those that every scheme has."
        return
    rows = [
        (cell(name, code=True), _default(option), cell(option.help))
        for name, option in options.items()
    ]
    yield from table(("option", "default", "meaning"), rows)


def _default(option: Option) -> str:
    if option.default is None or option.default == "":
        return ""
    return cell(option.text(option.default), code=True)
