"""Networks: modules as pure functions, keyed randomness inside them, layers and models."""

from purecompose._support import publish
from purecompose.nn import layers as layers, models as models


publish(__name__)
