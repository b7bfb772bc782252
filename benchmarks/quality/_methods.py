"""The sides of a task that compares methods: plain training, training with one method at a time, and with several."""

from collections.abc import Callable, Mapping, Sequence

from _curve import Curve
from _fit import Parts
from _task import Settings, Side

from purecompose import algorithms as alg, optim


PLAIN = "plain"
"""The name of the side without a method."""
JOINT = " + "
"""What joins the names of methods to that of the side that has all of them."""


def sides(
    sources: Mapping[str, str],
    together: Sequence[Sequence[str]],
    train: Callable[[int, Curve, Settings, Parts], int],
    optimizer: optim.Optimizer,
    settings: Settings,
) -> dict[str, Side]:
    """Return a side for plain training, for each method, given by its source text, and for each group of methods.

    Args:
        sources: The methods by name.
        together: Groups of names.
        train: Train with a seed, settings and the parts of a recipe, draw the curve, and return the network's number of
            parameters.
        optimizer: The optimizer of all sides.
        settings: The settings of all sides. They also get "methods", the source texts.
    """

    def train_side(seed: int, curve: Curve, settings: Settings) -> int:
        methods = [eval(source, dict(vars(alg))) for source in settings["methods"]]
        return train(seed, curve, settings, Parts(methods, optimizer))

    groups = ((), *((name,) for name in sources), *together)
    return {
        JOINT.join(names) or PLAIN: Side(train_side, {**settings, "methods": [sources[name] for name in names]})
        for names in groups
    }
