"""Networks: modules as pure functions, keyed randomness inside them, layers and models."""

from purecompose.nn import layers as layers, models as models
