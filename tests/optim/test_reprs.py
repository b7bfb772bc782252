"""Optimizers and schedules print as the call that makes them."""

import pytest

from purecompose import optim, schedule
from purecompose.schedule import hparam, scheduled


@pytest.mark.parametrize(
    "text",
    [
        "sgd(lr=0.1)",
        "sgd(lr=0.1, momentum=0.9, nesterov=True)",
        "adam(lr=0.01)",
        "adamw(lr=0.01, weight_decay=0.01)",
        "sgd(lr=0.1, groups={'*.bias': {'weight_decay': 0.0}})",
        "sgd(lr=0.1 * cosine(alpha_f=0.0, warmup='2ep', t_max='1.0dur') * hparam('lr', 1.0))",
        "adam(lr=linear(alpha_i=1.0, alpha_f=0.5, warmup='0ba', t_max='9ba'), betas=(0.8, 0.9))",
    ],
)
def test_what_prints_makes_the_same_again(text: str) -> None:
    names = {**vars(optim), **vars(schedule), "hparam": hparam}
    optimizer = eval(text, names)
    assert repr(optimizer) == text
    assert eval(repr(optimizer), names) == optimizer


def test_a_schedule_of_ones_own_prints_by_its_name() -> None:
    def halved(timestamp: object) -> float:
        return 0.5

    assert repr(scheduled(halved)).startswith("scheduled(") and "halved" in repr(scheduled(halved))
