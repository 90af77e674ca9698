"""Integrations with other libraries, one module each.

The library, or the user, imports the module.
"""
