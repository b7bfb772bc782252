"""Settings of schedules and scalars that are refused when they are made."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from purecompose import schedule
from purecompose.schedule import Product, cosine, hparam, linear, multi_step, scheduled, sequence, step
from purecompose.time import Timestamp


MAKE: Any = schedule  # without type checks, since the arguments are wrong on purpose
NUMBER = "expected a finite number"


def plain(timestamp: Timestamp) -> float:
    return 1.0 / (1 + timestamp.batch)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: MAKE.linear("1"), TypeError, f"linear: alpha_i: {NUMBER}, got '1' (str)"),
    (lambda: MAKE.linear(1.0, None), TypeError, "linear: alpha_f"),
    (lambda: MAKE.cosine(0.1), TypeError, "takes 0 positional arguments but 1 was given; it is cosine"),
    (lambda: MAKE.cosine(alpha_f=True), TypeError, "cosine: alpha_f"),
    (lambda: MAKE.constant(math.nan), ValueError, f"constant: alpha: {NUMBER}"),
    (lambda: MAKE.polynomial(0), ValueError, f"polynomial: power: {NUMBER} > 0"),
    (lambda: step("3ep", -0.1), ValueError, f"step: gamma: {NUMBER} >= 0"),
    (lambda: MAKE.exponential(0), ValueError, f"exponential: gamma: {NUMBER} > 0"),
    (lambda: MAKE.cosine_warm_restarts("5ba", 0.5), ValueError, f"t_mult: {NUMBER} >= 1"),
    (lambda: MAKE.cosine_warm_restarts("5ba", alpha_f=math.nan), ValueError, "cosine_warm_restarts: alpha_f"),
    (lambda: multi_step(["3ep"], math.inf), ValueError, "multi_step: gamma"),
    # Times
    (lambda: linear(warmup="-1ba"), ValueError, "linear: warmup: expected a time >= 0, got -1ba"),
    (lambda: linear(t_max="0ba"), ValueError, "linear: t_max: expected a time > 0"),
    (lambda: linear(t_max="10 parsecs"), ValueError, "no unit of time is called 'parsecs'"),
    (lambda: linear(t_max="10"), ValueError, "linear: t_max='10': the time '10' has no unit"),
    (lambda: MAKE.cosine(warmup=10), TypeError, "cosine: warmup=10: expected a Time"),
    (lambda: cosine(t_max="10sec"), ValueError, "cosine: t_max=10sec: a schedule cannot follow wall-clock"),
    (lambda: MAKE.constant(warmup="1h"), ValueError, "wall-clock"),
    (lambda: linear(t_max="5ba", warmup="6ba"), ValueError, "warmup=6ba is longer than t_max=5ba"),
    (lambda: step("0ep"), ValueError, "step: step_size: expected a time > 0, got 0ep"),
    (lambda: MAKE.exponential(0.9, "0ba"), ValueError, "exponential: decay_period"),
    (lambda: MAKE.cosine_warm_restarts("0dur"), ValueError, "cosine_warm_restarts: t_0: expected a time > 0"),
    # Milestones and parts
    (lambda: multi_step([]), ValueError, "expected at least one milestone"),
    (lambda: multi_step("30ep"), TypeError, "multi_step: milestones: expected a sequence of times, such as ['30ep'"),
    (lambda: multi_step(["3ep", "x"]), ValueError, "multi_step: milestones[1]='x': cannot read the time 'x'"),
    (lambda: sequence([], []), ValueError, "one schedule more than milestones, got 0 and 0"),
    (lambda: sequence([linear(), 1, 2], ["5ba"]), ValueError, "got 3 and 1"),
    (lambda: sequence([1, 2, 3], ["5ba", "5ba"]), ValueError, "expected increasing milestones, got 5ba after 5ba"),
    (lambda: sequence([1, 2], ["-5ba"]), ValueError, "sequence: milestones[0]: expected a time >= 0"),
    (lambda: sequence([1, 2], "5ba"), TypeError, "sequence: milestones: expected a sequence of times"),
    (lambda: sequence([2 * scheduled(plain), 2], ["5ba"]), TypeError, "plain) is a plain function of the timestamp"),
    (lambda: sequence([hparam("lr", 1.0), 2], ["5ba"]), TypeError, "products of them, got hparam('lr', 1.0)"),
    (lambda: MAKE.sequence(["linear", 2], ["5ba"]), TypeError, "expected numbers, schedules and products"),
    (lambda: MAKE.sequence("linear", []), TypeError, "expected several schedules"),
    # Scalars
    (lambda: hparam("", 0.1), TypeError, "expected a name"),
    (lambda: MAKE.hparam("lr", "0.1"), TypeError, f"hparam('lr'): default: {NUMBER}, got '0.1'"),
    (lambda: hparam("lr", math.nan), ValueError, "finite"),
    (lambda: math.inf * cosine(), ValueError, "finite"),
    (lambda: Product((2.0 * cosine(), 3.0)), TypeError, "multiply with"),
    (lambda: MAKE.Product(("lr",)), TypeError, NUMBER),
    (lambda: MAKE.scheduled(0.5), TypeError, "expected a function"),
    (lambda: MAKE.scheduled(cosine()), TypeError, "expected a function"),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_a_setting_is_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()
