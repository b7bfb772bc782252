"""Networks: modules as pure functions, keyed randomness inside them, layers and models."""

from purecompose._support.exports import lister
from purecompose.nn import layers as layers, models as models


__dir__ = lister(__name__)
