"""HTML pages that open anywhere: one file, no scripts, no network access.

Scope: elements, charts and style. The callers supply the content.
"""
