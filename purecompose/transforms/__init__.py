"""Transforms of a step: compilation, populations, several processes."""
