"""Sharded states: each of several processes holds some rows of every parameter, and of what is kept for it."""
