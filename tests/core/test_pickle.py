"""States and steps in pickle, `torch.save`, `copy.deepcopy` and other processes: the run continues to the same bits."""

import copy
import io
import multiprocessing
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, algorithms as alg, compose, loop_events, on, optim
from purecompose.testing.case import Case, Subject
from purecompose.testing.tasks import TASKS
from tests.helpers import assert_same, make_batches, make_cnn, make_state, run_steps
from tests.shipped_examples import examples


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved_by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pc.factory
def shrinking(factor):
    def apply(event, state):
        del event
        return state.replace(params={name: factor * param for name, param in state.params.items()})

    return Algorithm("shrinking", on(Event.BATCH_END), apply, config={"factor": factor})


def plain_apply(event, state):
    del event
    return state


class TestStates:
    @pytest.mark.parametrize(("row", "text"), examples())
    def test_an_unpickled_run_continues_with_every_method(self, row, text):
        case = Case(TASKS[row.tasks[0]], num_batches=3)
        step = case.step(Subject.of(text).algorithm)
        first, *rest = case.batches()
        middle = step(step.init(case.state()), first)
        again, step_again = pickled((middle, step))
        assert again.context == middle.context
        assert_same(again, middle)
        assert_same(run_steps(step_again, again, rest), run_steps(step, middle, rest))

    @pytest.mark.parametrize("copied", [pickled, saved_by_torch, copy.deepcopy])
    def test_ties_frozen_names_and_evaluation_flags_are_kept(self, copied):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 3))
        net[3].weight = net[0].weight
        net[4].bias.requires_grad_(False)
        state, step, batches = make_state(net, eval_mode=["1"]), compose(loop_events), make_batches(3)
        again = copied(state)
        assert again.params["0.weight"] is not state.params["0.weight"]
        assert again.context == state.context and again.static.timestamp == state.static.timestamp
        assert_same(run_steps(step, again, batches), run_steps(step, state, batches))

    @pytest.mark.parametrize(
        "optimizer",
        [
            optim.adamw(pc.hparam("lr", 0.1) * pc.schedule.cosine(), groups={"0.*": {"weight_decay": 0.0}}),
            optim.by_pattern({"0.*": optim.muon(0.1)}, optim.adafactor(0.1)),
            optim.from_torch(torch.optim.NAdam, lr=0.1),
        ],
        ids=lambda optimizer: type(optimizer).__name__,
    )
    def test_with_optimizers_and_schedules(self, optimizer):
        step, batches = compose(loop_events), make_batches(3)
        state = step.init(make_state(optimizer=optimizer, batches_per_epoch=3))
        assert_same(run_steps(pickled(step), pickled(state), batches), run_steps(step, state, batches))

    def test_a_leased_state_is_read_out_and_a_spent_one_refused(self):
        step = pc.compile(compose(loop_events), backend="eager", quiet=True)
        first = step(make_state(), make_batches(1)[0])
        assert_same(pickled(first), first.copy())
        second = step(first, make_batches(1)[0])
        del second
        spent = step(make_state(), make_batches(1)[0])
        step(spent, make_batches(1)[0])
        with pytest.raises(pc.errors.SpentStateError):
            pickle.dumps(spent)

    def test_parametrized_networks_are_copied_but_not_pickled(self):
        state = make_state(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))))
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
            pickle.dumps(state)
        assert_same(copy.deepcopy(state), state)


class TestSteps:
    def test_programs_passes_and_microbatches_are_kept(self):
        step = compose(loop_events, [alg.mixup(0.2)], passes=[pc.passes.set_filo_order], microbatches=2)
        again = pickled(step)
        assert again.program == step.program and again.passes == step.passes and again.microbatches == 2

    def test_transformed_steps(self):
        step, batch = compose(loop_events, [alg.mixup(0.2)]), make_batches(1)[0]
        population = pc.population(step, 2)
        states = population.init(pc.stack_states([make_state(key=0), make_state(key=1)]))
        assert_same(pickled(population)(states, batch), population(states, batch))
        state = step.init(make_state())
        compiled = pc.compile(step, backend="eager", donate=False, quiet=True)
        assert_same(pickled(compiled)(state, batch), compiled(state, batch))

    def test_user_defined_factories_and_plain_functions_can_be_pickled(self):
        algorithms = [shrinking(0.5), Algorithm("plain", on(Event.BATCH_END), plain_apply, runs_after=("shrinking",))]
        step, batch = compose(loop_events, algorithms), make_batches(1)[0]
        assert_same(pickled(step)(make_state(), batch), step(make_state(), batch))

    @pytest.mark.parametrize(
        "algorithm",
        [Algorithm("mine", on(Event.BATCH_END), lambda event, state: state), replace(shrinking(0.5), name="mine")],
        ids=["lambda", "replaced"],
    )
    def test_the_error_for_local_functions_points_to_the_decorator(self, algorithm):
        with pytest.raises(pickle.PicklingError, match=r"'mine' cannot be pickled.*@purecompose\.factory"):
            pickle.dumps(compose(loop_events, [algorithm]))
        assert copy.deepcopy(algorithm) is algorithm

    def test_a_step_in_a_new_process_gives_the_same_bits(self):
        step = compose(loop_events, [alg.cutout(1, 0.5), alg.ema(), shrinking(0.9)])
        state, batches = step.init(make_state(make_cnn())), make_batches(2, shape=(2, 6, 6))
        threads = (torch.get_num_threads(),)  # the bits of convolutions depend on it
        with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, threads) as pool:
            there = pool.apply(run_steps, (step, state, batches))
        assert_same(there, run_steps(step, state, batches))
