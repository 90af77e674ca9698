"""The documentation as a site: its pages, its navigation, and the reference that is made from the
code."""
