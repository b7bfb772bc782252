"""Shared helpers: argument checks, tables, files, devices, warnings."""
