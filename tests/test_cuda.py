"""No step waits for the device: on a GPU torch itself detects it, elsewhere the meta device replaces one.

On the meta device tensors have no values: reading one fails there, and copies between it and the host are
detected. The behaviour inside torch's CUDA kernels can only be tested on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from purecompose import Event, State, batch as batches, compose, evaluate, fit, hparam, loop_events, metrics, optim
from purecompose.loop import eval_events
from purecompose.random import choice
from purecompose.run.evaluation import Evaluator, run_evaluator
from purecompose.schedule import cosine
from purecompose.testing.case import Subject
from purecompose.testing.tasks import TASKS
from tests.helpers import changing, make_cnn, make_mlp, make_state
from tests.shipped import SHIPPED
from tests.shipped_examples import examples_on_tasks


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIMIZERS = {
    "sgd": optim.sgd(0.1 * cosine(), momentum=hparam("momentum", 0.9), dampening=0.1, weight_decay=0.01),
    "nesterov": optim.sgd(hparam("lr", 0.1), momentum=0.9, nesterov=True),
    "adam": optim.adam(0.01 * cosine(warmup="0.2dur"), weight_decay=0.1, amsgrad=True),
    "adamw": optim.adamw(0.01, betas=(hparam("beta", 0.9), 0.99), groups={"*.bias": {"weight_decay": 0.0}}),
    "decoupled_sgdw": optim.decoupled_sgdw(0.1 * cosine(), momentum=0.9, weight_decay=1e-4),
    "decoupled_adamw": optim.decoupled_adamw(hparam("lr", 0.01), weight_decay=1e-4),
    "rmsprop": optim.rmsprop(0.01 * cosine(), momentum=0.9, centered=True),
    "adafactor": optim.adafactor(0.01 * cosine()),
    "adagrad": optim.adagrad(0.1 * cosine()),
    "sparse_adam": optim.sparse_adam(hparam("lr", 0.01)),
    "several": optim.by_pattern({"*": optim.muon(0.02 * cosine())}, optim.lion(hparam("lr", 0.01))),
}


class Waits(RuntimeError):
    """Raised if an operation would make the host wait for a GPU."""


class _HostData(TorchFunctionMode):
    """Refuse to make device tensors from host numbers, which on a GPU is a copy from pageable memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "asarray", "new_tensor") and result.is_meta:
            if not (name == "as_tensor" and isinstance(args[0], Tensor) and args[0].is_meta):
                raise Waits(f"torch.{name} copies numbers of the host")
        return result


class _Copies(TorchDispatchMode):
    """Refuse operations that combine host and device, except asynchronous copies to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = batches.tensors([*args, kwargs])
        if torch.Tag.pointwise in func.tags:  # such kernels get the numbers of the host by value
            read = [tensor for tensor in read if tensor.dim() or tensor.is_meta]
        given = {tensor.device.type for tensor in read}
        is_sent = func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking") and given == {"cpu"}
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise Waits(f"{func} reads values") from error
        there = given | {tensor.device.type for tensor in batches.tensors([result])}
        if len(there) > 1 and not is_sent:
            raise Waits(f"{func} brings {' and '.join(sorted(there))} together")
        return result


@contextmanager
def on_meta() -> Iterator[torch.device]:
    """Yield the meta device, with checks for waiting."""
    with _Copies(), _HostData():
        yield torch.device("meta")


@contextmanager
def on_gpu() -> Iterator[torch.device]:
    """Yield the GPU, where torch raises for operations that wait."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield torch.device("cuda", 0)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


DEVICES = [pytest.param("meta", on_meta, id="meta"), pytest.param("cuda", on_gpu, id="cuda", marks=needs_cuda)]
Watch = Callable[[], Any]


def run_watched(state: State, algorithms: Any, data: list[Any], device: str, watch: Watch, **options: Any) -> State:
    """Trains on the data twice from the same state, the second time watched; parameters keep shapes and dtypes."""
    step = compose(loop_events, algorithms, **options)
    state = step.init(state).to(device)
    data = [batches.map_tensors(lambda tensor: tensor.to(device), batch) for batch in data]
    first = start = state
    for batch in data:  # each schedule has its own first run, in which the library does its checks
        first = step(first, batch)
    with watch():
        for batch in data:
            state = step(state, batch)
    for name, param in start.params.items():
        assert param.shape == state.params[name].shape and param.dtype == state.params[name].dtype
    return state


@pytest.mark.parametrize(("device", "watch"), DEVICES)
@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("text", "task"), examples_on_tasks(quick=40))
def test_shipped_algorithms_do_not_wait(text: str, task: str, microbatches: int, device: str, watch: Watch) -> None:
    chosen = TASKS[task]
    if chosen.is_half and device == "meta":
        pytest.skip("torch has no autocast on meta tensors")
    state = chosen.make_state(0, duration="8ba", batches_per_epoch=4)
    data = [chosen.make_batch(seed, 6) for seed in range(8)]
    algorithm = Subject.of(text).algorithm
    after = run_watched(state, [algorithm], data, device, watch, microbatches=microbatches)
    assert after.timestamp.batch == 8 and after.device.type == device


def test_a_clock_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    monkeypatch.setattr("purecompose.core.clock.sent", waiting)
    chosen = TASKS["vectors"]
    state = chosen.make_state(0, optimizer=OPTIMIZERS["sgd"], duration="4ba", batches_per_epoch=4)
    with pytest.raises(Waits, match="copies numbers of the host"):
        run_watched(state, [], [chosen.make_batch(0, 6)], "meta", on_meta)


@pytest.mark.parametrize(("device", "watch"), DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_do_not_wait(optimizer: str, device: str, watch: Watch) -> None:
    chosen = TASKS["vectors"]
    state = chosen.make_state(0, optimizer=OPTIMIZERS[optimizer], duration="4ba", batches_per_epoch=4)
    data = [chosen.make_batch(seed, 6) for seed in range(4)]
    assert run_watched(state, [], data, device, watch, microbatches=2).timestamp.batch == 4


@pytest.mark.parametrize(("device", "watch"), DEVICES)
@pytest.mark.slow
@pytest.mark.parametrize("task", ["vectors", "images"])
@pytest.mark.filterwarnings("ignore:decoupled_weight_decay. .*also has a weight decay")
@pytest.mark.filterwarnings("ignore:.*computes the gradients again")
def test_all_methods_together_do_not_wait(task: str, device: str, watch: Watch) -> None:
    chosen = TASKS[task]
    state = chosen.make_state(0, optimizer=OPTIMIZERS["adamw"], duration="4ba", batches_per_epoch=4)
    rows = [row for row in SHIPPED.values() if task in row.tasks and not row.is_alone]
    algorithms = [Subject.of(row.examples[0]).algorithm for row in rows]
    data = [chosen.make_batch(seed, 6) for seed in range(4)]
    after = run_watched(state, algorithms, data, device, watch, microbatches=2)
    assert after.timestamp.batch == 4


@pytest.mark.parametrize(("device", "watch"), DEVICES)
def test_evaluation_waits_only_where_its_values_are_read(device: str, watch: Watch) -> None:
    chosen = TASKS["images"]
    state = chosen.make_state(0).to(device)
    data = [batches.map_tensors(lambda t: t.to(device), chosen.make_batch(seed, 6)) for seed in range(3)]
    measures = {"accuracy": metrics.accuracy, "top": metrics.top_k(2), "loss": metrics.mean_loss(state.context.loss)}
    evaluator, step = Evaluator(data, measures), compose(eval_events)
    run_evaluator(evaluator, state, step)
    with watch():
        after = run_evaluator(evaluator, state, step)
    assert set(after.metrics) == {"eval/accuracy", "eval/top", "eval/loss"}


def _reads(state: State) -> State:
    assert state.loss is not None
    return state.replace(metrics={"twice": state.loss * state.loss.item()})


def _chooses(state: State) -> State:
    return state.replace(metrics={"large": state.inputs[state.inputs > 0].sum()})


def _makes(state: State) -> State:
    return state.replace(metrics={"made": torch.tensor(2.0, device=state.device)})


@pytest.mark.parametrize(("device", "watch"), DEVICES)
@pytest.mark.parametrize("fn", [_reads, _chooses, _makes])
def test_operations_that_wait_are_found(fn: Callable[[State], State], device: str, watch: Watch) -> None:
    # Only from the second time on: the run before the checked one must pass, also on a device without values.
    times: list[int] = []

    def late(state: State) -> State:
        times.append(0)
        return fn(state) if len(times) > 1 else state.replace(metrics={"nothing": state.key})

    state = make_state(duration="2ba", batches_per_epoch=2)
    data = [(torch.randn(6, 4), torch.randint(3, (6,)))]
    with pytest.raises(RuntimeError) as caught:
        run_watched(state, [changing("late", Event.AFTER_TRAIN_BATCH, late)], data, device, watch)
    assert device == "cuda" or isinstance(caught.value, Waits)
    assert len(times) == 2


@pytest.mark.parametrize(("device", "watch"), DEVICES)
def test_weights_of_a_choice_are_sent(device: str, watch: Watch) -> None:
    state = make_state().to(device)
    with watch():
        assert choice(state.rng("any"), 3, 2, p=[0.2, 0.3, 0.5]).shape == (2,)


def test_the_step_leaves_channels_last_as_it_is() -> None:
    net = make_cnn().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    for optimizer in OPTIMIZERS.values():
        state = make_state(net, optimizer=optimizer, duration="3ba", batches_per_epoch=3)
        strides = layout(state)
        assert strides["params.0.weight"] == (18, 1, 6, 2)  # channels are contiguous, three pixels per row
        step = compose(loop_events)
        state = step.init(state)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            images = torch.randn(5, 2, 6, 6, generator=generator).contiguous(memory_format=torch.channels_last)
            state = step(state, (images, torch.arange(5) % 3))
            assert layout(state) == strides


def layout(state: State) -> dict[str, Any]:
    tensors = {"params": state.params, **(state.opt_state if isinstance(state.opt_state, dict) else {})}
    return {f"{role}.{name}": t.stride() for role, part in tensors.items() for name, t in part.items()}


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_training_on_a_gpu_equals_training_on_the_cpu(precision: str) -> None:
    data = [
        (torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(s)), torch.arange(8) % 3) for s in range(4)
    ]
    algorithms = [Subject.of(text).algorithm for text in ("mixup(0.2)", "label_smoothing(0.1)")]

    def trained(device: str) -> State:
        state = make_state(make_cnn(), precision=precision, duration="2ep", device=device)
        return fit(compose(loop_events, algorithms), state, data)

    there, here = trained("cuda"), trained("cpu")
    tolerance = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1, "fp16": 2e-2}[precision]
    for name, param in there.params.items():
        assert param.dtype is torch.float32
        torch.testing.assert_close(param.cpu(), here.params[name], rtol=tolerance, atol=tolerance)
    values = evaluate(there, data, {"accuracy": metrics.accuracy})
    assert 0 <= values["accuracy"] <= 1


@needs_cuda
def test_fp32_on_a_gpu_has_all_its_digits() -> None:
    """TensorFloat-32 has an error of about 1e-3 here, float32 of 1e-6."""
    torch.manual_seed(0)
    net = torch.nn.Conv2d(64, 64, 3, padding=1)
    images = torch.randn(8, 64, 16, 16)
    exact = net.double()(images.double())
    outputs = make_state(net.float(), device="cuda").forward(images.cuda()).cpu().double()
    assert (outputs - exact).abs().max() / exact.abs().max() < 2e-5


@needs_cuda
def test_dropout_on_a_gpu_draws_the_same_as_on_the_cpu() -> None:
    net = make_mlp(dropout=0.5)
    batch = (torch.randn(6, 4), torch.arange(6) % 3)
    step = compose(loop_events)
    there = step(make_state(net, device="cuda"), tuple(tensor.cuda() for tensor in batch))
    here = step(make_state(net), batch)
    for name, param in there.params.items():
        torch.testing.assert_close(param.cpu(), here.params[name], rtol=1e-4, atol=1e-5)
