"""Random numbers as pure functions of keys; no global generator."""

from purecompose.random.distributions import beta, exponential, gamma, truncated_normal
from purecompose.random.draws import bernoulli, bits, choice, normal, permutation, randint, uniform
from purecompose.random.keys import Rng, fold_in, key, salt, split
from purecompose.random.philox import philox4x32


__all__ = [
    "Rng",
    "bernoulli",
    "beta",
    "bits",
    "choice",
    "exponential",
    "fold_in",
    "gamma",
    "key",
    "normal",
    "permutation",
    "philox4x32",
    "randint",
    "salt",
    "split",
    "truncated_normal",
    "uniform",
]
