"""Shared helpers: argument checks, tables, files, devices, warnings; and the library's version."""

__version__ = "0.1.0"
"""The version of the library, MAJOR.MINOR.PATCH."""
