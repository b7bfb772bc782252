"""Methods share their cores, and the page's loop draws again in every batch."""

import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import functional
from purecompose.algorithms import FACTORIES
from tests import pages


DOCS = pages.ROOT / "docs"


def test_every_method_that_has_a_core_shares_it_here() -> None:
    for name in FACTORIES:
        module: Any = inspect.getmodule(FACTORIES[name])
        own = {name for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__}
        cores = {member for member in own if re.fullmatch("[a-z].*_batch", member)}
        assert cores <= set(vars(functional)), name


def run_page() -> dict[str, Any]:
    """Return the names defined by the code blocks of the page on methods."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for block in re.findall(r"```python\n(.*?)```", (DOCS / "algorithms.md").read_text(), re.S):
            exec(compile(block, "algorithms.md", "exec"), names)  # noqa: S102
    return names


# Lightning reads forms of trees in a way that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_pages_loop_has_a_key_for_every_batch_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for name in ("cutout_batch", "mixup_batch"):
        core = getattr(functional, name)

        def noting(key: torch.Tensor, *args: Any, core: Any = core, **settings: Any) -> Any:
            keys.append(tuple(key.tolist()))
            return core(key, *args, **settings)

        monkeypatch.setattr(functional, name, noting)
    pages.run_page("own_loop.md")
    num = 2 * 3 * 23  # two cores in three epochs; blocks for other libraries come after them
    assert len(set(keys[:num])) == len(keys[:num]) == num


def test_the_pages_narrower_match_acts_in_every_second_batch_of_the_first_half() -> None:
    early, acted, number = run_page()["early"], [], 0

    def noting(event: pc.Event, state: pc.State) -> Any:
        if event is not pc.Event.INIT:
            acted.append(number)
        return early.apply(event, state)

    step = pc.compose(pc.loop_events, [dataclasses.replace(early, apply=noting)])
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="8ba")
    state, batch = step.init(state), (torch.rand(4, 1, 4, 4), torch.arange(4) % 2)
    while number < 8:
        number += 1
        state = step(state, batch)
    assert acted == [2, 4]
