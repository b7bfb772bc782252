"""Draws of the network within a step: in slices, on several processes, and in several forward passes."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, population, stack_states
from purecompose.errors import UnkeyedRandomError
from purecompose.loop import Grad, Microbatches, advance, forward, loss, update
from purecompose.testing.process import played
from purecompose.transforms.population import unstack_states
from tests.helpers import assert_same, changing, loss_of, make_batch, make_mlp, make_state
from tests.sampling import one_in


# Slices and processes

SIZE, NUM_SAMPLES = 8, 3


class Drawing(nn.Module):
    """A network that multiplies its weight, 1, by what it draws for n examples."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(())), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.draw(len(x)) + x * 0


def mean_of_samples(n: int) -> Tensor:
    return torch.randn(NUM_SAMPLES, n).mean(0)


def sequence_first_dropout(n: int) -> Tensor:
    return torch.arange(31.0) @ F.dropout(torch.ones(31, n), 0.5)


def one_permutation(n: int) -> Tensor:
    return torch.arange(31.0) @ torch.randperm(31).float()


DRAWS = [mean_of_samples, sequence_first_dropout, one_permutation]


def mean_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return outputs.mean() if reduction == "mean" else outputs


def drawing_state(draw: Callable[[int], Tensor], key: int = 0) -> State:
    return State.create(Drawing(draw), loss=mean_loss, optimizer=pc.optim.sgd(1.0), key=key)


BATCH = torch.zeros(SIZE), torch.zeros(SIZE)


@pytest.mark.parametrize("k", one_in(3, [4, 1, 2]))
def test_a_gradient_of_samples_deviates_equally_far_in_any_number_of_slices(k):
    """The gradient is the mean of SIZE * NUM_SAMPLES independent standard normals."""
    step = compose(loop_events, microbatches=k)
    grads = [1 - step(drawing_state(mean_of_samples, key), BATCH).params["weight"] for key in range(100)]
    assert torch.stack(grads).std().item() == pytest.approx((SIZE * NUM_SAMPLES) ** -0.5, rel=0.25)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_slice_of_every_process_draws_for_itself(draw):
    seen: list[float] = []
    keep = changing("keep", Event.AFTER_FORWARD, lambda state: seen.append(state.outputs[0].item()) or state)
    step, state = compose(loop_events, [keep], microbatches=2), drawing_state(draw)
    step(state, BATCH)
    assert len(set(seen)) == 2
    seen.clear()
    played(step, 2)(lambda one: one(state, BATCH))
    assert len(set(seen)) == 4


def test_a_single_number_is_drawn_for_the_whole_batch():
    state = drawing_state(lambda n: torch.rand(()))
    whole = compose(loop_events)(state, BATCH)
    torch.testing.assert_close(compose(loop_events, microbatches=4)(state, BATCH).params, whole.params)


@pytest.mark.parametrize("draw", DRAWS)
def test_compiled_slices_draw_what_eager_slices_draw(draw):
    step, state = compose(loop_events, microbatches=4), drawing_state(draw)
    compiled = pc.compile(step, backend="eager", quiet=True)
    torch.testing.assert_close(compiled(state, BATCH).params, step(state, BATCH).params)


# Forward passes


def distance_of_views(
    *, name: str | None = None, through: Callable[..., Tensor] = lambda fn, x: fn(x)
) -> Callable[[State], State]:
    """Return a stage whose loss is the distance of two passes of the same inputs, as SimCSE compares them."""

    def distance(state: State) -> State:
        def view(x: Tensor) -> Tensor:
            return state.forward(x, train=True, name=name)

        first, second = (through(view, state.inputs) for _ in range(2))
        return state.replace(loss=(first - second).square().mean())

    return distance


def dropout_state(key: int = 0) -> State:
    return make_state(make_mlp(dropout=0.5, dtype=torch.float64), key=key)


DROPOUT_BATCH = make_batch(dtype=torch.float64)


def program(stage: Callable[[State], State]) -> tuple:
    return Microbatches(Grad(stage)), Event.AFTER_TRAIN_BATCH, update, advance


def after(step, state: State | None = None) -> State:
    return step(dropout_state() if state is None else state, DROPOUT_BATCH)


def test_passes_of_one_stage_draw_apart_unless_they_share_a_name():
    assert loss_of(after(compose(program(distance_of_views())))) > 0.01
    assert after(compose(program(distance_of_views(name="view")))).loss == 0


@pytest.mark.parametrize("k", [2, 4])
def test_passes_of_a_stage_draw_in_slices_and_processes_what_the_whole_batch_draws(k):
    whole, sliced = compose(program(distance_of_views())), compose(program(distance_of_views()), microbatches=k)
    torch.testing.assert_close(after(sliced).params, after(whole).params)
    torch.testing.assert_close(played(sliced, 2)(after)[0].params, after(whole).params)


def test_passes_of_a_stage_draw_the_same_in_a_population():
    step, members = compose(program(distance_of_views())), [dropout_state(key) for key in range(3)]
    found = unstack_states(after(population(step, 3), stack_states(members)))
    for one, member in zip(found, members, strict=True):
        torch.testing.assert_close(one.params, after(step, member).params)


def test_a_second_gradient_repeats_the_draws_of_all_passes():
    seen: list[State] = []

    def compare(state: State) -> State:
        grads, _ = state.gradient(state.params)
        seen.append(state.replace(grads=grads))
        assert_same(grads, state.grads)
        return state

    after(compose(program(distance_of_views()), [changing("compare", Event.AFTER_TRAIN_BATCH, compare)]))
    assert seen


def outputs_seen(stages: int, algorithms: list[Algorithm]) -> list[Tensor]:
    """Return the outputs of each stage `forward` of a program, after which events fire."""
    seen: list[Tensor] = []
    keep = changing("keep", Event.AFTER_FORWARD, lambda state: seen.append(state.outputs) or state)
    after(compose([Grad(*[forward, Event.AFTER_FORWARD] * stages, loss), update, advance], [*algorithms, keep]))
    return seen


def test_stages_and_algorithms_draw_apart_and_leave_each_others_draws_alone():
    seen: list[Tensor] = []

    def look(state: State) -> State:
        seen.append(state.forward(state.inputs, train=True))
        return state

    (alone,) = outputs_seen(1, [])
    first, second = outputs_seen(2, [changing(name, Event.AFTER_FORWARD, look) for name in ("one", "other")])
    assert torch.equal(alone, first)
    passes = [first, second, *seen]
    assert len(passes) == 6 and len({tuple(outputs.flatten().tolist()) for outputs in passes}) == 6


@pytest.mark.parametrize("k", [None, 2])
def test_turns_of_a_stage_draw_apart_by_name(k):
    def noise(state: State) -> State:
        draws = pc.random.normal(state.example_rng("noise"), (state.num_examples,))
        return state.replace(metrics={**state.metrics, f"noise {len(state.metrics)}": draws.sum()})

    turns = Grad(forward, loss, noise, noise)
    step = compose([turns if k is None else Microbatches(turns), update, advance], microbatches=k)
    eager, compiled = after(step).metrics, after(pc.compile(step, backend="eager", quiet=True)).metrics
    assert_same(eager, compiled)
    assert len({value.item() for value in eager.values()}) == 2


class DroppingLoss(nn.Module):
    """A loss with parameters, which are dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.dropout(self.weight, 0.5).mean() + 0 * F.cross_entropy(outputs, targets)


def test_turns_of_a_loss_draw_apart():
    seen: list[float] = []
    note = changing("note", Event.AFTER_LOSS, lambda state: seen.append(loss_of(state).item()) or state)
    step = compose([Grad(forward, loss, Event.AFTER_LOSS, loss, Event.AFTER_LOSS), update, advance], [note])
    step(make_state(loss=DroppingLoss()), make_batch())
    assert len(set(seen)) == 2


class Distance:
    """A stage that is an object."""

    def __call__(self, state: State) -> State:
        return distance_of_views()(state)


def distance_times(factor: float, state: State) -> State:
    state = distance_of_views()(state)
    return state.replace(loss=factor * loss_of(state))


@pytest.mark.parametrize("stage", [Distance, lambda: functools.partial(distance_times, 2.0)], ids=["object", "partial"])
def test_stages_without_a_name_draw_the_same_whenever_they_are_made(stage):
    """A name that contained an address would make other draws in a resumed run."""
    kept = [stage() for _ in range(2)]
    first, second = (after(compose(program(one))) for one in kept)
    assert_same(first.params, second.params)
    assert "0x" not in repr(compose(program(kept[0])).program)


def test_a_checkpointed_pass_is_recomputed_with_its_draws():
    plain, again = distance_of_views(), distance_of_views(through=pc.nn.layers.checkpoint)
    plain, again = compose(program(plain)), compose(program(again))
    assert_same(after(again).params, after(plain).params)


def test_torchs_checkpoint_around_a_numbered_pass_is_refused():
    def through(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch_checkpoint(fn, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    assert after(compose(program(distance_of_views(name="view", through=through)))).loss == 0
    with pytest.raises(UnkeyedRandomError, match=r"state.forward.*purecompose.nn.layers.checkpoint.*name="):
        after(compose(program(distance_of_views(through=through))))
