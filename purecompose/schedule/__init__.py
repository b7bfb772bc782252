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

from purecompose._support import publish
from purecompose.schedule.curves import (
    constant as constant,
    cosine as cosine,
    linear as linear,
    one_cycle as one_cycle,
    polynomial as polynomial,
)
from purecompose.schedule.periods import (
    cosine_warm_restarts as cosine_warm_restarts,
    exponential as exponential,
    from_torch as from_torch,
    multi_step as multi_step,
    sequence as sequence,
    step as step,
)
from purecompose.schedule.scalar import (
    Hparam as Hparam,
    Product as Product,
    Scalar as Scalar,
    Schedule as Schedule,
    collect as collect,
    hparam as hparam,
    number as number,
    resolve as resolve,
    scaled as scaled,
    scheduled as scheduled,
)


publish(__name__)
