"""Tiered steps: composed until another process has compiled them, or until a fixed time."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, Event, State, compose, loop_events, tree
from purecompose.transforms.compilation import CompiledStep, background
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.background import Background, BackgroundError
from tests.helpers import make_batch, make_batches, make_state, noise
from tests.pages import ROOT
from tests.transforms.compilation.compile_helpers import LIBRARY, compiled, host_log, made, readable, scaling


class Held:
    """A stand-in for the other process, which is done when the test says so, or after a delay in seconds."""

    def __init__(self) -> None:
        self.submitted: list[Future[float]] = []
        self.delay: float | None = None

    def submit(self, graph: Any, mode: Any) -> Future[float]:
        del graph, mode
        self.submitted.append(future := Future[float]())
        if self.delay is not None:
            threading.Timer(self.delay, future.set_result, [2.0]).start()
        return future

    def finish(self, num: int) -> None:
        """Finish the first compilations."""
        for future in self.submitted[:num]:
            if not future.done():
                future.set_result(1.0)

    def stop(self) -> None:
        pass


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Return a stand-in for the other process; Inductor is replaced by the graph as it was traced."""
    one, original = Held(), LIBRARY.compile_graph
    monkeypatch.setattr(LIBRARY, "Background", lambda: one)
    monkeypatch.setattr(LIBRARY, "compile_graph", lambda graph, backend, mode: original(graph, "eager", None))
    monkeypatch.setattr(LIBRARY, "start_inductor", lambda device: None)
    return one


def tiered(step: pc.Step, when: bool | str = True, **options: Any) -> CompiledStep:
    return compiled(step, **{"backend": "inductor", "tiered": when, **options})


def run(step: pc.Step, state: State, batches: list[Any]) -> Iterator[State]:
    for batch in batches:
        state = step(state, batch)
        yield state


def from_batches(step: CompiledStep) -> list[int | None]:
    return [variant.from_batch for variant in step.variants()]


def test_a_step_runs_as_composed_until_it_is_compiled(held: Held) -> None:
    plain, step = compose(loop_events, [noise()]), tiered(compose(loop_events, [noise()]))
    batches = make_batches(5)
    wanted = list(run(plain, make_state(), batches[:3]))
    found = list(run(step, make_state(), batches[:3]))
    assert all(tree.equal(one, other) and other.lease is None for one, other in zip(wanted, found, strict=True))
    assert from_batches(step) == [None] and len(held.submitted) == 1
    held.submitted[0].set_result(7.5)
    wanted += run(compiled(plain), wanted[-1], batches[3:])
    found += run(step, found[-1], batches[3:])
    assert [state.lease is not None for state in found] == [False] * 3 + [True] * 2
    assert tree.equal(readable(wanted[-1]), readable(found[-1]))
    (variant,) = step.variants()
    assert (variant.from_batch, variant.hits, variant.background_seconds) == (3, 2, 7.5)
    assert variant.seconds < 7.5, "the run waited for none of them"
    assert "from batch" in str(step.variants()) and "from batch" not in str(compiled(plain).variants())


def test_each_later_variant_waits_for_its_own_compilation(held: Held) -> None:
    step = tiered(compose(loop_events, [scaling("every_fourth", Event.AFTER_DATALOADER, 2.0, 4)]))
    state = make_state()
    for number, size in enumerate([8, 8, 8, 8, 4, 8, 4, 8, 8]):
        state = step(state, make_batch(number, size))
        held.finish(len(held.submitted) - 1)
    assert len(held.submitted) == 3
    assert from_batches(step) == [5, 7, None]


def test_a_fixed_time_decides_whatever_is_ready(held: Held) -> None:
    step = tiered(compose(loop_events), "at 3ba")
    states = list(run(step, make_state(), make_batches(2)))
    held.submitted[0].set_result(1.0)
    states += run(step, states[-1], make_batches(3))
    assert [state.lease is not None for state in states] == [False] * 3 + [True] * 2
    assert from_batches(step) == [3]
    again = list(run(step, make_state(), make_batches(4)))
    assert [state.lease is not None for state in again] == [False] * 3 + [True]


def test_a_step_at_its_fixed_time_waits_and_later_ones_compile_at_once(
    held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tiered(compose(loop_events), "at 1ba", quiet=False)
    held.delay = 0.1
    first = step(make_state(), make_batch())
    assert first.lease is None and step(first, make_batch()).lease is not None
    said = capsys.readouterr().err
    assert "in the background" in said and "waiting for part 0" in said and "from batch 1 on" in said
    assert step(first, make_batch(size=4)).lease is not None
    assert [variant.background_seconds for variant in step.variants()] == [2.0, 0.0]
    assert "waiting" not in capsys.readouterr().err


def test_an_autocast_around_a_step_has_no_effect_on_its_compilation(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = LIBRARY.compile_graph, []

    def compile_graph(*args: Any) -> Compiled:
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(*args)

    monkeypatch.setattr(LIBRARY, "compile_graph", compile_graph)
    step = tiered(compose(loop_events))
    with torch.autocast("cpu", torch.bfloat16):
        state = step(make_state(), make_batch())
        held.submitted[0].set_result(1.0)
        step(state, make_batch())
    assert seen == [False]


@pytest.mark.parametrize("cut", [3, 5, 7])
def test_a_resumed_run_has_the_same_fixed_time(cut: int, tmp_path: pathlib.Path) -> None:
    def step() -> CompiledStep:
        return compiled(compose(loop_events, [noise()]), tiered="at 5ba")

    data = make_batches(4)
    whole = step()
    wanted = pc.fit(whole, make_state(), data, duration="10ba")
    options = {"checkpoints": Checkpoints(tmp_path, background=False), "resume": "auto"}
    pc.fit(step(), make_state(), data, duration=f"{cut}ba", **options)
    resumed = step()
    found = pc.fit(resumed, make_state(), data, duration="10ba", **options)
    assert tree.equal(readable(wanted), readable(found))
    assert [variant.hits for variant in whole.variants()] == [5]
    assert [variant.hits for variant in resumed.variants()] == [10 - max(cut, 5)]


def test_another_fixed_time_in_a_resumed_run_is_reported(tmp_path: pathlib.Path) -> None:
    data, checkpoints = make_batches(4), Checkpoints(tmp_path, background=False)
    pc.fit(made(tiered="at 5ba")[1], make_state(), data, duration="4ba", checkpoints=checkpoints)
    with pytest.warns(pc.errors.CheckpointWarning, match="compiled: eager from 5ba then, eager from 6ba now"):
        pc.fit(made(tiered="at 6ba")[1], make_state(), data, duration="8ba", checkpoints=checkpoints, resume="auto")


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parts_around_slices_and_host_algorithms_wait_too(held: Held, microbatches: int) -> None:
    log: list[Any] = []
    methods = [noise(), host_log(log, Event.AFTER_TRAIN_BATCH, lambda state: float(state.loss))]  # pyright: ignore
    plain = compose(loop_events, methods, microbatches=microbatches)
    step = tiered(compose(loop_events, methods, microbatches=microbatches))
    batches = make_batches(12)
    found = wanted = make_state()
    for number, batch in enumerate(batches):
        wanted, found = plain(wanted, batch), step(found, batch)
        assert log[2 * number] == pytest.approx(log[2 * number + 1], rel=1e-5)
        held.finish(number // 2)
    assert not list(tree.differences(wanted, readable(found), tolerance=1e-5))
    assert None not in from_batches(step) and len(set(from_batches(step))) > 1


def test_warmup_waits_for_everything(held: Held) -> None:
    step = tiered(compose(loop_events))
    held.delay = 0.1
    state = make_state(duration="3ba")
    assert len(step.warmup(state, make_batch())) == 1
    assert step(state, make_batch()).lease is not None and from_batches(step) == [0]


# Failures


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def compile_graph(graph: Any, backend: Any, mode: Any) -> Compiled:
        raise error

    monkeypatch.setattr(LIBRARY, "compile_graph", compile_graph)


def test_a_failure_of_the_other_process_is_reported_and_made_good(held: Held) -> None:
    step = tiered(compose(loop_events))
    state = step(make_state(), make_batch())
    held.submitted[0].set_exception(BackgroundError("the process ended with status -9"))
    with pytest.warns(UserWarning, match="status -9.* compiled in this process"):
        state = step(state, make_batch(1))
    assert state.lease is not None and from_batches(step) == [1]


def test_a_graph_that_cannot_be_compiled_raises(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiered(compose(loop_events))
    state = step(make_state(), make_batch())
    failing(monkeypatch, pc.errors.TraceError("no kernel"))
    held.submitted[0].set_result(1.0)
    with pytest.raises(pc.errors.TraceError, match="no kernel"):
        step(state, make_batch(1))


def test_with_fallback_a_graph_that_cannot_be_compiled_stays_composed(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tiered(compose(loop_events), fallback=True)
    state = step(make_state(), make_batch())
    failing(monkeypatch, pc.errors.TraceError("no kernel"))
    held.submitted[0].set_result(1.0)
    with pytest.warns(UserWarning, match="no kernel.*run eagerly"):
        state = step(state, make_batch(1))
    state = step(state, make_batch(2))
    wanted = list(run(compose(loop_events), make_state(), make_batches(3)))[-1]
    assert state.lease is None and tree.equal(wanted, state)
    assert from_batches(step) == [None]


@pytest.mark.parametrize(
    "error, words, options",
    [
        (TypeError, "at 500ba", {"tiered": "500ba"}),
        (TypeError, "at 500ba", {"tiered": 500}),
        (ValueError, "cannot read the time", {"tiered": "at noon"}),
        (ValueError, "wall-clock", {"tiered": "at 10s"}),
        (ValueError, "keeps its results on disk", {"tiered": True, "backend": "aot_eager"}),
    ],
)
def test_bad_arguments_are_rejected(error: type[Exception], words: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        pc.compile(compose(loop_events), **options)


def test_several_processes_need_a_fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pc.Step, "ranks", object())
    with pytest.raises(ValueError, match="at 500ba"):
        pc.compile(compose(loop_events), tiered=True)
    pc.compile(compose(loop_events), tiered="at 500ba")


# The other process


def a_graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(torch.nn.Linear(2, 2))


def ends_soon(is_over: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_over()


def test_a_process_that_dies_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_START", "import sys; sys.exit('out of luck')")
    one = Background()
    futures = [one.submit(a_graph(), None) for _ in range(2)]
    for future in futures:
        assert str(future.exception(20)).endswith("the process ended with status 1: out of luck")


def test_a_fork_has_a_queue_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that held the lock or served the queue is not in the fork."""
    one = Background()
    one._lock.acquire()
    monkeypatch.setattr(Background, "_compile_elsewhere", lambda self, jobs: jobs[0].seconds.set_result(1.0))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert one.submit(a_graph(), None).result(timeout=60) == 1.0


def test_stopping_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_START", "import time; time.sleep(60)")
    one = Background()
    one.submit(a_graph(), None)
    assert ends_soon(lambda: one._process is not None)
    process = one._process
    assert process is not None
    one.stop()
    assert process.returncode is not None


def test_a_step_that_is_dropped_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_START", "import time; time.sleep(60)")
    step = tiered(compose(loop_events))
    step(make_state(), make_batch())
    queue = step._graphs._builder._background
    assert queue is not None and ends_soon(lambda: queue._process is not None)
    process = queue._process
    assert process is not None and process.poll() is None
    del step
    gc.collect()
    assert ends_soon(lambda: process.poll() is not None)


PROGRAM = """
import sys, time, torch
import purecompose as pc
from torch._dynamo.utils import counters

torch.set_num_threads(1)

class Net(torch.nn.Module):  # in the main module, which no other process can import
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))

torch.manual_seed(0)
weight = torch.tensor([1.0, 2.0, 3.0])  # a constant of the graph

def loss(outputs, targets, reduction="mean"):
    return pc.losses.cross_entropy(outputs * weight, targets, reduction=reduction)

state = pc.State.create(Net(), loss=loss, optimizer=pc.optim.adam(0.01), key=0, duration="9ba")
step = pc.compile(pc.compose(pc.loop_events, [pc.algorithms.mixup(0.2)]), tiered=TIERED)
state = step.init(state)
batch = torch.ones(8, 4), torch.arange(8) % 3
print("begin", flush=True)
while not step.variants() or step.variants()[0].hits < 3:
    state = step(state, batch)
(variant,) = step.variants()
assert variant.background_seconds > 0 and variant.from_batch >= FROM, variant
print(dict(counters["inductor"]).get("fxgraph_cache_hit", 0), flush=True)
"""


def start(program: str, cache: pathlib.Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("when, first", [("True", 1), ("'at 4ba'", 4)])
def test_the_run_finds_what_the_other_process_has_compiled(when: str, first: int, tmp_path: pathlib.Path) -> None:
    process = start(PROGRAM.replace("TIERED", when).replace("FROM", str(first)), tmp_path)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and out.split() == ["begin", "1"], errors
    said = [line for line in errors.splitlines() if "No CUDA runtime" not in line]
    assert all(line.startswith("purecompose: ") for line in said), "the other process prints nothing"


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="reads the list of processes from /proc")
def test_the_other_process_ends_with_a_killed_run(tmp_path: pathlib.Path) -> None:
    def others() -> list[int]:
        name = str(tmp_path).encode()
        found = (int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in found if pid != os.getpid() and name in environment_of(pid)]

    process = start(PROGRAM.replace("TIERED", "True").replace("FROM", "1"), tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "begin\n"
    assert ends_soon(lambda: len(others()) > 1)
    time.sleep(5)  # so that it compiles
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ends_soon(lambda: not others())


def environment_of(pid: int) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
