"""The functional cores: which there are, in a plain loop, and surgery of plain networks."""

import copy
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import algorithms as alg, functional
from purecompose.algorithms import FACTORIES
from purecompose.functional import apply_surgery
from purecompose.nn import models
from tests import pages
from tests.helpers import assert_same, make_state


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
    cutout, acted, number = run_page()["cutout"], [], 0

    def noting(event: pc.Event, state: pc.State) -> Any:
        if event is not pc.Event.INIT:
            acted.append(number)
        return cutout.apply(event, state)

    step = pc.compose(pc.loop_events, [dataclasses.replace(cutout, apply=noting)])
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="8ba")
    state, batch = step.init(state), (torch.rand(4, 1, 4, 4), torch.arange(4) % 2)
    while number < 8:
        number += 1
        state = step(state, batch)
    assert acted == [2, 4]


# The core


def convolutional() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.GroupNorm(2, 16),
    )


def language() -> Any:
    torch.manual_seed(0)
    return models.gpt(32, 8, width=16, depth=1)


METHODS = [
    (language, alg.activation()),
    (language, alg.alibi()),
    (convolutional, alg.blurpool(min_channels=8)),
    (language, alg.factorize(min_features=8, latent_features=2)),
    (language, alg.gated_linear_units("silu")),
    (convolutional, alg.ghost_batchnorm(2)),
    (language, alg.logit_softcap(1.0)),
    (convolutional, alg.low_precision_groupnorm()),
    (language, alg.low_precision_layernorm()),
    (language, alg.qk_norm()),
    (convolutional, alg.squeeze_excite(2, 8)),
    (lambda: models.resnet8(3, 10, width=4), alg.stochastic_depth(drop_rate=0.5)),
    (language, alg.value_embeddings()),
    (convolutional, alg.weight_standardization(1)),
]


@pytest.mark.parametrize(("make", "method"), METHODS, ids=lambda one: getattr(one, "name", ""))
def test_a_copy_of_the_network_is_changed(make: Any, method: pc.Algorithm) -> None:
    net = make()
    before, new = copy.deepcopy(net), apply_surgery(net, method)
    assert repr(new) != repr(net) == repr(before)
    assert_same(net.state_dict(), before.state_dict())
    storages = {tensor.untyped_storage().data_ptr() for tensor in net.state_dict().values()}
    assert storages.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in new.state_dict().values())
    state = pc.compose(pc.loop_events, [method]).init(make_state(net, precision="bf16", key=0))
    assert_same(new.state_dict(), pc.to_module(state).state_dict())


def test_modes_frozen_parameters_and_ties_are_kept() -> None:
    net, method = convolutional(), alg.blurpool(min_channels=8)
    net[3].weight.requires_grad_(False)
    net[1].eval()
    new: Any = apply_surgery(net, method)
    assert not new[3].conv.weight.requires_grad and new[0].weight.requires_grad
    assert [module.training for module in (new, new[1], new[3].conv)] == [True, False, True]
    assert not any(module.training for module in apply_surgery(net.eval(), method).modules())
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    tied[1].weight = tied[0].weight
    new = apply_surgery(tied, alg.ghost_batchnorm())
    assert new[0].weight is new[1].weight is not tied[0].weight


def test_new_weights_only_depend_on_the_key() -> None:
    first, again, other = (apply_surgery(convolutional(), alg.squeeze_excite(2, 8), key=key) for key in (1, 1, 2))
    assert_same(first.state_dict(), again.state_dict())
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


def test_other_methods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a method that replaces modules, got mixup\("):
        apply_surgery(convolutional(), alg.mixup())
