"""The documentation as a site: its pages, its navigation, and the reference generated from the
code."""
