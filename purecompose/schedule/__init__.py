"""Scalars that change during a run: schedules, named hyper-parameters, and their products.

Wherever an optimizer or a method takes a `Scalar`, it accepts a number, an `hparam`, a schedule, or a product
of them::

    optim.sgd(0.1 * cosine(warmup="500ba"))
    optim.sgd(hparam("lr", 0.1) * linear())
    optim.sgd(0.1 * sequence([linear(0.0, 1.0), multi_step(["30ep", "60ep"])], ["5ep"]))

Schedules can be multiplied (`*`), run one after the other (`sequence`), and be stretched in time (`scaled`). A schedule
is evaluated on the host, once per step, from the timestamp in plain Python; traced code receives its value as a 0-d
tensor, so a changing learning rate never compiles twice. Batch t (counted from 0) uses the value at t, without lag.
"""

from purecompose.schedule.curves import constant, cosine, linear, one_cycle, polynomial
from purecompose.schedule.from_torch import from_torch
from purecompose.schedule.periods import cosine_warm_restarts, exponential, multi_step, sequence, step
from purecompose.schedule.scalar import (
    Hparam,
    Product,
    Scalar,
    Schedule,
    collect,
    hparam,
    number,
    resolve,
    scaled,
    scheduled,
)


__all__ = [
    "Hparam",
    "Product",
    "Scalar",
    "Schedule",
    "collect",
    "constant",
    "cosine",
    "cosine_warm_restarts",
    "exponential",
    "from_torch",
    "hparam",
    "linear",
    "multi_step",
    "number",
    "one_cycle",
    "polynomial",
    "resolve",
    "scaled",
    "scheduled",
    "sequence",
    "step",
]
