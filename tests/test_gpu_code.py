"""The harness that writes GPU code without a GPU: what of it needs no CUDA build of torch, and one run of the rest."""

import os
import pathlib
import shlex
import subprocess

import pytest
import torch

from benchmarks.gpu_code.devices import H100, L4
from benchmarks.gpu_code.faults import FAULTS, aliased_memory, early_write, other_draws
from benchmarks.gpu_code.numbers import difference
from benchmarks.gpu_code.peaks import peak_of
from benchmarks.gpu_code.pretend import InterfaceError, find, replace
from benchmarks.gpu_code.rules import host_work
from benchmarks.gpu_code.timing import node_time, times
from benchmarks.gpu_code.writing import Code, Node


RUN = pathlib.Path(__file__).parents[1] / "benchmarks" / "gpu_code" / "run"

needs_cuda_wheel = pytest.mark.skipif(
    "GPU_CODE_PYTHON" not in os.environ, reason="GPU_CODE_PYTHON names no Python with a CUDA build of torch"
)


def make_node(num_bytes: int = 0, flops: int = 0, dtype: torch.dtype = torch.float32) -> Node:
    return Node("kernel", num_bytes, flops, dtype)


def make_code(*nodes: Node, kernels: int = 0, source: str = "def call(args):\n    pass\n") -> Code:
    return Code(source, ("kernel",) * kernels, (), (), nodes, 2**20)


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_operations() -> None:
    assert node_time(make_node(3_350_000_000), H100) == pytest.approx(1e-3)
    assert node_time(make_node(8, 989 * 10**9, torch.bfloat16), H100) == pytest.approx(1e-3)
    single = make_node(8, 495 * 10**9)
    assert node_time(single, H100) == pytest.approx(495 / 67 * 1e-3)


def test_without_cuda_graphs_a_step_of_short_kernels_takes_its_launches() -> None:
    short = times([make_code(make_node(1000), kernels=100)], H100)
    assert short.without_graphs == pytest.approx(600e-6)
    assert short.with_graphs == pytest.approx(50e-6, rel=0.01)
    long = times([make_code(make_node(3 * 10**9), kernels=10)], L4)
    assert long.without_graphs == long.with_graphs == pytest.approx(10e-3, rel=0.01)


@pytest.mark.parametrize(
    "line, what",
    [
        ("zuf0 = buf3.item()", "reads a value"),
        ("buf1 = empty_strided_cpu((2,), (1,), torch.float32)", "copies between"),
        ("cpp_fused_add_0(buf1)", "runs a kernel of the host"),
    ],
)
def test_work_on_the_host_is_reported_with_its_line(line: str, what: str) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    clean = "def call(args):\n    buf0 = empty_strided_cuda((2,), (1,), torch.float32)\n"
    assert host_work(make_code(source=clean), graph) == []
    (found,) = host_work(make_code(source=f"{clean}    {line}\n"), graph)
    assert found.startswith(what) and line in found


def test_the_peak_counts_allocations_aliases_and_saved_values_until_they_are_deleted() -> None:
    source = """
    def call(self, args):
        primals_1, relu, mm = args
        args.clear()
        mm = copy_if_misaligned(mm)
        buf0 = empty_strided_cuda((2,), (1,), torch.float32)
        del relu
        buf1 = buf0; del buf0  # reuse
        buf2 = reinterpret_tensor(buf1, (1, 2), (2, 1), 0); del buf1  # reuse
        buf3 = torch.ops.aten.convolution_backward.default(buf2, mm)
        buf4 = buf3[0]
        del buf2, buf3
        buf5 = extern_kernels.convolution(buf4)
        return (buf5, )
    def other(self): buf6 = buf7
    """
    sizes = {"primals_1": 1000, "relu": 8, "mm": 4, "buf0": 16, "buf1": 16, "buf2": 16, "buf4": 32, "buf5": 1}
    assert peak_of(source, lambda name: sizes.get(name, 0)) == 4 + 16 + 32
    assert peak_of(source, lambda name: {**sizes, "buf5": 30}.get(name, 0)) == 4 + 32 + 30


def test_a_moved_interface_is_named() -> None:
    with pytest.raises(InterfaceError, match=r"no torch\.cuda\.is_there, which the harness replaces; adapt"):
        replace("torch.cuda.is_there", None)
    with pytest.raises(InterfaceError, match=r"no torch\._inductor\.elsewhere\.Graph, which the harness needs"):
        find("torch._inductor.elsewhere.Graph")
    assert find("torch.nn.Linear.forward") is torch.nn.Linear.forward


def test_a_difference_is_relative_to_large_numbers_and_of_one_nan_is_infinite() -> None:
    ones = torch.ones(2, 2)
    assert difference(ones, ones) == 0
    assert difference(100 * ones, 101 * ones) == pytest.approx(1 / 101)
    assert difference(0.1 * ones, 0.2 * ones) == pytest.approx(0.1)
    assert difference(ones, ones * float("nan")) == difference(ones * float("nan"), ones) == float("inf")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert difference(ones, ones.double()) == difference(ones, ones[0]) == float("inf")
    assert difference(torch.empty(0), torch.empty(0)) == 0
    special = torch.tensor([float("nan"), float("inf"), 4.0])
    assert difference(special, special) == 0 and difference(special, special.roll(1)) == float("inf")
    assert difference(special + torch.tensor([0, 0, 1]), special) == 0.25


SOURCE = """
    def call(self, args):
        buf0 = empty_strided_cuda((2,), (1,), torch.float32)
        extern_kernels.mm(arg1_1, arg0_1, out=buf0)
        buf1 = empty_strided_cuda((2,), (1,), torch.float32)
        extern_kernels.mm(arg2_1, arg1_1, out=buf1)
        triton_for_fused_0.run(buf0, buf1, arg0_1, stream=raw_stream0)
"""


def test_faults_are_put_where_the_memory_is_still_in_use() -> None:
    changed = [(a, b) for a, b in zip(SOURCE.splitlines(), aliased_memory(SOURCE).splitlines(), strict=True) if a != b]
    assert [b.strip() for _, b in changed] == ["buf1 = buf0"]
    lines = [line.strip() for line in early_write(SOURCE).splitlines()]
    place = lines.index("extern_kernels.mm(arg1_1, arg0_1, out=buf0)")  # the last product that reads what is updated
    assert lines[place - 1] == "arg0_1.mul_(2)" and lines[place + 1] == "arg0_1.div_(2)"
    assert other_draws("x * 3528531795 + y * 3528531795") == "x * 3528531797 + y * 3528531797"
    for fault in FAULTS.values():
        with pytest.raises(ValueError):
            fault("    def call(self, args):\n        triton_for_fused_0.run(arg0_1)\n")


@pytest.mark.slow
@needs_cuda_wheel
@pytest.mark.parametrize(
    "command, lines",
    [
        ("report", ["| mlp | plain | ours | 9 | 8 |", "| mlp | plain | by hand |"]),
        ("assemble", ["mlp plain: 14 of 14 assembled, for sm_80 and sm_90"]),
        ("faults 'method mixup vectors'", ["memory: found", "write: found", "draws: found"]),
        (
            "shipped 'method ema vectors' 'microbatches vectors' 'loss CrossEntropy weight' 'precision over*vectors'",
            ["4 trials: 4 (100.0%) compile under the rules, 4 (100.0%) have"],
        ),
    ],
)
def test_the_code_of_an_mlp_is_written_assembled_and_right(command: str, lines: list[str]) -> None:
    name, *rest = shlex.split(command)
    networks = [] if name in ("shipped", "faults") else ["mlp"]
    done = subprocess.run(["bash", str(RUN), name, *networks, *rest], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line in done.stdout for line in lines), done.stdout
