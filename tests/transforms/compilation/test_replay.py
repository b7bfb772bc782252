"""CUDA graphs on a simulated device: launches are logged while recording, and run when replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import Event, every, hparam, optim
from purecompose.transforms.compilation.gpu import Replay, check_on_device
from tests.helpers import make_batch, make_batches, make_cnn, make_state, noise
from tests.transforms.compilation.compile_helpers import (
    LIBRARY,
    assert_agree,
    assert_runs_agree,
    average,
    made,
    scaling,
    swap,
)


class Device:
    """A simulated device: a launch runs immediately, or is added to the graph that is being recorded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recording: list[Callable[[], None]] | None = None

    def launch(self, fn: Callable[[list[Tensor]], Any]) -> Callable[[list[Tensor]], Any]:
        """Return a function whose launches can be recorded; recorded results have fixed memory, as in CUDA's pool."""

        def call(args: list[Tensor]) -> Any:
            if self.recording is None:
                self.log.append("run")
                return fn(args)
            self.log.append("written down")
            args = list(args)
            kept = [tensor.clone() for tensor in args]
            shapes = fn([tensor.detach() for tensor in kept])
            places = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() for t in shapes]

            def again() -> None:
                for place, value in zip(places, fn(list(args)), strict=True):
                    place.copy_(value)

            self.recording.append(again)
            return places

        return call


class Graph:
    """A replacement for `torch.cuda.CUDAGraph`."""

    device: Device

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Run the recorded launches."""
        self.device.log.append("replay")
        for launch in self.launches:
            launch()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made_up = Device()

    @contextmanager
    def record(graph: Graph, stream: torch.device, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == (torch.device("cpu"), "thread_local")
        made_up.recording = graph.launches
        try:
            yield
        finally:
            made_up.recording = None

    monkeypatch.setattr(Graph, "device", made_up, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)  # the one on which the arguments are
    return made_up


def test_it_runs_then_records_then_replays(device: Device) -> None:
    weight = torch.zeros(2)

    def part(args: list[Tensor]) -> list[Tensor]:
        bound, x = args
        bound.add_(x)
        return [bound * 2, x + 1]

    replay = Replay(device.launch(part), 1)
    seen = []
    for number in range(4):
        seen.append(replay([weight, torch.full((2,), 10.0**number)]))
    assert device.log == ["run", "written down", "replay", "replay", "replay"]
    assert weight.tolist() == [1111, 1111]
    assert [first.tolist()[0] for first, _ in seen] == [2, 22, 222, 2222]
    assert [second.tolist()[0] for _, second in seen] == [2, 11, 101, 1001]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "sliced": lambda x: x[..., ::2],
    "offset": lambda x: x[1:, 1:],
    "transposed": lambda x: x.t(),
    "repeated": lambda x: x[:1].expand(5, 6),
    "a number": lambda x: x[2, 2],
    "empty": lambda x: x.t()[:0],
}


@pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES)
def test_arguments_keep_their_strides(view: Callable[[Tensor], Tensor], device: Device) -> None:
    found: list[tuple[int, ...]] = []

    def part(args: list[Tensor]) -> list[Tensor]:
        return [args[0].clone()]

    def watched(args: list[Tensor]) -> list[Tensor]:
        found.append(args[0].stride())
        return launched(args)

    launched = device.launch(part)
    replay = Replay(watched, 0)
    x = torch.ones(())
    for seed in range(4):
        x = view(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(replay([x])[0], x)
    assert found == [x.stride()] * 2, "the first run and the recording"


def test_a_failed_recording_is_repeated(device: Device) -> None:
    errors: list[Exception | None] = [None, RuntimeError("no room"), None]

    def part(args: list[Tensor]) -> list[Tensor]:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return [args[0] + 1]

    replay = Replay(device.launch(part), 0)
    replay([torch.zeros(1)])
    with pytest.raises(RuntimeError, match="no room"):
        replay([torch.zeros(1)])
    assert replay([torch.ones(1)])[0].item() == 2


def test_numbers_of_the_host_are_refused() -> None:
    def scaled(x: Tensor, rate: Tensor) -> Tensor:
        return x * rate.to("cpu").to(x.device)

    with torch.no_grad():
        graph = make_fx(scaled, tracing_mode="fake")(torch.ones(2, device="meta"), torch.ones((), device="meta"))
    with pytest.raises(ValueError, match=r"mode='reduce-overhead': the result of aten\._to_copy\.default.* is on cpu"):
        check_on_device(graph, torch.device("meta"))
    with torch.no_grad():
        graph = make_fx(torch.mul, tracing_mode="fake")(torch.ones(2), torch.ones(()))
    check_on_device(graph, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"an argument, torch.float32 of shape \(2,\), is on cpu"):
        check_on_device(graph, torch.device("meta"))


# Whole steps


@pytest.fixture
def replayed(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Record parts of steps on the CPU, too, as on a GPU with mode="reduce-overhead"."""
    compile_graph, part = LIBRARY.compile_graph, LIBRARY.CompiledPart
    monkeypatch.setattr(LIBRARY, "compile_graph", lambda *args: device.launch(compile_graph(*args)))
    monkeypatch.setattr(LIBRARY, "CompiledPart", lambda *args, **options: part(*args, **{**options, "replays": True}))
    return device


def test_a_replayed_step_agrees(replayed: Device) -> None:
    step, fast = made([noise(), average(), swap()])
    state = step.init(make_state(make_cnn(), optimizer=optim.adam(1e-2)))
    assert_runs_agree(step, fast, state, make_batches(6, shape=(2, 6, 6)))
    assert replayed.log == ["run", "written down", *["replay"] * 5]


def test_replayed_steps_in_parts_agree(replayed: Device) -> None:
    step, fast = made([scaling("a", Event.AFTER_DATALOADER, 1.1, 2), average(when=every(3)), swap()])
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(13))
    assert "replay" in replayed.log


def test_the_recording_sees_changes_made_by_users(replayed: Device) -> None:
    step, fast = made()
    eager = leased = make_state(optimizer=optim.sgd(hparam("lr", 0.1), momentum=0.9))
    for number, batch in enumerate(make_batches(8)):
        if number in (3, 5):
            changes = {"hparams": {"lr": torch.tensor(0.01 * number)}}
            eager, leased = eager.replace(**changes), leased.replace(**changes)
        eager, leased = step(eager, batch), fast(leased, batch)
    assert_agree(eager, leased)
    assert replayed.log.count("written down") == 1


def test_without_donation_nothing_is_recorded(replayed: Device) -> None:
    step, fast = made(donate=False)
    assert_runs_agree(step, fast, make_state(), make_batches(4))
    assert replayed.log == ["run"] * 4


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_other_modes_and_devices_record_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_graph = LIBRARY.compile_graph
    monkeypatch.setattr(LIBRARY, "compile_graph", lambda graph, backend, mode: compile_graph(graph, "eager", None))
    step, fast = made(mode="reduce-overhead", backend="inductor")  # on the CPU
    assert_agree(step(make_state(), make_batch()), fast(make_state(), make_batch()))
    assert device.log == []


def test_a_new_set_of_buffers_is_not_replayed_at_old_addresses(replayed: Device) -> None:
    step, fast = made()
    first = step.init(make_state())
    runs = []
    for _ in range(2):  # each run from the same state has its own buffers
        state = first
        for batch in make_batches(4):
            state = fast(state, batch)
        runs.append(state)
    assert_agree(*runs)
    assert replayed.log == ["run", "written down", "replay", "replay", "replay"] * 2
