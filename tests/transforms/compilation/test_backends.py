"""Backends: Inductor, the others of torch.compile, user-defined ones; interruptions while they work."""

import importlib
import os
import pathlib
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import Algorithm, Event, State, compose, loop_events, on, optim, tree
from purecompose.errors import TraceError
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS
from purecompose.transforms.compilation import backends, inductor
from purecompose.transforms.compilation.capture import fake_mode
from tests.helpers import make_batch, make_batches, make_state, noise
from tests.pages import ROOT
from tests.shipped_examples import computes_in_half, examples_on_tasks
from tests.transforms.compilation.compile_helpers import (
    LIBRARY,
    assert_agree,
    assert_runs_agree,
    average,
    compiled,
    flipped_choice,
    made,
    scaling,
    swap,
)


# Importing Inductor imports torch.jit, which itself uses deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
DONATE = pytest.mark.parametrize("donate", [True, False], ids=["donate", "keep"])


@DONATE
def test_a_user_defined_backend_gets_each_graph_once(donate: bool) -> None:
    seen: list[Any] = []

    def mine(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        del inputs
        seen.append(graph)
        return graph.forward

    step, fast = made([scaling("a", Event.BATCH_END, 0.9, 2)], backend=mine, donate=donate)
    assert_runs_agree(step, fast, make_state(), make_batches(4))
    assert len(seen) == len(fast.variants()) == 2


def test_a_backend_of_torch_agrees() -> None:
    step, fast = made([average(), swap()], backend="aot_eager")
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(4))


def counting() -> Algorithm:
    """Return an algorithm that sums the losses in both precisions, twice in the finer one."""

    def apply(event: Event, state: State) -> State:
        dtypes = {"half": torch.float32, "full": torch.float64}
        if event is Event.INIT:
            slot = {name: torch.zeros((), dtype=dtype) for name, dtype in dtypes.items()}
            return state.replace(slots={"counting": {**slot, "last": slot["full"]}})
        assert state.loss is not None
        slot = {name: value + state.loss.detach().to(value) for name, value in state.slots["counting"].items()}
        return state.replace(slots={"counting": {**slot, "last": slot["full"]}})

    return Algorithm("counting", on(Event.INIT, Event.BATCH_END), apply)


@pytest.mark.parametrize("donate", [True, False])
def test_double_precision_numbers_are_kept_by_torch_compile(donate: bool) -> None:
    step = compose(loop_events, [counting()])
    fast = compiled(step, backend="aot_eager", donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(4))


@torch.library.custom_op("tests::halve_", mutates_args={"x", "others"})
def halve_(x: Tensor, others: list[Tensor], by: float = 0.5) -> Tensor:
    """Scale tensors in place; return a sum from before."""
    total = x.sum()
    for one in (x, *others):
        one.mul_(by)
    return total


halve_.register_fake(lambda x, others, by=0.5: x.new_empty(()))


class Halving(torch.nn.Module):
    """A network whose operator writes into a view of a buffer, into another one, and into a tensor of the pass."""

    table: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("table", torch.ones(3, 2))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        fresh = torch.ones(3)
        total = halve_(self.table[:, 1], [self.scale, fresh])
        halve_(self.table.T, [])
        return self.linear(x) * self.scale * fresh + total + self.table.sum()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_operators_that_write_into_their_arguments_agree(backend: str, cache: None) -> None:
    if backend == "inductor" and torch.__version__ >= "2.15":
        step, fast = made(backend=backend)
        with pytest.raises(TraceError, match="as_strided.*fallback=True"):
            fast(make_state(Halving()), make_batches(1)[0])
        return
    step, fast = made(backend=backend)
    end = assert_runs_agree(step, fast, make_state(Halving()), make_batches(3))
    assert end.buffers["table"].tolist() == [[2**-3, 2**-6]] * 3


class Rotating(torch.nn.Module):
    """A network of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.randn(3, 4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        self.a, self.b, self.c = map(torch.nn.Parameter, draws)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x.to(weight.dtype) @ weight).abs() for weight in (self.a, self.b, self.c)]).prod(0)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_complex_parameters_agree(backend: str, cache: None) -> None:
    optimizer = optim.by_pattern({"a": optim.sgd(0.01, momentum=0.9), "b": optim.rmsprop(0.01)}, optim.adam(0.01))
    step, fast = made(backend=backend)
    assert_runs_agree(step, fast, make_state(Rotating(), optimizer=optimizer), make_batches(3), tolerance=1e-4)


# Ctrl-C


def interrupted(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Interrupt the next compilation, during tracing or compiling, as Ctrl-C does."""
    original, calls = getattr(LIBRARY, where), []

    def once(*args: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(LIBRARY, where, once)


@DONATE
@pytest.mark.parametrize("where", ["capture", "compile_graph"])
def test_ctrl_c_in_a_compilation_leaves_step_and_state_usable(
    where: str, donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fast = made([noise(), average()], donate=donate)
    state = step.init(make_state())
    interrupted(monkeypatch, where)
    with pytest.raises(KeyboardInterrupt):
        fast(state, make_batch())
    assert len(fast.variants()) == 0
    assert_runs_agree(step, fast, state, make_batches(3))


# The cache


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "x")  # so that it is restored
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "purecompose" / f"torch-{torch.__version__}"


def test_the_cache_is_private_to_the_user(home: pathlib.Path) -> None:
    inductor.ensure_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_cache_set_by_the_user_is_kept(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    inductor.ensure_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere" and not home.exists()


def test_the_folder_that_torch_names_itself_is_not_kept(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mode()  # imports what asks for the folder in some versions of torch
    names = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    assert names.cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == names.default_cache_dir()
    inductor.ensure_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == names.cache_dir() == str(home)


def test_a_cache_that_others_can_write_to_is_refused(home: pathlib.Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        inductor.ensure_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_without_room_for_a_cache_there_is_a_warning(home: pathlib.Path) -> None:
    home.parent.write_text("a file is in the way")
    with pytest.warns(UserWarning, match="no cache folder"):
        inductor.ensure_cache()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Inductor from compiling its header."""
    ready: Future[None] = Future()
    ready.set_result(None)
    monkeypatch.setattr(inductor, "_start_compiler", lambda builder: ready)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "unused"))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("change", ["no function", "wrapped error", "no module"])
def test_a_changed_inductor_falls_back_to_torch_compile(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = importlib.import_module("torch._inductor.compile_fx")

    def fail(*args: Any) -> None:
        raise importlib.import_module("torch._inductor.exc").InductorError(TypeError("no such argument"), None)

    if change == "no module":
        imports = inductor._Imports(Future(), Future())
        for future in imports:
            future.set_exception(ModuleNotFoundError("No module named 'torch._inductor.graph'"))
        monkeypatch.setattr(inductor, "_import", lambda: imports)
    else:
        monkeypatch.setattr(inner, "compile_fx_inner", fail if change == "wrapped error" else None)
    monkeypatch.setattr(backends, "_by_torch_compile", lambda graph, backend, mode: lambda args: graph(*args))
    step, fast = made(backend="inductor")
    with pytest.warns(UserWarning, match="torch.compile instead"):
        after = fast(make_state(), make_batch())
    assert_agree(step(make_state(), make_batch()), after)


@DONATE
@pytest.mark.usefixtures("no_compiler")
def test_a_failure_of_inductor_is_reported_and_falls_back(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, mode: Any) -> Any:
        raise ValueError("Cannot view a tensor\nlong explanations")

    monkeypatch.setattr(backends, "_by_inductor", fail)
    step, fast = made(backend="inductor", donate=donate)
    with pytest.raises(TraceError, match=r"Inductor failed to compile it \(ValueError: Cannot view a tensor\)"):
        fast(make_state(), make_batch())
    step, fast = made(backend="inductor", donate=donate, fallback=True)
    with pytest.warns(UserWarning, match="As fallback=True asks, such steps run eagerly"):
        assert_runs_agree(step, fast, make_state(), make_batches(3))


# Inductor itself


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one cache for all slow tests of this run only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def queue(name: str = "queue") -> Algorithm:
    """Return an algorithm that keeps the weights of one step ago and of two steps ago."""

    def apply(event: Event, state: State) -> State:
        bias = state.params["0.bias"]
        last = bias if event is Event.INIT else state.slots[name]["last"]
        return state.replace(slots={**state.slots, name: {"last": bias, "before": last}})

    return Algorithm(name, on(Event.INIT, Event.BATCH_START), apply)


@pytest.mark.slow
@pytest.mark.parametrize("method", [swap(), queue()], ids=lambda method: method.name)
def test_inductor_agrees_where_old_values_move_to_other_places(method: Algorithm, cache: None) -> None:
    del cache
    step, fast = made([method], backend="inductor")
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(4))


@pytest.mark.slow
@pytest.mark.parametrize("text, task", examples_on_tasks())
def test_inductor_agrees_on_every_shipped_setting_until_a_choice_flips(text: str, task: str, cache: None) -> None:
    """Over twenty steps losses agree to 1e-5, unless rounding flips a choice in a step, which is then named.

    In bfloat16 each step alone, to its last two digits: Inductor rounds less often than single operations, and a loss
    or weight may itself be in bfloat16.
    """
    del cache
    step = compose(loop_events, [Subject.of(text).algorithm])
    fast = compiled(step, backend="inductor")
    eager = leased = step.init(TASKS[task].make_state(0, duration="20ba", batches_per_epoch=10))
    is_half = computes_in_half(task)
    loss_tolerance, params_tolerance = (2**-6, 2**-6) if is_half else (1e-5, 1e-4)
    for number in range(20):
        batch, before = TASKS[task].make_batch(number, 6), eager
        eager, leased = step(eager, batch), fast(eager if is_half else leased, batch)
        found = list(tree.differences(eager.loss, leased.loss, tolerance=loss_tolerance))
        if found:
            who = flipped_choice(step, before, batch)
            assert who is not None, f"batch {number}: {found[0]}"
            print(f"{text} on {task}: in batch {number} rounding tips the choice of {who}")
            return
    # The floor is for weights that stay at 0, but for rounding.
    assert_agree(eager.params, leased.params, tolerance=lambda _: tree.Tolerance(params_tolerance, 1e-6))


def test_a_choice_that_rounding_flips_is_found_and_named() -> None:
    keep = Subject.of("selective_backprop(0, 1.0, keep=0.5, full_every=0)").algorithm
    step = compose(loop_events, [keep])
    state, (x, y) = step.init(make_state(duration="9ba")), make_batch()
    assert flipped_choice(step, state, (x, y)) is None
    # The inputs hardly matter, so that losses differ only by rounding.
    state = state.replace(params={**state.params, "3.weight": state.params["3.weight"] * 1e-7})
    assert flipped_choice(step, state, (x, torch.zeros_like(y))) == f"{keep.name} at {Event.AFTER_DATALOADER}"


INTERRUPTED = """
    import os, signal, sys, threading, time
    import torch
    import purecompose as pc
    from purecompose.transforms.compilation import inductor

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="9ba")
    step = pc.compose(pc.loop_events)
    fast = pc.compile(step, quiet=True)
    batch = torch.randn(8, 4), torch.randint(3, (8,))

    graphs = sys.modules["purecompose.transforms.compilation.building"]
    original = graphs.compile_graph

    is_over = threading.Event()

    inductor.start_inductor(torch.device("cpu"))  # it takes a second, and no Ctrl-C reaches it

    def press():
        # Soon after the work has begun, and again, as a person would: where it comes while an object is being deleted,
        # Python itself drops it.
        while not is_over.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    def compile_graph(*args):
        threading.Thread(target=press, daemon=True).start()
        return original(*args)

    graphs.compile_graph = compile_graph
    try:
        fast(state, batch)
    except KeyboardInterrupt:
        is_over.set()
        print("interrupted", len(fast.variants()))
    is_over.set()
    graphs.compile_graph = original
    first = fast(fast(state, batch), batch)
    second = step(step(state, batch), batch)
    worst = max(float((first.params[k] - second.params[k]).abs().max()) for k in first.params)
    print("agrees", worst < 1e-4)
"""


def traced(fn: Callable[..., Any], args: list[Tensor]) -> torch.fx.GraphModule:
    mode = fake_mode()
    fakes = [mode.from_tensor(arg, static_shapes=True) for arg in args]
    with mode:
        return make_fx(fn)(*fakes)


@pytest.mark.slow
def test_inductor_lays_results_out_as_they_were_traced(cache: None) -> None:
    """By default it returns results of convolutions with channels last, which the next part would misread."""
    del cache

    def grads(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.conv2d(x, first, padding=1)
        cut = {"bias_sizes": [0], "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "transposed": False}
        cut |= {"output_padding": (0, 0), "groups": 1, "output_mask": [True, True, False]}
        slope = torch.conv2d(hidden.tanh(), second, stride=2, padding=1).cos()
        return hidden, *torch.ops.aten.convolution_backward(slope, hidden.tanh(), second, **cut)[:2]

    args = [torch.randn(6, 2, 6, 6), torch.randn(4, 2, 3, 3), torch.randn(4, 4, 3, 3)]
    found, expected = backends.compile_graph(traced(grads, args), "inductor", None)(list(args)), grads(*args)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_views_fit_the_strides_that_were_traced(cache: None) -> None:
    """An empty cache of keys is extended by transposed keys: torch copies them into contiguous memory, Inductor's
    decomposition keeps their strides, and the view for the matrix product does not fit.
    """
    del cache

    def attend(keys: Tensor, queries: Tensor) -> Tensor:
        keys = torch.cat([torch.empty(0), keys.transpose(1, 2)], -2)
        return queries @ keys.transpose(-2, -1)

    args = [torch.randn(4, 16, 2, 8), torch.randn(4, 2, 16, 8)]
    (found,) = backends.compile_graph(traced(lambda *args: [attend(*args)], args), "inductor", None)(list(args))
    torch.testing.assert_close(found, attend(*args))


def test_results_have_the_dtype_that_was_traced() -> None:
    """Decompositions may return another one: that of a softmax's gradient in bfloat16 forgets to round (torch 2.14)."""

    def multiply(weights: Tensor, values: Tensor) -> list[Tensor]:
        return [torch.sigmoid(weights) @ values]

    args = [torch.randn(4, 4).bfloat16(), torch.randn(4, 2).bfloat16()]
    graph = traced(multiply, args)
    wide = {torch.ops.aten.sigmoid.default: lambda x: 1 / (1 + (-x.float()).exp())}
    (found,) = backends._functional(graph, wide)(*args)
    torch.testing.assert_close(found, multiply(*args)[0], rtol=0.02, atol=0.02)
    assert found.dtype is torch.bfloat16


@pytest.mark.slow
def test_a_real_ctrl_c_while_inductor_works_leaves_the_step_usable(tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout.split("\n")[:2] == ["interrupted 0", "agrees True"], result.stdout + result.stderr[-2000:]
