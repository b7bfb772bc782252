"""All cases of the sweep, by name."""

from tests.foreign import foreign_layers, foreign_libraries, foreign_losses, foreign_sequences, foreign_structures


_FAMILIES = (foreign_layers, foreign_libraries, foreign_losses, foreign_sequences, foreign_structures)

CASES = {case.name: case for family in _FAMILIES for case in family.CASES}
assert len(CASES) == sum(len(family.CASES) for family in _FAMILIES), "two cases have one name"
