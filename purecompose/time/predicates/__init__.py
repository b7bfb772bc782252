"""Predicates over events and time, which decide when an algorithm acts; they combine with `&`, `|` and `~`.

A predicate is a function `(event, state) -> bool` that can also be simplified in two ways: for a known event (`at`),
and for the next batches (`during`). "From halfway on" is then a constant for half a run, and a training step
evaluates only predicates that are not constant. An ordinary function can be used as a predicate and is evaluated in
every step.
"""

from purecompose.time.predicates.logic import ALWAYS, NEVER, Custom, Predicate, as_predicate
from purecompose.time.predicates.timing import after, before, between, epoch_ends, every, on, through


__all__ = [
    "ALWAYS",
    "Custom",
    "NEVER",
    "Predicate",
    "after",
    "as_predicate",
    "before",
    "between",
    "epoch_ends",
    "every",
    "on",
    "through",
]
