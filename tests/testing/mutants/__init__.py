"""Algorithms that are wrong on purpose, by the law that detects them.

They prove that each law can be broken, and help authors of new laws.
"""

from tests.testing.mutants import (
    absence,
    compiled,
    contract,
    evaluation,
    finite,
    gradients,
    matching,
    numbers,
    parts,
    purity,
    resume,
)
from tests.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = tuple(
    found
    for module in (purity, matching, contract, absence, evaluation, gradients, finite, parts, numbers, compiled, resume)
    for found in vars(module).values()
    if isinstance(found, Mutant)
)
"""All mutants, in the order of the laws."""
