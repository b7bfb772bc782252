"""Algorithms that are wrong on purpose, by the law that finds them out."""
