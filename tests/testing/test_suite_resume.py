"""The law of resuming, and the other process that it needs."""

import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import time
import warnings

import pytest
import torch

from purecompose import tree
from purecompose.core.algorithm import Algorithm, identity
from purecompose.testing import worker as workers
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation
from purecompose.testing.snapshot import from_bytes, to_bytes
from purecompose.testing.subject import Subject
from purecompose.testing.suite.resume import resume_exact
from purecompose.testing.tasks import TASKS, Task, make_mlp
from purecompose.testing.worker import RemoteError, Unportable, Worker, WorkerError, resumed_elsewhere
from purecompose.time.event import Event
from purecompose.time.predicates import between, on
from tests.testing.mutants import resume as wrong
from tests.testing.mutants.mutant import Mutant


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


def test_without_source_a_mistake_in_a_closure_is_found_in_this_process() -> None:
    with pytest.raises(LawViolation, match="params"):
        resume_exact(wrong.averages_in_closure(), MIDDLE)


def test_a_task_that_cannot_be_pickled_is_tried_in_this_process() -> None:
    task = Task("local", lambda seed: make_mlp(seed), TASKS["vectors"].batch)
    case = dataclasses.replace(MIDDLE, task=task)
    with pytest.raises(Unportable, match="cannot be pickled"):
        resumed_elsewhere(Subject.of("mixup(0.2)"), case, b"", 0, 1)
    assert resume_exact("mixup(0.2)", case)


def test_definitions_of_the_main_module_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unportable, match="source text"):
        resumed_elsewhere(Subject(identity(), "__main__:mine"), MIDDLE, b"", 0, 1)

    def net(seed: int) -> torch.nn.Module:
        return make_mlp(seed)

    net.__module__, net.__qualname__ = "__main__", "net"
    monkeypatch.setattr(sys.modules["__main__"], "net", net, raising=False)
    case = dataclasses.replace(MIDDLE, task=Task("main", net, TASKS["vectors"].batch))
    with pytest.raises(Unportable, match="main module"):
        resumed_elsewhere(Subject.of("mixup(0.2)"), case, b"", 0, 1)


def test_cases_on_the_tasks_survive_pickling() -> None:
    for task in TASKS.values():
        case = dataclasses.replace(MIDDLE, task=task)
        assert pickle.loads(pickle.dumps(case)) == case


def test_neutral_settings_are_exempt_and_inactive_cases_do_not_count() -> None:
    assert resume_exact.exempt(Subject.of("mixup(0)").algorithm) is not None
    assert resume_exact.exempt(Subject.of("mixup(0.2)").algorithm) is None
    late = Algorithm("late", on(Event.BATCH_END) & between(0.9, 1.0), lambda event, state: state)
    assert not resume_exact(late, MIDDLE)


def test_metrics_of_the_previous_step_are_invisible() -> None:
    assert resume_exact(ours("reads_last_metrics"), MIDDLE)


def test_a_subject_narrowed_to_an_event_is_narrowed_in_the_worker_too() -> None:
    narrow = Subject.of(ours("plain")).only_at(Event.BATCH_END)
    assert resume_exact(narrow, MIDDLE)


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
def test_a_run_that_fails_in_the_worker_breaks_the_law(name: str, found: str) -> None:
    with pytest.raises(LawViolation) as caught:
        resume_exact(ours(name), MIDDLE)
    assert found in caught.value.what and caught.value.event is Event.BATCH_END
    assert resume_exact(ours("talks"), MIDDLE)  # and the worker continues


def test_a_run_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume_exact(ours("plain"), MIDDLE)
    before = workers._worker
    monkeypatch.setattr(workers, "_LIMIT", 1.0)
    with pytest.raises(LawViolation, match="no end after 1 seconds"):
        resume_exact(ours("hangs_elsewhere"), MIDDLE)
    monkeypatch.undo()
    assert resume_exact(ours("plain"), MIDDLE)
    assert workers._worker is before


def test_an_algorithm_that_the_worker_cannot_make_is_an_error_of_the_setup() -> None:
    with pytest.raises(WorkerError, match="no_such_module"):
        resume_exact(Subject(Subject.of("mixup(0.2)").algorithm, "no_such_module:mine"), MIDDLE)


@pytest.mark.slow
def test_a_worker_that_died_is_replaced() -> None:
    assert resume_exact("mixup(0.2)", MIDDLE)
    worker = workers._worker
    assert worker is not None
    worker._process.kill()
    worker._process.wait()
    assert resume_exact("mixup(0.2)", MIDDLE)
    assert workers._worker is not worker


def test_every_try_runs_in_its_own_process() -> None:
    mutant = wrong.counts_in_a_global
    subject, state = Subject.of(mutant.source), MIDDLE.step(mutant()).init(MIDDLE.state())
    # Each try runs one step; in a single process the second step would double the gradient.
    ends = [resumed_elsewhere(subject, MIDDLE, to_bytes(state), 0, 1) for _ in range(2)]
    assert tree.equal(*(from_bytes(end, like=state) for end in ends))


@pytest.mark.slow
def test_the_law_works_without_forks_and_a_worker_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Worker(fork=False)
    monkeypatch.setattr(workers, "_worker", own)
    assert resume_exact("mixup(0.2)", MIDDLE)
    assert resume_exact("mixup(0.2)", MIDDLE)
    with pytest.raises(LawViolation):
        resume_exact(wrong.averages_in_closure.source, MIDDLE)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.close()
        own.close()
        assert own._process.returncode == 0
        del own
        gc.collect()


_IDLE = """
from purecompose.testing import worker
print(worker._the_worker()._process.pid, flush=True)
"""
_BUSY = """
import os
from purecompose.testing import worker
from purecompose.testing.case import Case
from purecompose.testing.suite.resume import resume_exact
assert resume_exact("label_smoothing(0.1)", Case(batches_per_epoch=3))
print(worker._worker._process.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [_IDLE, *(pytest.param(text, marks=pytest.mark.slow) for text in (_BUSY, _BUSY + "os._exit(0)"))],
    ids=["idle", "busy", "sudden"],
)
def test_the_worker_ends_with_its_parent(text: str) -> None:
    done = subprocess.run([sys.executable, "-Werror", "-c", text], capture_output=True, text=True, timeout=100)
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


def test_installed_modules_stay_imported_between_tries_and_user_modules_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("colorsys", "tests.testing.resume_subjects"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    workers._import(["colorsys", "tests.testing.resume_subjects", "no_such_module"])
    assert "colorsys" in sys.modules and "tests.testing.resume_subjects" not in sys.modules


def test_errors_of_the_run_and_of_the_setup_are_distinguished() -> None:
    with pytest.raises(RemoteError, match="not a snapshot"):
        resumed_elsewhere(Subject.of("mixup(0.2)"), MIDDLE, b"none", 0, 1)
