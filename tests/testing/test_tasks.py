"""Tasks: matching networks and batches that are made from seeds, can be printed and pickled."""

import pickle

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import compose, loop_events
from purecompose.testing.strategies import tasks
from purecompose.testing.tasks import KINDS, TASKS, MakeBatch, MakeNet, Task, make_mlp, make_task
from tests.shipped import FULL_TASKS


def own_batch(seed, size):
    return torch.full((size, 4), float(seed)), torch.zeros(size, dtype=torch.int64)


@given(tasks(), st.integers(0, 99), st.integers(1, 6))
def test_a_step_runs_on_every_task_made_from_seeds(task, seed, size):
    before = torch.get_rng_state()
    ends = [compose(loop_events)(task.make_state(seed), task.make_batch(seed, size)) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert all(end.loss is not None and torch.isfinite(end.loss) for end in ends)
    assert all(torch.equal(ends[0].params[name], ends[1].params[name]) for name in ends[0].params)
    assert any(not torch.equal(ends[0].params[name], param) for name, param in task.make_state(seed).params.items())


@given(tasks())
def test_a_task_prints_as_an_expression_that_rebuilds_it_and_pickles(task):
    assert eval(repr(task), {"TASKS": TASKS, "make_task": make_task}) == task
    twin = pickle.loads(pickle.dumps(task))
    assert twin == task and repr(twin) == repr(task) and hash(twin) == hash(task)


def test_user_defined_tasks_print_by_name_and_pickle():
    task = Task("own", make_mlp, own_batch)
    assert repr(task) == "Task('own')" and task.kind is None
    assert pickle.loads(pickle.dumps(task)) == task
    assert repr(Task("vectors", make_mlp, own_batch)) == "Task('vectors')"


def test_together_the_tasks_have_the_features_that_break_algorithms():
    assert [name for name, task in TASKS.items() if task.has_buffers] == ["images", "bf16_images"]
    assert [name for name in TASKS if name not in FULL_TASKS] == ["bf16_images", "bf16_tokens", "gpt"]
    assert {task.kind for task in TASKS.values()} == set(KINDS)
    states = {name: task.make_state(0) for name, task in TASKS.items()}
    assert [name for name, state in states.items() if state.context.frozen] == ["frozen"]
    assert "head.weight" not in states["tokens"].params  # tied
    assert "head.weight" in make_task("tokens").make_state(0).params
    labels = TASKS["tokens"].make_batch(0, 4)["labels"]
    assert (labels[:, 0] == -100).tolist() == [True, False, True, False] and (labels[:, 1:] >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_only_applies_to_the_forward_pass(kind):
    task = make_task(kind, precision="bf16")
    assert task.is_half and not make_task(kind, precision="tf32").is_half and not make_task(kind).is_half
    assert repr(task) == f"make_task({kind!r}, precision='bf16')" and task != make_task(kind)
    rounded, plain = (one.make_state(0) for one in (task, make_task(kind)))
    assert {param.dtype for param in rounded.params.values()} == {torch.float32}
    inputs = task.make_batch(0, 4)[0]
    ours, theirs = (state.forward(inputs) for state in (rounded, plain))
    assert not torch.equal(ours, theirs) and torch.allclose(ours, theirs, atol=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_task("graphs"), "kind='graphs' .str.: expected one of 'vectors', 'images', 'tokens'"),
        (lambda: MakeBatch(targets="hard"), "targets='hard'"),
        (lambda: MakeBatch(form="list"), "form='list'"),
        (lambda: make_task(precision="fp8"), "precision='fp8'.*expected one of 'fp32', 'tf32', 'bf16'"),
        (lambda: MakeNet("images", tied=True), "tied=True.*images.*kind='tokens'"),
    ],
)
def test_unknown_names_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
