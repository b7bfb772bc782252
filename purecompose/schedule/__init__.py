"""Scalars that move: schedules, named hyper-parameters, and their products.

Wherever an optimizer or a method takes a `Scalar`, it takes a number, an `hparam`, a schedule, or a product
of them::

    optim.sgd(0.1 * cosine(warmup="500ba"))
    optim.sgd(hparam("lr", 0.1) * linear())

A schedule is evaluated on the host, once a step, from the timestamp in plain Python; traced code sees its
value as a 0-d tensor, so a moving learning rate never compiles twice. Batch t (counted from 0) uses the value
at t: no lag.
"""

from purecompose.schedule.curves import constant, cosine, linear
from purecompose.schedule.scalar import (
    Hparam,
    Product,
    Scalar,
    Schedule,
    collect,
    hparam,
    number,
    resolve,
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
    "hparam",
    "linear",
    "number",
    "resolve",
    "scheduled",
]
