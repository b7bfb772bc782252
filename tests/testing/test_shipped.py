"""The table of shipped algorithms: complete, and correct about settings and tasks."""

import pytest
import torch
from hypothesis import find, given, settings, strategies as st

from purecompose import Trait, compose, loop_events, tree
from purecompose.algorithms import FACTORIES
from purecompose.run.evaluation import predict
from purecompose.schedule import Hparam, Product
from purecompose.testing.attempt import is_refusal
from purecompose.testing.case import Case, Subject
from purecompose.testing.law import acts_in_step
from purecompose.testing.record import run
from purecompose.testing.strategies import cases
from purecompose.testing.tasks import TASKS
from purecompose.time.predicates import NEVER
from tests.helpers import without
from tests.sampling import one_in
from tests.shipped import SHIPPED
from tests.shipped_examples import examples


def loss_after_a_step(algorithm, case):
    end = run(case.step(algorithm), case.state(), case.batches()[:1]).states[-1]
    assert end.loss is not None
    return end.loss


def test_every_shipped_algorithm_has_its_row():
    assert SHIPPED.keys() == FACTORIES.keys()


@pytest.mark.parametrize("row", SHIPPED.values(), ids=SHIPPED)
def test_a_row_is_complete(row):
    assert row.examples and set(row.tasks) <= set(row.accepted)
    assert {Subject.of(source).name for source in (*row.examples, row.neutral or row.examples[0])} == {row.name}
    assert {name for name in row.accepted if not TASKS[name].is_half} <= set(row.tasks)


@pytest.mark.filterwarnings("ignore:gradient_accumulation. the run has ended within a group:UserWarning")
@pytest.mark.parametrize(("row", "source"), examples())
def test_examples_print_as_expressions_and_act_on_all_accepted_tasks(row, source):
    subject = Subject.of(source)
    assert subject.algorithm.predicate != NEVER
    if not subject.algorithm.schedules:  # which rows, and the command line, write by their settings only
        assert dict(Subject.of(repr(subject.algorithm)).algorithm.config) == dict(subject.algorithm.config)
    is_first_only = Trait.SETS_WEIGHTS in subject.algorithm.traits
    for name in row.accepted:
        case = Case(TASKS[name], start=0 if is_first_only else 3)
        ran = run(case.step(subject.algorithm), case.state(), case.batches(), subject.name)
        loss = ran.states[-1].loss
        assert (ran.acted or not acts_in_step(subject.algorithm)) and loss is not None and torch.isfinite(loss)


@pytest.mark.parametrize("row", [row for row in SHIPPED.values() if row.neutral], ids=lambda row: row.name)
def test_neutral_settings_never_match(row):
    assert Subject.of(row.neutral).algorithm.predicate == NEVER


@pytest.mark.parametrize(
    ("row", "name"),
    # Many methods accept the network of gpt, on which they are not tried.
    [(row, name) for row in SHIPPED.values() for name in TASKS if name not in (*row.accepted, "gpt")],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_tasks_are_refused(row, name):
    for source in row.examples:
        with pytest.raises((TypeError, ValueError, UserWarning), match=rf"^{row.name}\b") as caught:
            algorithm, case = Subject.of(source).algorithm, Case(TASKS[name])
            loss_after_a_step(algorithm, case)
            predict(case.state(), case.batches()[:1], step=case.step(algorithm))
        assert is_refusal(caught.value) and any(f"in {row.name} at" in note for note in caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:gradient_accumulation. the run has ended within a group:UserWarning")
@pytest.mark.parametrize("row", one_in(4, SHIPPED.values(), lambda row: row.name))
@settings(max_examples=5)
@given(data=st.data())
def test_declared_settings_build_print_and_run(row, data):
    task, algorithm = TASKS[data.draw(st.sampled_from(row.accepted))], data.draw(row.algorithms())
    assert repr(algorithm).startswith(f"{row.name}(")
    # A single row that is cut to its first position may only have an ignored label, and then the mean is empty.
    case = data.draw(cases([task], algorithm).filter(lambda case: case.batch_size > 1))
    assert torch.isfinite(loss_after_a_step(algorithm, case))


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("label_smoothing", lambda given: given.get("smoothing") == 1),
        ("mixup", lambda given: given["alpha"] == 0),
        ("mixup", lambda given: isinstance(given["alpha"], Hparam)),
        ("mixup", lambda given: isinstance(given["alpha"], Product)),
        ("selective_backprop", lambda given: given.get("keep") == 1),
        ("selective_backprop", lambda given: given.get("full_every") == 1),
        ("gradient_clipping", lambda given: given["clipping_type"] == "adaptive" and "exclude" not in given),
        ("layer_freezing", lambda given: given.get("num_stages") == 2),
        ("sam", lambda given: given.get("per_rank")),
    ],
)
def test_edge_values_are_among_the_settings(name, condition):
    """They are found by search, so that a strategy that no longer draws them is noticed."""
    find(SHIPPED[name].settings(), condition, settings=settings(max_examples=1000, database=None))


@pytest.mark.filterwarnings("ignore:.* which the program does not have")
@pytest.mark.parametrize("pair", ["train_batch", "batch", "backward"])
@pytest.mark.parametrize(
    "name", ["gradient_noise_scale", "gradient_accumulation", "skip_nonfinite", "training_metrics"]
)
def test_a_slot_that_changes_its_form_closes_without_a_pair_of_events(name, pair):
    step = compose(without(loop_events, pair), [Subject.of(SHIPPED[name].examples[0]).algorithm], microbatches=2)
    task = TASKS["vectors"]
    state = step.init(task.make_state(0, duration="8ba", batches_per_epoch=4))
    form = tree.structure(state.slots)
    for _ in range(2):
        state = step(state, task.make_batch(0, 4))
    assert tree.structure(state.slots) == form
