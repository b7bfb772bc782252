"""Populations in compiled steps agree with the composed population, and so with each member's own run."""

from typing import Any

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import (
    Event,
    algorithms as alg,
    compose,
    every,
    loop_events,
    optim,
    population,
    stack_states,
    unstack_states,
)
from tests.helpers import changing, make_batches, make_cnn, make_mlp, make_state, noise, run_steps
from tests.transforms.compilation.compile_helpers import (
    DONATE,
    assert_agree,
    assert_runs_agree,
    average,
    compiled,
    scaling,
    sharpness,
    swap,
)


def members(net: Any, num: int = 4) -> list[pc.State]:
    """Return states with different weights, keys and learning rates."""
    optimizer = optim.sgd(pc.hparam("lr", 0.1), momentum=0.9)
    states = [make_state(net(seed), key=seed, optimizer=optimizer, duration="6ba") for seed in range(num)]
    return [state.replace(hparams={"lr": torch.tensor(0.1 / (1 + i))}) for i, state in enumerate(states)]


@DONATE
@pytest.mark.parametrize(
    ("share", "chunk_size"),
    [
        ("shared", None),
        pytest.param("each", None, marks=pytest.mark.slow),
        ("each", 3),
        pytest.param("shared", 2, marks=pytest.mark.slow),
        ("each", 2),
    ],
)
def test_compiled_populations_agree(share: str, chunk_size: int | None, donate: bool) -> None:
    one = compose(loop_events, [noise(), alg.label_smoothing(0.1), average(when=every(3))])
    many = population(one, 4, chunk_size=chunk_size, batches=share)
    alone = [one.init(state) for state in members(make_mlp)]
    batches: list[tuple[Tensor, ...]] = make_batches(6)
    if share == "each":
        batches = [tuple(torch.stack([m, m.flip(0), m, m.roll(1, 0)]) for m in batch) for batch in batches]
    fast = compiled(many, donate=donate)
    end = assert_runs_agree(many, fast, stack_states(alone), batches, tolerance=2e-5)
    own = [[tuple(m[i] for m in batch) if share == "each" else batch for batch in batches] for i in range(4)]
    for i, state in enumerate(unstack_states(end)):
        assert_agree(run_steps(one, alone[i], own[i]), state, tolerance=1e-4)


@DONATE
@pytest.mark.parametrize("chunk_size", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_compiled_populations_with_statistics_boundaries_slices_and_host_algorithms_agree(
    chunk_size: int | None, donate: bool
) -> None:
    bump = changing("bump", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs * 1.1), host=True, when=every(3))
    methods = [sharpness(when=every(2)), average(when=every(3)), swap(), bump]
    many = population(compose(loop_events, methods, microbatches=2), 2, chunk_size)
    state = many.init(stack_states(members(make_cnn, 2)))
    assert_runs_agree(many, compiled(many, donate=donate), state, make_batches(4, shape=(2, 6, 6)), tolerance=1e-4)


def test_the_graph_of_a_chunk_is_called_for_each_chunk() -> None:
    def num_operations(num: int, chunk_size: int | None) -> int:
        fast = compiled(population(compose(loop_events), num, chunk_size))
        fast(stack_states(members(make_mlp, num)), make_batches(1)[0])
        (variant,) = fast.variants()
        return variant.nodes

    assert num_operations(6, 2) == num_operations(2, None)
    assert num_operations(6, 4) > num_operations(4, None)  # chunks of 4 and 2 are parts of one graph


def test_the_results_of_chunks_keep_their_strides() -> None:
    many = population(compose(loop_events, [alg.channels_last()]), 4, 2)
    state = many.init(stack_states(members(make_cnn)))
    end = assert_runs_agree(many, compiled(many, donate=False), state, make_batches(3, shape=(2, 6, 6)), tolerance=1e-4)
    strides = [{name: param.stride() for name, param in one.params.items()} for one in (state, end)]
    assert strides[0] == strides[1]
    assert not state.params["0.weight"].is_contiguous()


def test_warmup_of_a_population_builds_what_the_run_uses() -> None:
    many = population(compose(loop_events, [scaling("s", Event.BATCH_END, 0.9, 2)]), 2)
    fast, state = compiled(many), stack_states(members(make_mlp, 2))
    fast.warmup(state, make_batches(1)[0])
    assert len(fast.variants()) == 2
    assert_runs_agree(many, fast, state, make_batches(6))
    assert [variant.hits for variant in fast.variants()] == [3, 3]
