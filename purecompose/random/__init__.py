"""Random numbers as pure functions of keys; no global generator."""

from purecompose._support import publish
from purecompose.random.distributions import beta as beta, exponential as exponential, gamma as gamma
from purecompose.random.draws import (
    bernoulli as bernoulli,
    bits as bits,
    choice as choice,
    normal as normal,
    permutation as permutation,
    randint as randint,
    uniform as uniform,
)
from purecompose.random.keys import Rng as Rng, fold_in as fold_in, key as key, salt as salt, split as split


publish(__name__)
