"""How Sphinx builds the site; ``build.py`` says from what."""

from __future__ import annotations

project = "Holdfast"
author = "the authors of Holdfast"
html_title = "Holdfast"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["files"]
root_doc = "index"

# The anchors of headings are those that code hosts give them.
myst_heading_anchors = 6
# Blocks that name no language are output, layouts of folders, and pictures made of characters.
highlight_language = "none"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# Signatures of many parameters have one on each line.
python_maximum_signature_line_length = 80

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
# The source of each page is in the repository; copies of it would only be larger.
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
