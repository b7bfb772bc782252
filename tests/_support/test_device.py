"""Numbers sent to a device, and the switches of TensorFloat-32, which also exist without a GPU."""

import pathlib
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import Event, State, compose, loop_events, optim, tree
from purecompose._support.device import PRECISIONS, arithmetic, constants, keep_freed_memory, return_freed_memory, sent
from tests.helpers import changing, make_batch, make_batches, make_cnn, make_state, run_steps


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BACKENDS: Any = torch.backends
OPERATORS = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
PARENTS = (BACKENDS, BACKENDS.cudnn)
MKLDNN = BACKENDS.mkldnn.matmul


def old(read: Callable[[], Any]) -> Any:
    """Return a switch by its older name, which raises if the newer ones have values that it cannot represent."""
    try:
        return read()
    except RuntimeError:
        return "raises"


def switches() -> list[Any]:
    return [
        *(operator.fp32_precision for operator in (*OPERATORS, *PARENTS, MKLDNN)),
        old(torch.get_float32_matmul_precision),
        old(lambda: torch.backends.cuda.matmul.allow_tf32),
        old(lambda: torch.backends.cudnn.allow_tf32),
    ]


def multiplied() -> list[bool]:
    """Return whether matrix products, convolutions and recurrent layers use TensorFloat-32."""
    return [operator.fp32_precision == "tf32" for operator in OPERATORS]


def set_all(values: dict[Any, str]) -> None:
    for operator, value in values.items():
        operator.fp32_precision = value


def in_matmul_alone() -> None:
    set_all({BACKENDS.cuda.matmul: "tf32"})


STARTS: dict[str, Callable[[], Any]] = {
    "torch's own": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older names": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "newer names, a mix": in_matmul_alone,
    "newer names, off": lambda: set_all(dict.fromkeys(OPERATORS, "ieee")),
    "newer names, on for all": lambda: set_all({BACKENDS: "tf32"}),
    "convolutions apart": lambda: set_all({BACKENDS.cudnn.conv: "ieee"}),
}


@pytest.fixture(autouse=True)
def torch_defaults() -> Iterator[None]:
    """Set the switches to torch's defaults before and after each test."""
    for is_first in (True, False):
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        set_all({BACKENDS: "none", BACKENDS.cudnn: "none", MKLDNN: "none", BACKENDS.cuda.matmul: "none"})
        set_all({BACKENDS.cudnn.conv: "tf32", BACKENDS.cudnn.rnn: "tf32"})
        if is_first:
            yield


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("start", STARTS)
def test_the_precision_sets_the_switches_for_cuda_and_restores_them(start: str, precision: str) -> None:
    STARTS[start]()
    before = switches()
    with arithmetic(precision, CUDA):
        assert multiplied() == [precision == "tf32"] * 3
        with arithmetic(precision, CUDA):
            assert multiplied() == [precision == "tf32"] * 3
        assert multiplied() == [precision == "tf32"] * 3
    assert switches() == before


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("start", [name for name in STARTS if name != "newer names, off"])
def test_the_older_names_agree_with_the_newer_ones_meanwhile(start: str, precision: str) -> None:
    STARTS[start]()
    if multiplied() == [precision == "tf32"] * 3 and "raises" in switches():
        pytest.skip("nothing is to be switched, and the caller's own mix stays")
    with arithmetic(precision, CUDA):
        assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
        assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")
        assert torch.get_float32_matmul_precision() in (["high", "medium"] if precision == "tf32" else ["highest"])


def test_the_switches_are_restored_after_an_error() -> None:
    before = switches()
    with pytest.raises(OSError), arithmetic("tf32", CUDA):
        raise OSError
    assert switches() == before


def test_other_devices_have_no_such_switch() -> None:
    before = switches()
    for device in (CPU, torch.device("mps"), torch.device("meta")):
        with arithmetic("tf32", device):
            assert switches() == before


class Watched(torch.autograd.Function):
    """The identity; records the switches in the forward and backward pass."""

    seen: list[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Watched.seen.append(multiplied())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Watched.seen.append(multiplied())
        return grads[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Watched.apply(self.layer(x))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_forward_and_backward_runs_within_the_scope(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["purecompose.core.compose"]  # the package's attribute of this name is the function
    devices = []

    def on_cuda(asked: str, device: torch.device) -> Any:
        devices.append(device)
        return arithmetic(asked, CUDA)

    monkeypatch.setattr(module, "arithmetic", on_cuda)
    before, step, state = switches(), compose(loop_events), make_state(Net(), precision=precision)
    Watched.seen = []
    for seed in (0, 1):  # the checked step, and the next one
        state = step(state, make_batch(seed))
    assert Watched.seen[-2:] == [[precision == "tf32"] * 3] * 2 and len(Watched.seen) >= 4
    assert all(seen == [precision == "tf32"] * 3 for seen in Watched.seen)
    assert switches() == before and devices == [CPU, CPU]


@pytest.mark.parametrize("numbers", [[1, 2], [[0.5], [float("inf")]], []])
def test_numbers_arrive_on_the_device(numbers: list[Any]) -> None:
    there = sent(numbers, torch.float64, CPU)
    assert there.tolist() == numbers and there.dtype is torch.float64
    elsewhere = sent(numbers, torch.float64, torch.device("meta"))
    assert elsewhere.shape == there.shape and elsewhere.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_arrive_on_a_gpu_without_waiting() -> None:
    mode = torch.cuda.get_sync_debug_mode()
    busy = torch.randn(2048, 2048, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrived = []
        for i in range(200):
            busy = torch.tanh(busy @ busy)
            arrived.append(sent([i], torch.float64, CUDA))  # reused pinned memory is not overwritten too soon
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cat(arrived).tolist() == list(range(200))


class Widths(nn.Module):
    """A network that records the dtypes that it computes in."""

    seen: list[torch.dtype] = []

    def __init__(self) -> None:
        super().__init__()
        self.net = make_cnn()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        Widths.seen.append(outputs.dtype)
        return outputs


@pytest.mark.parametrize("optimizer", [optim.sgd(0.1, momentum=0.9), optim.adamw(0.01)])
def test_bf16_computes_forward_in_bfloat16_and_keeps_everything_else_in_float32(optimizer: Any) -> None:
    found: dict[str, set[torch.dtype]] = {}

    def look(state: State) -> State:
        assert state.grads is not None
        found["grads"] = {grad.dtype for grad in state.grads.values()}
        found["outputs"] = {state.outputs.dtype}
        return state

    def trained(precision: str) -> State:
        Widths.seen = []
        state = make_state(Widths(), precision=precision, optimizer=optimizer)
        step = compose(loop_events, [changing("look", Event.AFTER_TRAIN_BATCH, look)])
        return run_steps(step, state, make_batches(4, shape=(2, 6, 6)))

    wide = trained("fp32")
    assert set(Widths.seen) == {torch.float32}
    narrow = trained("bf16")
    assert set(Widths.seen) == {torch.bfloat16}
    assert found == {"grads": {torch.float32}, "outputs": {torch.float32}}
    leaves = [leaf for leaf in tree.leaves((narrow.params, narrow.opt_state, narrow.loss)) if leaf.ndim]
    assert {leaf.dtype for leaf in leaves} == {torch.float32}
    assert {n: b.dtype for n, b in narrow.buffers.items()} == {n: b.dtype for n, b in wide.buffers.items()}
    for name, param in narrow.params.items():
        assert not torch.equal(param, wide.params[name])
        torch.testing.assert_close(param, wide.params[name], rtol=0.05, atol=0.05)


def test_constants_of_other_devices_are_copied_once_and_an_operation_of_graphs() -> None:
    device = torch.device("meta")
    graph = make_fx(lambda x: x * constants([1.0, 2.0], torch.float32, device))(torch.ones(2, device=device))
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.purecompose.constants.default)) == 1
    assert not graph.graph.find_nodes(op="get_attr"), "nothing of the host"
    found = [torch.ops.purecompose.constants([0.5, 2.0], torch.float64, CPU) for _ in range(2)]
    assert all(one.tolist() == [0.5, 2.0] and one.dtype is torch.float64 for one in found)
    assert found[0].data_ptr() != found[1].data_ptr(), "users may write into one"


def test_constants_first_used_in_inference_can_be_saved_for_a_gradient() -> None:
    with torch.inference_mode():
        torch.ops.purecompose.constants([0.25, 3.0], torch.float32, CPU)
    x = torch.ones(2, requires_grad=True)
    (x * torch.ops.purecompose.constants([0.25, 3.0], torch.float32, CPU)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.25, 3.0]


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such options")


def resident_bytes() -> int:
    """Return the size of the process's resident set."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


@needs_glibc
def test_blocks_freed_between_others_are_returned() -> None:
    tensors = [torch.ones(2**14) for _ in range(1600)]  # 64 KB each, which malloc does not map separately
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    return_freed_memory()
    assert resident_bytes() < before - 80e6
    assert all(bool((tensor == 1).all()) for tensor in kept)


@needs_glibc
def test_kept_memory_is_used_again_without_page_faults() -> None:
    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.zeros(2**21) for _ in range(16)]  # 8 MB each
        del activations
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    assert min(faults_of_a_step() for _ in range(5)) < 10_000  # of 32,768 pages: other memory may lie in between


@pytest.mark.parametrize(
    "setting",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576"),
    ],
)
def test_settings_in_the_environment_are_left_as_they_are(
    setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("purecompose._support.device._of_glibc", asked.append)
    monkeypatch.setenv(*setting)
    keep_freed_memory()
    assert asked == []
    monkeypatch.delenv(setting[0])
    keep_freed_memory()
    assert asked == ["mallopt"]
