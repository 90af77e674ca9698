"""Builds the documentation as a site: ``python docs/site/build.py``.

Pages are copied to ``build/docs/source`` with their links adapted, next to pages generated from the
code. Sphinx turns them into ``build/docs/html``. Every warning is an error: broken links and
anchors, and pages missing from the navigation.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast_site.generated import api_page, commands_page, options_page
from holdfast_site.pages import (
    contents_of,
    find_pages,
    on_site,
    sections_of,
    shown_markers,
    table_of_contents,
)
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parents[2]

GENERATED = {
    "reference/code/api.md": (api_page, "reference/api.md"),
    "reference/code/commands.md": (commands_page, "reference/cli.md"),
    "reference/code/options.md": (options_page, "reference/configuration.md"),
}
"""Generated pages: the function that makes each, and the hand-written page that explains it."""


def main() -> int:
    """Build the site. Return 0 if there was no error or warning."""
    parser = argparse.ArgumentParser(description="build the documentation as a site")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build/docs",
        help="where it is built; source and html in it are emptied",
    )
    args = parser.parse_args()
    source, site = args.out / "source", args.out / "html"
    # Rebuild everything. Sphinx does not repeat warnings of pages that it has read before, and
    # keeps the output of deleted pages.
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        write_source(args.root, source)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    options = ["--fresh-env", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    folders = ["--conf-dir", str(ROOT / "docs/site"), "-d", str(args.out / "doctrees")]
    status = sphinx([*options, *folders, str(source), str(site)])
    if status == 0:
        print(site / "index.html")
    return status


def write_source(root: Path, source: Path) -> None:
    """Write Sphinx's input. Raises ValueError for a broken link."""
    pages = find_pages(root)
    texts: dict[Path, str] = {}
    copies: set[Path] = set()
    for document, page in pages.items():
        text = (root / document).read_text(encoding="utf-8")
        text, linked = on_site(text, document, root, pages)
        texts[page] = shown_markers(text)
        copies |= linked
    for name, (make, _) in GENERATED.items():
        texts[Path(name)] = make()
    _add_navigation(texts)
    _add_references(texts)
    _write(source, texts)
    for file in copies:
        target = source / "files" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target)


def _add_navigation(texts: dict[Path, str]) -> None:
    index, decisions = Path("index.md"), Path("decisions/README.md")
    for heading, pages in sections_of(texts[index]).items():
        texts[index] += table_of_contents(heading, pages)
        if heading == "Reference":
            texts[index] += table_of_contents("Reference, generated from the code", GENERATED)
    texts[decisions] += table_of_contents("", contents_of(texts[decisions]))


def _add_references(texts: dict[Path, str]) -> None:
    """Link hand-written pages and generated pages to each other."""
    for name, (_, by_hand) in GENERATED.items():
        made, written = Path(name), Path(by_hand)
        titles = {page: texts[page].partition("\n")[0].lstrip("# ") for page in (made, written)}
        explained = f"[{titles[written]}](../{written.name}) explains these entries."
        listed = f"See also, generated from the code: [{titles[made]}](code/{made.name})."
        texts[made] = _below_title(texts[made], explained)
        texts[written] = _below_title(texts[written], listed)


def _below_title(text: str, line: str) -> str:
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{line}\n{rest}"


def _write(source: Path, texts: Mapping[Path, str]) -> None:
    for page, text in texts.items():
        path = source / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
