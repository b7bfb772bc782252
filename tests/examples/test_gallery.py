"""The programs of the gallery: compiled, resumed and microbatched, each agrees with its plain step."""

import importlib
import pathlib
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import compose
from tests.examples.agreement import repeated
from tests.helpers import assert_close, assert_same, run_steps


PROGRAMS = [
    "vae",
    "simclr",
    "ddpm",
    "wgan_gp",
    "maml",
]
UNCUT = {
    "wgan_gp": "its program has no Microbatches",
}
"""Programs that cut no batches, with the reason."""


def made(name: str, num_batches: int = 4) -> tuple[Any, Any, list[Any]]:
    """Return a program's step, state and batches in float64."""
    module = importlib.import_module(f"examples.{name}")
    step, state, batches = module.make(num_batches, torch.float64)
    return step, state, repeated(batches, num_batches)


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_programs_agree_with_the_step(name: str) -> None:
    step, state, batches = made(name)
    compiled = run_steps(pc.compile(step, backend="eager", quiet=True), state, batches)
    expected = run_steps(step, state, batches)
    assert_close(expected.params, compiled.params, rtol=1e-10, atol=1e-10)
    assert_close(expected.buffers, compiled.buffers, rtol=1e-10, atol=1e-10)
    assert_close(expected.metrics, compiled.metrics, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", PROGRAMS)
def test_resumed_programs_give_the_same_bits(name: str, tmp_path: pathlib.Path) -> None:
    step, start, batches = made(name)
    halfway = run_steps(step, start, batches[:2])
    pc.save(halfway, tmp_path / "halfway", step=step)
    resumed = pc.load(tmp_path / "halfway", like=start, step=step)
    assert_same(run_steps(step, resumed, batches[2:]), run_steps(step, halfway, batches[2:]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_microbatched_programs_agree_with_the_step(name: str) -> None:
    if name in UNCUT:
        pytest.skip(UNCUT[name])
    step, state, batches = made(name)
    cut = compose(step.program, step.algorithms, passes=step.passes, microbatches=4)
    first, second = run_steps(step, state, batches), run_steps(cut, state, batches)
    assert_close(first.params, second.params, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-10, atol=0)
