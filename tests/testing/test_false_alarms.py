"""Cases that once raised false alarms: lawful algorithms at the edges of tasks, runs and processes."""

import os
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from purecompose import Algorithm, Event, on
from purecompose._support.device import read_settings
from purecompose.testing.case import Case, find_moments
from purecompose.testing.law import LawViolation
from purecompose.testing.process import process_restored, process_settings
from purecompose.testing.strategies import cases
from purecompose.testing.suite.agreement import microbatches_agree
from purecompose.testing.suite.loss import gradient_exact
from purecompose.testing.tasks import TASKS
from tests.time.predicate_strategies import predicates


def at(event, fn, name="subject"):
    return Algorithm(name, on(event), lambda _, state: fn(state))


def idle(predicate):
    return Algorithm("idle", predicate, lambda event, state: state)


# The end of the run


def has_room(case):
    return case.start + 2 * case.num_batches + 1 <= case.batches_per_epoch * case.epochs


@settings(max_examples=50)
@given(st.data(), predicates())
def test_cases_leave_room_unless_the_algorithm_only_acts_in_the_last_batches(data, predicate):
    case = data.draw(cases(algorithm=idle(predicate)))
    if not has_room(case):
        assert case.num_batches == 1
        found = find_moments(predicate, batches_per_epoch=case.batches_per_epoch, epochs=case.epochs)
        assert min(found.acting) + 3 > case.batches_per_epoch * case.epochs


# Tasks


@pytest.mark.parametrize("size", [3, 4, 6])
def test_single_images_of_half_the_size_pass_batch_norm(size):
    small = at(Event.AFTER_DATALOADER, lambda state: state.replace(inputs=state.inputs[:, :, :size, :size]))
    case = Case(TASKS["images"], batch_size=2, microbatches=2)
    end = case.step(small)(case.state(), case.batch(0))
    assert end.loss is not None and end.loss.isfinite()


# Laws of numbers


def test_running_statistics_without_gradient_do_not_break_a_law():
    def scaled(state, factor):
        return state.replace(params={name: factor * param for name, param in state.params.items()})

    def by_outputs(state):
        return scaled(state, 1 - 0.1 * state.forward(state.inputs, train=False).square().mean())

    def detached(state):
        return scaled(state, 1 - 0.1 * state.forward(state.inputs, train=False).detach().square().mean())

    case = Case(TASKS["images"])
    assert gradient_exact(at(Event.BATCH_START, by_outputs), case) is True
    with pytest.raises(LawViolation, match="the derivative of the loss"):
        gradient_exact(at(Event.BATCH_START, detached), case)


def test_means_over_ignored_positions_do_not_break_a_law():
    def noted(state, value):
        return state.replace(metrics={**state.metrics, "confidence": value})

    mean = at(Event.AFTER_LOSS, lambda state: noted(state, state.outputs.square().mean()))
    total = at(Event.AFTER_LOSS, lambda state: noted(state, state.outputs.square().sum()))
    # For 3 examples the slices have 2 and 1; for 4 rows of tokens, both slices have equally many ignored positions.
    for task, size in (("tokens", 3), ("tokens", 4), ("vectors", 3)):
        assert microbatches_agree(mean, Case(TASKS[task], batch_size=size, microbatches=2)) is True
    for task, size in (("tokens", 4), ("vectors", 3)):
        with pytest.raises(LawViolation, match=r"metrics\['confidence'\]"):
            microbatches_agree(total, Case(TASKS[task], batch_size=size, microbatches=2))


@pytest.mark.parametrize("law", [microbatches_agree, gradient_exact])
def test_slots_in_single_precision_are_compared_in_single_precision(law):
    """A third in float32, summed in another order, differs by more than float64 rounds."""

    def add(state):
        if "subject" not in state.slots:
            return state.replace(slots={**state.slots, "subject": torch.zeros(())})
        return state.replace(slots={**state.slots, "subject": state.slots["subject"] + state.loss.float()})

    algorithm = Algorithm("subject", on(Event.INIT, Event.AFTER_TRAIN_BATCH), lambda event, state: add(state))
    assert law(algorithm, Case(num_batches=3, microbatches=3)) is True


# The process


def other_settings():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_anomaly_enabled(True, False)
    torch.set_grad_enabled(False)
    torch.backends.mkldnn.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    torch.set_num_threads(torch.get_num_threads() + 1)


def test_every_setting_of_torch_is_restored():
    before = process_settings()
    with process_restored():
        other_settings()
        changed = read_settings()
        assert all(changed[name] != before[name] for name in changed)
        os.environ["A_VARIABLE"] = "set"
        torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
        warnings.filterwarnings("ignore", "a message")
        numpy.seterr(divide="raise")
        assert len({name for name in before if process_settings()[name] != before[name]}) == len(changed) + 4
    assert process_settings() == before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
