"""The sides of a task that compares methods: plain training, and training with one method at a time."""

import functools
from collections.abc import Callable, Mapping

from _curve import Curve
from _task import Settings, Side

from purecompose import Algorithm, algorithms as alg


PLAIN = "plain"
"""The name of the side without a method."""

Train = Callable[[list[Algorithm], int, Curve, Settings], int]
"""Train with methods, a seed and settings, and draw the curve. Returns the network's number of parameters."""


def sides(sources: Mapping[str, str], train: Train) -> dict[str, Side]:
    """Return a side for plain training, and one for each method, given by its source text."""

    def side(source: str, seed: int, curve: Curve, settings: Settings) -> int:
        return train([eval(source, dict(vars(alg)))], seed, curve, settings)

    return {PLAIN: functools.partial(train, []), **{name: functools.partial(side, sources[name]) for name in sources}}
