"""The check in the first step that a loss is the mean over slices, of batches of any layout, in every kind of step."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, compose, loop_events
from purecompose.testing.process import played
from tests.helpers import make_batch, make_state, nt_xent


APART = r"examples together, but .* (as the mean over 2 slices|beside other examples).*losses\.over_batch"


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs - outputs.mean(0), targets)


def spread(outputs: Tensor, targets: Tensor, weight: Any) -> Tensor:
    return F.cross_entropy(outputs, targets) - weight * outputs.std(0).mean()


SCHEDULED = functools.partial(spread, weight=pc.schedule.linear(0.0, 1.0))  # both are 0 in the first step
NAMED = functools.partial(spread, weight=pc.hparam("weight", 0.0))


@pytest.mark.parametrize(
    "loss, is_compiled, num_members",
    [
        (nt_xent, False, None),
        (SCHEDULED, False, None),
        (NAMED, True, 2),
        (summed, False, None),
        (centred, False, None),
        (centred, True, None),
        (centred, False, 2),
        (centred, True, 2),
    ],
)
def test_a_loss_that_is_not_a_mean_is_found_in_the_first_sliced_step(loss, is_compiled, num_members):
    state = make_state(loss=loss, duration="4ba")
    if num_members:
        state = pc.stack_states([state, make_state(loss=loss, duration="4ba", key=1)])

    def step(microbatches: int) -> pc.Step:
        made = compose(loop_events, microbatches=microbatches)
        made = pc.population(made, num_members) if num_members else made
        return pc.compile(made, backend="eager", quiet=True, donate=False) if is_compiled else made

    step(1)(state, make_batch())
    with pytest.raises(ValueError, match=APART):
        step(4)(state, make_batch())


class Noisy(nn.Module):
    """A loss that draws, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(self.drop(outputs), targets)


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a difference of two large numbers, as that of a critic's scores may be."""
    return (1e4 + outputs[:, 0]).mean() - (1e4 + outputs[:, 1]).mean()


@pytest.mark.parametrize("num_members", [None, 2])
def test_random_rounded_and_partly_ignored_losses_are_not_taken_for_coupled(num_members):
    step = compose(loop_events, microbatches=4)
    inputs, targets = make_batch()
    for state, batch in (
        (make_state(loss=Noisy()), (inputs, targets)),
        (make_state(loss=shifted), make_batch(size=50)),
        (make_state(), (inputs, targets.index_fill(0, torch.arange(5), -100))),
    ):
        if num_members:
            pc.population(step, num_members)(pc.stack_states([state] * num_members), batch)
        else:
            step(state, batch)


@pytest.mark.parametrize("num_members", [None, 2])
def test_a_loss_without_its_number_of_terms_is_found_by_a_slice_in_which_nothing_counts(num_members):
    inputs, targets = make_batch()
    targets = targets.index_fill(0, torch.arange(2), -100)  # all of the first slice
    state, step = (
        make_state(loss=lambda outputs, targets: F.cross_entropy(outputs, targets)),
        compose(loop_events, microbatches=4),
    )
    if num_members:
        state, step = pc.stack_states([state] * num_members), pc.population(step, num_members)
    with pytest.raises(ValueError, match=r"as the mean over 2 slices.*num_terms"):
        step(state, (inputs, targets))


class Positions(nn.Module):
    """Logits of each position of sequences (T, N, 4): as they are, flattened, or of the last position only."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(4, 3)

    def forward(self, inputs: Any) -> Tensor:
        logits = self.linear(inputs)
        return logits if self.form == "each" else logits[-1] if self.form == "last" else logits.flatten(0, 1)


class Nodes(nn.Module):
    """Logits of each node of a batch of graphs, or of each graph."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        logits = self.linear(batch["x"])
        sizes = batch["sizes"].tolist()
        if self.form == "graphs":
            return torch.stack([one.mean(0) for one in logits.split(sizes)])
        return logits if self.form == "nodes" else logits.repeat(2, 1)


class Flat:
    """Cross entropy over all positions or nodes, which it counts; `is_centred` compares them with each other."""

    def __init__(self, is_centred: bool) -> None:
        self.is_centred = is_centred

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.flatten(0, -2)
        targets = targets.flatten().repeat(len(outputs) // targets.numel())
        return F.cross_entropy(outputs - outputs.mean(0) if self.is_centred else outputs, targets)

    def num_terms(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()


def part_of(batch: Any, start: int, stop: int) -> Any:
    nodes = slice(int(batch["sizes"][:start].sum()), int(batch["sizes"][:stop].sum()))
    y = batch["y"][nodes] if len(batch["y"]) == len(batch["x"]) else batch["y"][start:stop]
    return {"x": batch["x"][nodes], "sizes": batch["sizes"][start:stop], "y": y}


GRAPHS = batches.Splitter(lambda batch: len(batch["sizes"]), part_of)
SIZES = (3, 2, 5, 1, 4, 2)


def made(form: str, is_centred: bool) -> tuple[State, Any]:
    """Return a state and a batch of six sequences or graphs."""
    torch.manual_seed(0)
    generator, loss = torch.Generator().manual_seed(0), Flat(is_centred)
    if form in ("each", "flattened", "last"):
        inputs = torch.randn(5, 6, 4, generator=generator)
        shape = (6,) if form == "last" else (5, 6)
        return make_state(Positions(form), loss=loss, batch_dim=1), (
            inputs,
            torch.randint(3, shape, generator=generator),
        )
    num = len(SIZES) if form == "graphs" else sum(SIZES)
    x, y = torch.randn(sum(SIZES), 4, generator=generator), torch.randint(3, (num,), generator=generator)
    options = {"input_field": batches.AS_ARGUMENT, "target_field": "y", "splitter": GRAPHS}
    return make_state(Nodes(form), loss=loss, **options), {"x": x, "sizes": torch.tensor(SIZES), "y": y}


def take_step(how: str, state: State, batch: Any) -> None:
    step = compose(loop_events, microbatches=3 if how == "slices" else 1)
    if how == "slices":
        step(state, batch)
    else:
        played(step, 2)(functools.partial(lambda one, s, b: one(s, b), s=state, b=batch))


@pytest.mark.parametrize("how", ["slices", "processes"])
@pytest.mark.parametrize("form", ["each", "flattened", "last", "graphs", "nodes", "edges"])
def test_batches_without_rows_are_checked(form, how):
    take_step(how, *made(form, is_centred=False))
    with pytest.raises(ValueError, match=APART):
        take_step(how, *made(form, is_centred=True))


class Capacity(nn.Module):
    """A mixture of experts, each of which takes the first examples: `least`, or a share of the batch."""

    def __init__(self, least: int = 2, share: float = 0.0) -> None:
        super().__init__()
        self.least, self.share = least, share
        self.router, self.experts = nn.Linear(4, 2), nn.Linear(4, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = F.one_hot(self.router(inputs).argmax(1), 2)
        is_taken = (chosen.cumsum(0) <= max(self.least, int(self.share * len(inputs)))) & (chosen > 0)
        return (self.experts(inputs).unflatten(1, (2, 3)) * is_taken[..., None]).sum(1)


def test_a_capacity_is_reported_whatever_the_batch_and_draws_are_not():
    step = compose(loop_events, microbatches=2)
    for seed in range(3):
        torch.manual_seed(seed)
        net = Capacity(1, 0.25)
        with pytest.warns(UserWarning, match="outputs for an example depend on the other examples"):
            step(make_state(net), make_batch(seed, size=16))
        step(make_state(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))), make_batch(seed, size=16))


@pytest.mark.parametrize("how", ["eager", "compiled", "population", "accumulation"])
def test_the_check_is_repeated_in_later_batches(how):
    def masked(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=-100) / (targets >= 0).sum()

    methods = [alg.gradient_accumulation(2)] if how == "accumulation" else []
    step, state = compose(loop_events, methods, microbatches=None if methods else 2), make_state(loss=masked)
    if how == "population":
        step, state = pc.population(step, 2), pc.stack_states([state, make_state(loss=masked, key=1)])
    step = pc.compile(step, backend="eager", quiet=True) if how == "compiled" else step
    state, (inputs, targets) = step.init(state), make_batch(size=8)
    for _ in range(3):
        state = step(state, (inputs, targets))
    with pytest.raises(ValueError, match=APART):
        step(state, (inputs, targets.index_fill(0, torch.arange(3), -100)))


def test_an_evaluation_over_several_batches_is_checked():
    state, data = make_state(loss=lambda outputs, targets: summed(outputs, targets).sqrt()), [make_batch()] * 2
    assert pc.evaluate(state, data[:1])["loss"] > 0
    with pytest.raises(ValueError, match=APART):
        pc.evaluate(state, data)


@pytest.mark.parametrize("make", [lambda: nn.CrossEntropyLoss(reduction="sum"), lambda: nn.MSELoss(reduction="none")])
def test_losses_with_another_reduction_are_refused(make):
    for loss in (
        make(),
        functools.partial(F.cross_entropy, reduction="sum"),
        functools.partial(pc.losses.mse, reduction="none"),
    ):
        with pytest.raises(ValueError, match=r"has reduction='(sum|none)'.*reduction='mean'"):
            make_state(loss=loss)


def of_stage(stage: Any) -> tuple[Any, ...]:
    return pc.loop.Microbatches(pc.loop.Grad(stage)), pc.loop.update, pc.loop.advance


def contrast(state: State) -> State:
    outputs, state = state.call(state.batch[0])
    return state.replace(loss=nt_xent(outputs, state.batch[1]))


def test_a_stage_that_is_declared_has_the_whole_batch():
    whole = compose(of_stage(contrast))(make_state(), make_batch())
    declared = compose(of_stage(pc.losses.over_batch(contrast)), microbatches=4)(make_state(), make_batch())
    torch.testing.assert_close(declared.params, whole.params, rtol=0, atol=0)
    with pytest.raises(ValueError, match="several processes with a stage of your own"):
        played(compose(of_stage(pc.losses.over_batch(contrast))), 2)(lambda step: step(make_state(), make_batch()))


def test_slices_of_a_stage_are_weighted_by_its_terms():
    def own(state: State) -> State:
        outputs, state = state.call(state.batch[0])
        return state.replace(loss=F.cross_entropy(outputs, state.batch[1]))

    inputs, targets = make_batch()
    batch = inputs, targets.index_fill(0, torch.arange(3), -100)
    with pytest.raises(ValueError, match="the loss of the stage own .*num_terms"):
        compose(of_stage(own), microbatches=2)(make_state(), batch)
    own.num_terms = lambda state: (state.batch[1] >= 0).sum()  # pyright: ignore[reportFunctionMemberAccess]
    whole, cut = (compose(of_stage(own), microbatches=k)(make_state(), batch) for k in (1, 3))
    torch.testing.assert_close(cut.params, whole.params)


@pytest.mark.filterwarnings("error:it is not known")
def test_batch_normalisation_is_checked_in_half_precision() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    state, step = make_state(net, precision="bf16", loss=centred), compose(loop_events, microbatches=2)
    with pytest.raises(ValueError, match=APART):
        step(state, make_batch())
    step(make_state(net, precision="bf16"), make_batch())


def test_a_step_that_is_differentiated_is_checked() -> None:
    state = make_state(loss=centred, optimizer=pc.optim.sgd(pc.hparam("lr", 0.1)))
    state = state.replace(hparams={"lr": torch.tensor(0.1, requires_grad=True)})
    with pytest.raises(ValueError, match=APART):
        compose(loop_events, microbatches=2)(state, make_batch())


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, player: str, inputs: Tensor) -> Tensor:
        return self.get_submodule(player)(inputs)


@pytest.mark.parametrize("is_coupled", [False, True])
def test_a_scope_that_reads_what_an_earlier_one_sets_is_checked(is_coupled: bool) -> None:
    def first(state: State) -> State:
        outputs, state = state.call(["first", state.batch[0]])
        loss = F.cross_entropy(outputs, state.batch[1])
        return state.replace(loss=loss, metrics={**state.metrics, "first": loss.detach()})

    def second(state: State) -> State:
        outputs, state = state.call(["second", state.batch[0]])
        loss = centred(outputs, state.batch[1]) if is_coupled else F.cross_entropy(outputs, state.batch[1])
        return state.replace(loss=loss, metrics={**state.metrics, "gap": state.metrics["first"] - loss.detach()})

    players = (("first.*", first), ("second.*", second))
    nodes = [(pc.loop.Microbatches(pc.loop.Grad(stage, wrt=wrt)), pc.loop.update(wrt=wrt)) for wrt, stage in players]
    step, state = compose([*nodes[0], *nodes[1], pc.loop.advance], microbatches=2), make_state(Players())
    if not is_coupled:  # without the warning that it is not known
        assert "gap" in step(state, make_batch()).metrics
        return
    with pytest.raises(ValueError, match=APART):
        step(state, make_batch())


def test_slices_share_no_draws_where_the_network_has_two_views_of_each_example() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, inputs: Tensor) -> Tensor:
            return F.dropout(self.weight.expand(len(inputs), 32), 0.5)

    seen: list[Tensor] = []

    def views(state: State) -> State:
        outputs, state = state.call(torch.cat([state.batch[0], state.batch[0]]))
        seen.append(outputs.detach())
        return state.replace(loss=outputs.mean())

    compose(of_stage(views), microbatches=4)(make_state(Masks()), make_batch(size=8))
    rows = torch.cat(seen[:4])  # the step's, before those of its check
    assert rows.shape == (16, 32) and len(rows.unique(dim=0)) == 16


@pytest.mark.parametrize("size", [0.01, 1.0])
def test_a_stage_before_a_network_with_dropout_that_draws_for_the_batch_is_reported(size: float) -> None:
    def noisy(state: State) -> State:
        inputs, targets = state.batch
        noise = pc.random.normal(state.rng("noise"), tuple(inputs.shape))
        return state.replace(batch=(inputs + size * noise, targets))

    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    gradient = pc.loop.Microbatches(pc.loop.Grad(noisy, pc.loop.forward, pc.loop.loss), microbatches=2)
    with pytest.warns(UserWarning, match="stages before it.*state.example_rng"):
        compose([gradient, pc.loop.update, pc.loop.advance])(make_state(net), make_batch(0, size=16))
