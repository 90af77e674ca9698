"""HTML pages that open anywhere: one file, no script, nothing from a network.

Scope: elements, charts and style. What a page says is its caller's.
"""
