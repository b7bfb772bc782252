"""The laws of whole runs: leaks by evaluation, pairs, and resuming, with the other process that it needs."""

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import time

import pytest
import torch

from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.testing import process
from purecompose.testing.case import Case, Subject
from purecompose.testing.law import LawViolation
from purecompose.testing.process import RemoteError, Unportable, in_new_processes
from purecompose.testing.suite.runs import pairs_undone, resume_exact
from purecompose.testing.tasks import TASKS, Task, make_mlp
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants import runs as wrong
from tests.testing.mutants.mutant import Mutant
from tests.testing.mutants.runs import restores_by_argmax


CASE = Case(seed=3, batch_size=6, num_batches=2, microbatches=2, others=("noise", "shrink"), place=1)


def test_replaced_targets_are_reported_with_their_event() -> None:
    with pytest.raises(LawViolation, match="float32.* and .*int64") as caught:
        pairs_undone(restores_by_argmax(), dataclasses.replace(CASE, task=TASKS["soft"]))
    assert caught.value.event is Event.AFTER_LOSS and caught.value.path == "batch[1]"


def test_weights_that_the_optimizer_updates_need_not_be_restored_by_a_pair() -> None:
    def apply(event: Event, state: State) -> State:
        factor = 2.0 if event is Event.BATCH_START else 0.5
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    assert not pairs_undone(Algorithm("scaled", on(Event.BATCH_START, Event.BATCH_END), apply), CASE)


def test_a_change_made_only_at_the_closing_event_may_remain() -> None:
    def apply(event: Event, state: State) -> State:
        return state.replace(inputs=2 * state.inputs) if event is Event.AFTER_FORWARD else state

    late = Algorithm("late", on(Event.BEFORE_FORWARD, Event.AFTER_FORWARD), apply)
    assert not pairs_undone(late, CASE)


MIDDLE = Case(start=1, batches_per_epoch=5, num_batches=2, seed=3, microbatches=2, others=("bystander", "noise"))
"""One batch of an epoch is done at the start, three at the interruption."""


def ours(name: str) -> str:
    return f"tests.testing.resume_subjects:{name}"


@pytest.mark.parametrize(
    "mutant", [wrong.normalises_by_the_first_batch, wrong.salts_by_hash, wrong.seeds_by_process], ids=lambda m: m.name
)
def test_some_mutants_are_only_detected_in_a_new_process(mutant: Mutant) -> None:
    assert resume_exact(mutant(), MIDDLE)
    with pytest.raises(LawViolation) as caught:
        resume_exact(mutant.source, MIDDLE)
    assert list(caught.value.values) == ["without a break", "resumed"]


def test_a_task_that_cannot_be_pickled_is_tried_in_this_process() -> None:
    task = Task("local", lambda seed: make_mlp(seed), TASKS["vectors"].batch)
    assert resume_exact("mixup(0.2)", dataclasses.replace(MIDDLE, task=task))


def test_cases_and_subjects_survive_pickling() -> None:
    for task in TASKS.values():
        case = dataclasses.replace(MIDDLE, task=task)
        assert pickle.loads(pickle.dumps(case)) == case
    narrow = Subject.of(ours("plain")).only_at(Event.BATCH_END)
    assert pickle.loads(pickle.dumps(narrow)).algorithm.events == (Event.BATCH_END,)


def test_runs_resume_exactly_under_other_settings_of_torch() -> None:
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        assert resume_exact("mixup(0.2)", dataclasses.replace(MIDDLE, task=TASKS["images"], others=("noise",)))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)


# The other process


@pytest.mark.parametrize(
    ("name", "found"),
    [("fails_elsewhere", "LookupError: no cache here"), ("dies_elsewhere", "the process ended with status 7")],
)
def test_a_run_that_fails_in_the_other_process_breaks_the_law(name: str, found: str) -> None:
    with pytest.raises(LawViolation) as caught:
        resume_exact(ours(name), MIDDLE)
    assert found in caught.value.what and caught.value.event is Event.BATCH_END
    assert resume_exact(ours("talks"), MIDDLE)


def test_a_run_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_new_processes(abs, [(-1,)]) == [1]  # the fork server runs
    monkeypatch.setattr(process, "_LIMIT", 1.0)
    with pytest.raises(RemoteError, match="no end after 1 seconds"):
        in_new_processes(time.sleep, [(600,)])


def test_calls_run_at_the_same_time_each_in_a_process_of_its_own() -> None:
    first, second = in_new_processes(os.getpid, [(), ()])
    assert len({first, second, os.getpid()}) == 3
    with pytest.raises(RemoteError, match="ValueError: invalid literal"):
        in_new_processes(int, [("1",), ("a",)])


def test_definitions_of_the_main_module_and_closures_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def net(seed: int) -> torch.nn.Module:
        return make_mlp(seed)

    with pytest.raises(Unportable, match="local object"):
        in_new_processes(net, [(0,)])
    net.__module__, net.__qualname__ = "__main__", "net"
    monkeypatch.setattr(sys.modules["__main__"], "net", net, raising=False)
    with pytest.raises(Unportable, match="main module"):
        in_new_processes(net, [(0,)])


_SCRIPT = """
import os
import purecompose.testing as testing
from purecompose.testing.suite import resume_exact
from purecompose.testing.process import in_new_processes
assert resume_exact("label_smoothing(0.1)", testing.Case(batches_per_epoch=3))
print(*in_new_processes(os.getppid, [()]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "os._exit(0)"], ids=["usual", "sudden"])
def test_a_script_without_a_guard_may_start_processes_which_end_with_it(tmp_path: pathlib.Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + end)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    pid, deadline = int(done.stdout), time.monotonic() + 10
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # zombies count as ended
        return stat.read().rpartition(")")[2].split()[0] != "Z"
