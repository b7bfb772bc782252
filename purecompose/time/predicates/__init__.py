"""When an algorithm acts: predicates over events and time that combine with `&`, `|`, `~` and print.

A predicate is a plain function `(event, state) -> bool` that also knows two things about itself: what is left
of it once the event is known (`at`), and what is left of it for the batches to come (`during`). "From
halfway on" is then a constant for half a run, and a training step asks only what is still open. An ordinary
function works in a predicate's place and is asked in every step.
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
