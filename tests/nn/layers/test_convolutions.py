"""Max pooling with smoothing in the place of another layer."""

import torch
from torch import nn

from purecompose.nn.layers import BlurMaxPool2d


class Gained(nn.MaxPool2d):
    """A subclass that pools like its base class and has an additional attribute."""

    def __init__(self) -> None:
        super().__init__((3, 2), 2, 1, ceil_mode=True)
        self.gain, self.inner, self.tag = nn.Parameter(torch.ones(2)), nn.Linear(2, 2), "mine"


def test_a_layer_made_from_another_has_its_settings_and_attributes() -> None:
    torch.manual_seed(0)
    pool, images = Gained().eval(), torch.randn(2, 3, 7, 6)
    blurred = BlurMaxPool2d.of(pool)
    expected = BlurMaxPool2d((3, 2), 2, 1, ceil_mode=True)
    assert type(blurred) is BlurMaxPool2d and torch.equal(blurred(images), expected(images))
    assert blurred(images).shape == pool(images).shape and not torch.equal(blurred(images), pool(images))
    assert blurred.gain is pool.gain and blurred.inner is pool.inner and blurred.tag == "mine"
    assert blurred.extra_repr() == expected.extra_repr() and not blurred.training
