"""data_parallel: several processes compute the same as a single one."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop_events, on, tree
from purecompose.algorithms._around_updates import perturb_params
from purecompose.core.context import Layout
from purecompose.core.ranks import Ranks
from purecompose.core.scopes import Grad, Microbatches
from purecompose.loop import forward, loss, update
from purecompose.testing.process import in_process_group, played
from tests.helpers import Routed, changing, loss_of, make_batch, make_mlp, make_state
from tests.transforms.parallel_scenarios import METRICS, SCENARIOS, evaluated, results, run, told, trained


ONLY_ITS_OWN = ("batch norm in slices", "ghost_batchnorm", "sam per rank", "noise scale")
"""Scenarios whose result depends on how a batch is divided."""

SIZES = [pytest.param(2, id="2 ranks"), pytest.param(3, id="3 ranks", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of several processes."""
    return in_process_group(results, request.param, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_have_the_same_state(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(tree.equal(found[name], ranks[0][name]) for found in ranks)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ONLY_ITS_OWN])
def test_the_state_equals_that_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for ours, theirs in zip(ranks[0][name], map(told, run(SCENARIOS[name])), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_run_equals_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert tree.equal(found[".fit"], ranks[0][".fit"])
    torch.testing.assert_close(ranks[0][".fit"], [told(trained())], rtol=1e-5, atol=1e-6)


def test_ranks_weigh_their_statistics_by_examples(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["batch norm in slices"]
    inputs, targets = SCENARIOS["batch norm in slices"].batches()[0]
    step, size = compose(loop_events, microbatches=2), len(inputs) // len(ranks)
    start = make_state(SCENARIOS["batch norm in slices"].net(), duration="100ba", batches_per_epoch=10)
    parts = [step(start, (inputs[i : i + size], targets[i : i + size])) for i in range(0, len(inputs), size)]
    for name, buffer in parts[0].buffers.items():
        own = torch.stack([part.buffers[name] for part in parts])
        torch.testing.assert_close(found[0][f".buffers['{name}']"], own.double().mean(0).to(buffer.dtype))
    assert found[-1][".buffers['1.num_batches_tracked']"] == 6


def test_sam_per_rank_moves_each_part_by_its_own_gradient(ranks: list[dict[str, Any]]) -> None:
    inputs, targets = SCENARIOS["sam per rank"].batches()[0]
    net, cross_entropy = SCENARIOS["sam per rank"].net(), torch.nn.functional.cross_entropy
    params = {name: param.detach() for name, param in net.named_parameters()}

    def gradient(params: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
        def mean_loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return cross_entropy(torch.func.functional_call(net, params, (inputs[part],)), targets[part])

        return torch.func.grad(mean_loss)(params)

    bounds = {2: (0, 4, 8), 3: (0, 3, 6, 8)}[len(ranks)]
    parts = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    there = [gradient(perturb_params(params, gradient(params, part), 0.5), part) for part in parts]
    for name, param in params.items():
        mean = sum(grads[name] * (part.stop - part.start) for grads, part in zip(there, parts, strict=True)) / 8
        torch.testing.assert_close(ranks[0]["sam per rank"][0][f".params['{name}']"], param - 0.1 * mean)


def test_a_resumed_run_continues_with_the_same_environment_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        whole, resumed = found[".resumed"]
        assert tree.equal(resumed, whole) and tree.equal(whole, ranks[0][".resumed"][0])


def test_processes_that_do_not_fit_together_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        refusals = found[".refusals"]
        assert "differ in their batch: give each the whole batch, in one order" in refusals["batch"]
        assert "differ in their params: all must begin with the same state" in refusals["params"]
        assert "differ in their params: all must begin with the same state" in refusals["second run"]
        assert "differ in their key" in refusals["key"]
        assert "differ in their batch" in refusals["order"]
        assert all("differ in their settings" in refusals[name] for name in ("rate", "frozen", "modes"))
        assert "differ in their loss (process" in refusals["loss"]
        assert "no refusal" not in refusals
        assert "differ in their network (process" in refusals["network"]
        assert "differ in their program (process" in refusals["program"]
        assert "differ in their batch fields (process" in refusals["fields"]
        assert "would send different messages" in refusals["metrics"]
        assert "as the mean over 2 slices" in refusals["coupled"]
        assert "a number" in refusals["auto"]
        assert "clocks differ" in refusals["seconds"]


def test_shares_are_consecutive_and_nearly_equal() -> None:
    batch = make_batch(size=7)
    shares = [Ranks("", rank, 3).share(batch, Layout()) for rank in range(3)]
    assert [(share.first_example, share.num_examples) for share in shares] == [(0, 3), (3, 2), (5, 2)]
    assert torch.equal(torch.cat([share.batch[0] for share in shares]), batch[0])
    idle = Ranks("", 2, 3).share(make_batch(size=2), Layout())
    assert (idle.num_examples, len(idle.batch[0])) == (0, 1)


# Processes simulated by this one


def check_played(algorithms: Sequence[Algorithm], net: nn.Module, batches: Sequence[Any], **options: Any) -> State:
    """Check that two processes compute the same as one, and return the last one's state."""
    step = compose(loop_events, algorithms)
    play, state = played(step, 2), step.init(make_state(net, **options))
    for batch in batches:
        ours = play(lambda one, state=state, batch=batch: one(state, batch))
        state = step(state, batch)
        assert tree.equal(ours[0], ours[1])
        torch.testing.assert_close(told(ours[0]), told(state), rtol=1e-5, atol=1e-6, equal_nan=True)
        state = ours[1]
    return state


@pytest.mark.parametrize("algorithms", [[], [pc.algorithms.sam(0.1)], [pc.algorithms.gradient_accumulation(2)]])
def test_a_part_need_not_reach_the_parameters_that_another_reaches(algorithms: list[Algorithm]) -> None:
    inputs, targets = make_batch(size=6, shape=(3,))
    signs = torch.tensor([[1, 1, 1, -1, -1, -1], [1] * 6, [-1] * 6, [-1, -1, -1, 1, 1, 1]])[..., None]
    batches = [(inputs.abs() * sign, targets % 2) for sign in signs]
    optimizer = pc.optim.sgd(0.1, momentum=0.9, weight_decay=0.5)
    end = check_played(algorithms, Routed(), batches, optimizer=optimizer)
    assert end.params["unused"].item() == 1


def test_a_part_without_counted_targets_still_reaches_its_parameters() -> None:
    inputs, targets = make_batch(size=6, shape=(3,))
    signs = torch.tensor([[1, -1, 1, 1, 1, 1], [1] * 6])[..., None]  # the first part reaches all branches
    ignored = torch.tensor([-100, -100, -100, 0, 1, 0])
    batches = [(inputs.abs() * signs[0], ignored), (inputs.abs() * signs[1], targets % 2)]
    optimizer = pc.optim.sgd(0.1, momentum=0.9, weight_decay=0.5)
    check_played([], Routed(), batches, optimizer=optimizer)


class WithConstants(nn.Module):
    """A network with buffers of all kinds, which no forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp()
        constants = {
            "mask": torch.tensor([0.0, -torch.inf, 0.0]),
            "table": torch.linspace(0, 1, 100).sin(),
            "phases": torch.polar(torch.ones(3), torch.arange(3.0)),
            "short": torch.arange(3, dtype=torch.int16),
            "flags": torch.tensor([True, False]),
        }
        for name, constant in constants.items():
            self.register_buffer(name, constant)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) + self.get_buffer("phases").real.sum() * self.get_buffer("table").sum()


def test_norms_that_synchronise_themselves_are_refused() -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="keep nn.BatchNorm"):
        check_played([], net, [make_batch()])


def test_constant_buffers_are_unchanged() -> None:
    net, batches = WithConstants(), [make_batch(seed, 7) for seed in range(3)]
    batches[1][0][0] = torch.nan
    end = check_played([alg.skip_nonfinite(), alg.label_smoothing(0.1)], net, batches)
    assert tree.equal(end.buffers, dict(net.named_buffers()))


class Queued(nn.Module):
    """A network with a spectral norm and, if asked, a queue of directions of its examples, as in MoCo."""

    def __init__(self, *, has_queue: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.has_queue = has_queue
        self.register_buffer("queue", torch.eye(3, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.has_queue:
            self.queue = nn.functional.normalize(inputs[:3], dim=1)
        return self.net(inputs)


def test_buffers_that_have_no_mean_are_named() -> None:
    """Statistics are averaged, and a power iteration depends on the weights only: neither is reported."""
    batch, step = make_batch(size=8), compose(loop_events)
    state = make_state(Queued(has_queue=False))
    first, other = played(step, 2)(lambda one: one(state, batch))
    assert tree.equal(first, other)
    vector = "net.0.parametrizations.weight.0._u"
    torch.testing.assert_close(first.buffers[vector], step(state, batch).buffers[vector])

    state = make_state(Queued(has_queue=True))
    with pytest.warns(UserWarning, match="different values into queue. The state keeps their mean"):
        played(step, 2)(lambda one: one(state, batch))


def test_slots_that_no_algorithm_changes_are_unchanged() -> None:
    def remember(event: Event, state: State) -> State:
        best = torch.tensor(torch.inf) if event is Event.INIT else torch.minimum(state.slots["best"], loss_of(state))
        return state.replace(slots={**state.slots, "best": best, "short": torch.ones(2, dtype=torch.int16)})

    best = Algorithm("best", on(Event.INIT, Event.BATCH_END), remember)
    check_played([best, alg.loss_scaling(8.0)], make_mlp(), [make_batch(0, 7), make_batch(1, 7)])


def test_means_over_processes_without_counted_targets_are_plain_means() -> None:
    inputs, targets = make_batch()

    def penalise(state: State) -> State:
        penalty = state.params["3.weight"].square().sum()
        return state.replace(loss=loss_of(state).nan_to_num() + penalty, metrics={**state.metrics, "one": penalty})

    penalty = changing("penalty", Event.AFTER_LOSS, penalise)
    check_played([penalty], make_mlp(), [(inputs, torch.full_like(targets, -100))])


@pytest.mark.parametrize(
    ("event", "change", "words"),
    [
        (Event.AFTER_BACKWARD, lambda s: {"hparams": {"lr": 0.1}}, "hparams changed between"),
        (Event.AFTER_BACKWARD, lambda s: {"params": {k: v + 1 for k, v in s.params.items()}}, "params changed between"),
        (Event.AFTER_LOSS, lambda s: {"slots": {**s.slots, "it": (s.loss,)}}, "slots of it have another form"),
    ],
)
def test_changes_that_would_let_the_states_diverge_are_refused(event: Event, change: Any, words: str) -> None:
    step = compose(loop_events, [changing("it", event, lambda state: state.replace(**change(state)))])
    with pytest.raises(RuntimeError, match=words):
        played(step, 2)(lambda one: one(make_state(), make_batch()))


def test_an_update_inside_is_refused() -> None:
    step = compose([Event.BATCH_START, Microbatches(Grad(forward, loss), update), pc.loop.advance])
    with pytest.raises(RuntimeError, match="an update belongs after Microbatches"):
        played(step, 2)(lambda one: one(make_state(), make_batch()))


# Processes and groups


def test_a_missing_process_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        pc.data_parallel(compose(loop_events))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """Create a process group that consists of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_process_computes_the_step_itself(alone: Any) -> None:
    state, batch = make_state(), make_batch()
    composed = compose(loop_events, [pc.algorithms.mixup()])
    step = pc.data_parallel(composed, alone)
    assert tree.equal(step(step.init(state), batch), composed(composed.init(state), batch))
    assert repr(step).endswith(", size=1)") and step.replace(microbatches=2).microbatches == 2


def test_a_mesh_of_one_dimension_is_accepted(alone: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert pc.data_parallel(compose(loop_events), mesh).ranks is None
    with pytest.raises(ValueError, match="one dimension"):
        pc.data_parallel(compose(loop_events), init_device_mesh("cpu", (1, 1)))
    with pytest.raises(TypeError, match="DeviceMesh"):
        pc.data_parallel(compose(loop_events), 2)


def test_data_parallel_only_wraps_composed_steps(alone: Any) -> None:
    del alone
    assert repr(pc.data_parallel(pc.compile(compose(loop_events)))).startswith("compile(data_parallel(")
    with pytest.raises(ValueError, match=r"data_parallel\(population\(.*train in one process"):
        pc.data_parallel(pc.population(compose(loop_events), 2))
    with pytest.raises(ValueError, match="nothing to divide"):
        pc.data_parallel(compose(pc.loop.eval_events))


def test_an_evaluation_is_divided_among_processes(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    expected, passes = evaluated(METRICS)
    found = [rank[".evaluations"]["all"] for rank in ranks]
    for values, own_passes in found:
        assert values == found[0][0]
        assert own_passes == pytest.approx([num / size for num in passes], abs=1)
    assert found[0][0] == pytest.approx(expected, rel=1e-6)


def test_each_process_measures_all_of_what_is_no_sum(ranks: list[dict[str, Any]]) -> None:
    values, passes = evaluated({"own": pc.metrics.accuracy})
    for rank in ranks:
        assert rank[".evaluations"]["not a sum"] == (values, passes)


@pytest.mark.parametrize("case", ["differing", "longer"])
def test_an_evaluation_of_different_data_is_refused(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "DistributedSampler" in rank[".evaluations"][case]


def test_the_noise_scale_is_that_of_the_processes_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["purecompose.algorithms._measurements"], "_of_half")
    step = compose(loop_events, [alg.gradient_noise_scale()])
    halves = compose(loop_events, [alg.gradient_noise_scale()], microbatches=2)
    state, batch = step.init(make_state()), make_batch(0, 8)
    for ours in played(step, 2)(lambda one: one(state, batch)):
        torch.testing.assert_close(ours.metrics, halves(state, batch).metrics)


@pytest.mark.parametrize("send", [partial(Ranks.reduced, how="sum"), Ranks.agree])
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_messages_are_refused_under_transforms(send: Any, transform: Any) -> None:
    ranks = Ranks("nowhere", 0, 2)
    with pytest.raises(ValueError, match="no gradient or map goes through"):
        transform(lambda x: send(ranks, [x.sum()])[0])(torch.ones(3))


def test_a_replaced_step_is_still_data_parallel() -> None:
    ends = played(compose(loop_events), 2)(lambda one: one.replace(microbatches=2)(make_state(), make_batch(0, 7)))
    assert tree.equal(told(ends[0]), told(ends[1]))
    torch.testing.assert_close(told(ends[0]), told(compose(loop_events)(make_state(), make_batch(0, 7))))
