"""Algorithms that are wrong on purpose, by the law that detects them.

They prove that each law can be broken, and help authors of new laws.
"""

from tests.testing.mutants import absence, agreement, contract, purity, runs
from tests.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS", "Mutant"]

MUTANTS: tuple[Mutant, ...] = tuple(
    found
    for module in (purity, contract, absence, runs, agreement)
    for found in vars(module).values()
    if isinstance(found, Mutant)
)
"""All mutants, in the order of the laws."""
