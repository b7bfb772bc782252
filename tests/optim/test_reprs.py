"""Optimizers and schedules print as the call that makes them."""

import pytest
import torch

from purecompose import optim, schedule
from purecompose.schedule import hparam, scheduled


@pytest.mark.parametrize(
    "text",
    [
        "sgd(lr=0.1)",
        "sgd(lr=0.1, momentum=0.9, nesterov=True)",
        "adam(lr=0.01)",
        "adamw(lr=0.01, weight_decay=0.1)",
        "adamw(weight_decay=0.0)",
        "decoupled_adamw(betas=(0.9, 0.999))",
        "decoupled_sgdw(lr=2.0, momentum=0.9, nesterov=True, weight_decay=0.001)",
        "rmsprop(alpha=0.9, centered=True)",
        "lion(lr=0.001, weight_decay=1.0)",
        "muon(lr=0.02, adjust_lr='match_rms_adamw', groups={'a.*': {'nesterov': False}})",
        "adafactor(eps=(1e-30, 0.001))",
        "by_pattern({'blocks.*': muon(lr=0.02), '*.bias': sgd(lr=0.1)}, adamw(lr=0.0003))",
        "from_torch(torch.optim.NAdam, betas=(hparam('b', 0.8), 0.9), lr=0.1, groups={'*.bias': {'lr': 0.2}})",
        "sgd(lr=0.1, groups={'*.bias': {'weight_decay': 0.0}})",
        "sgd(lr=0.1 * cosine(alpha_f=0.0, warmup='2ep', t_max='1.0dur') * hparam('lr', 1.0))",
        "adam(lr=linear(alpha_i=1.0, alpha_f=0.5, warmup='0ba', t_max='9ba'), betas=(0.8, 0.9))",
    ],
)
def test_the_repr_rebuilds_an_equal_object(text: str) -> None:
    names = {**vars(schedule), **vars(optim), "hparam": hparam, "torch": torch}
    optimizer = eval(text, names)
    assert repr(optimizer) == text
    assert eval(repr(optimizer), names) == optimizer


def test_a_user_defined_schedule_prints_by_its_name() -> None:
    def halved(timestamp: object) -> float:
        return 0.5

    assert repr(scheduled(halved)).startswith("scheduled(") and "halved" in repr(scheduled(halved))
