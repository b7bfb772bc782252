"""Keyed modules: torch's random functions and layers draw by a key within a scope."""
