"""Keyed modules: within a scope, torch's random functions and layers draw from a key."""
