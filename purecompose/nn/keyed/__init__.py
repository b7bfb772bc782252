"""Modules that draw by a key: torch's random functions and layers within a scope."""
