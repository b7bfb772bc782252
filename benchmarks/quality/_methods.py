"""The sides of a task that compares methods: plain training, training with one method at a time, and with several."""

import functools
from collections.abc import Callable, Mapping, Sequence

from _curve import Curve
from _task import Settings, Side

from purecompose import Algorithm, algorithms as alg


PLAIN = "plain"
"""The name of the side without a method."""
JOINT = " + "
"""What joins the names of methods to that of the side that has all of them."""

Train = Callable[[list[Algorithm], int, Curve, Settings], int]
"""Train with methods, a seed and settings, and draw the curve. Returns the network's number of parameters."""


def sides(sources: Mapping[str, str], together: Sequence[Sequence[str]], train: Train) -> dict[str, Side]:
    """Return a side for plain training, for each method, given by its source text, and for each group of methods."""

    def side(names: Sequence[str], seed: int, curve: Curve, settings: Settings) -> int:
        return train([eval(sources[name], dict(vars(alg))) for name in names], seed, curve, settings)

    groups = ((), *((name,) for name in sources), *together)
    return {JOINT.join(names) or PLAIN: functools.partial(side, names) for names in groups}
