"""Sphinx configuration of the site; ``build.py`` supplies the sources."""

from __future__ import annotations

from pathlib import Path

project = "Holdfast"
author = "the authors of Holdfast"
html_title = "Holdfast"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["files"]
root_doc = "index"

# Heading anchors as code hosts generate them.
myst_heading_anchors = 6
# Blocks without a language are output, folder layouts and ASCII art.
highlight_language = "none"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# A long signature gets one parameter a line.
python_maximum_signature_line_length = 80

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
# The repository has the sources; a copy would only make the site larger.
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
