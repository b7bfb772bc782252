"""Rules for the GPU code of whole steps, and the list of what is tried; the code itself needs a CUDA build of torch."""

import inspect

import pytest
import torch

from benchmarks.gpu_code.rules import broken, races, unfit_for_replay, ungrouped
from benchmarks.gpu_code.trials import LOSSES, NETWORKS, OPTIMIZERS, trials
from benchmarks.gpu_code.writing import Code
from purecompose import _support, losses, optim
from purecompose.nn import models
from tests.shipped import SHIPPED


def make_code(kernel: str = "", *calls: str, fallbacks: tuple[str, ...] = ()) -> Code:
    body = "\n".join(f"        {call}" for call in calls)
    kernels = tuple(call.partition(".run(")[0] for call in calls if ".run(" in call)
    return Code(f"{kernel}\ndef call(args):\n{body}\n", kernels, (), fallbacks, (), 0)


GRAPH = torch.fx.symbolic_trace(torch.nn.Identity())


GROUP = """
def triton_for_fused_0(in_ptr0, in_ptr1, in_ptr2, out_ptr0, out_ptr1):
    pid = tl.program_id(0)
    if pid < num_xblocks_0:
        tmp0 = tl.load(in_ptr0 + (x0), xmask)
        tmp1 = tl.load(in_ptr1 + (x0), xmask)
        tl.store(out_ptr0 + (x0), tmp0 + tmp1, xmask)
    elif pid < num_xblocks_1:
        tmp2 = tl.load(in_ptr2 + (x1), xmask)
        tl.store(out_ptr1 + (x1), tmp2, xmask)
    else:
        pass
''', device_str='cuda')
"""


def test_a_group_must_not_write_what_another_part_of_the_kernel_reads() -> None:
    launch = "triton_for_fused_0.run(arg0_1, {}, buf1, arg0_1, {}, stream=raw_stream0)"
    assert races(make_code(GROUP, launch.format("buf0", "arg1_1"))) == []
    (found,) = races(make_code(GROUP, launch.format("arg1_1", "arg1_1")))
    assert found == "triton_for_fused_0 writes arg1_1 while it is read"
    assert races(make_code(GROUP, launch.format("buf0", "arg0_1"))), "two parts write the same memory"


POINTWISE = """
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load({pointer} + ({index}), xmask)
    tl.store(in_out_ptr0 + (x0 + 3*(x1 // 2)), tmp0, xmask)
''', device_str='cuda')
"""


@pytest.mark.parametrize(
    "pointer, index, is_broken",
    [
        ("in_out_ptr0", "x0 + 3*(x1 // 2)", False),
        ("in_out_ptr0", "x1", True),
        ("in_ptr0", "x1", True),  # the same memory under another name
    ],
)
def test_memory_is_written_where_it_was_read(pointer: str, index: str, is_broken: bool) -> None:
    kernel = POINTWISE.format(pointer=pointer, index=index)
    launch = "triton_poi_fused_add_0.run(arg0_1, arg0_1, 12, stream=raw_stream0)"
    assert bool(races(make_code(kernel, launch))) is is_broken


@pytest.mark.parametrize(
    "access, numel, is_broken",
    [
        ("tl.store({} + (0), tmp0, None)", "xnumel = 1", False),
        ("tl.store({} + (0), tmp0, None)", "xnumel = 128", True),
        ("tl.atomic_add({} + (x0), tmp0, xmask)", "xnumel = 128", False),
        ("tl.atomic_add({} + (x1), tmp0, xmask)", "xnumel = 128", True),
    ],
)
def test_blocks_do_not_share_what_they_read_and_write(access: str, numel: str, is_broken: bool) -> None:
    index = "0" if "(0)" in access else "x0"
    kernel = f"""
def triton_poi_fused_1(in_ptr0, out_ptr0, xnumel):
    {numel}
    tmp0 = tl.load(in_ptr0 + ({index}))
    {access.format("out_ptr0")}
''', device_str='cuda')
"""
    calls = (
        "buf1 = reinterpret_tensor(buf0, (2,), (1,), 0); del buf0",
        "triton_poi_fused_1.run(buf0, buf1, 1, stream=s)",
    )
    assert bool(races(make_code(kernel, *calls))) is is_broken
    elsewhere = calls[0].replace(", 0)", ", 64)"), calls[1]
    assert races(make_code(kernel, *elsewhere)) == []


UPDATE = """
def triton_{kind}_fused_add_{number}(in_ptr0, in_ptr1, out_ptr0, out_ptr1):
    tl.store(out_ptr0 + (x0), tmp0, xmask)
    tl.store(out_ptr1 + (x0), tmp1, xmask)
''', device_str='cuda')
"""


@pytest.mark.parametrize(
    "kind, num, found", [("poi", 2, []), ("poi", 4, ["updates by 4 pointwise kernels"]), ("per", 4, [])]
)
def test_updates_of_several_parameters_are_one_kernel(kind: str, num: int, found: list[str]) -> None:
    kernels = "".join(UPDATE.format(kind=kind, number=number) for number in range(num))
    launch = f"triton_{kind}_fused_add_{{0}}.run(arg{{0}}_1, buf{{0}}, arg{{0}}_1, arg5{{0}}_1, stream=raw_stream0)"
    assert ungrouped(make_code(kernels, *map(launch.format, range(num)))) == found


@pytest.mark.parametrize(
    "call, what",
    [
        ("triton_poi_fused_0.run(arg0_1, s0, stream=raw_stream0)", "passes s0 to triton_poi_fused_0 by value"),
        ("triton_poi_fused_0.run(arg0_1, 0.5, stream=raw_stream0)", "passes 0.5 to triton_poi_fused_0 by value"),
        ("buf0 = empty_strided_cuda((s0, 2), (2, 1), torch.float32)", "allocates memory of an open size"),
        ("inductor_seeds(buf0)", "draws from a generator of torch"),
    ],
)
def test_what_a_cuda_graph_would_not_repeat_is_named(call: str, what: str) -> None:
    kernel = "\ndef triton_poi_fused_0(a, b, c, d, xnumel):\n    pass\n''', device_str='cuda')\n"
    fixed = (
        "buf0 = empty_strided_cuda((3, 2), (2, 1), torch.float32)",
        "triton_poi_fused_0.run(arg0_1, buf0, workspace_0, _tensor_constant0, 12, stream=raw_stream0)",
    )
    assert unfit_for_replay(make_code(kernel, *fixed)) == []
    (found,) = unfit_for_replay(make_code(kernel, *fixed, call))
    assert found.startswith(what)


def test_an_operator_that_waits_for_the_device_is_named() -> None:
    assert broken(make_code(fallbacks=("torch.ops.aten.convolution_backward.default",)), GRAPH) == []
    for name in ("torch.ops.purecompose.ctc.default", "torch.ops.aten.multinomial.default"):
        assert broken(make_code(fallbacks=(name,)), GRAPH) == [f"calls {name}"]


def test_everything_that_ships_is_tried() -> None:
    names = [name.split() for name in trials()]
    tried = {kind: {words[1] for words in names if words[0] == kind} for kind in ("method", "optimizer")}
    assert tried["method"] == set(SHIPPED)
    factories = {name for name in _support.public_names(inspect.getsource(optim)) if name.islower()}
    assert tried["optimizer"] == factories - {"from_torch", "lbfgs"}, "what runs as composed only"
    own = {
        name
        for name in _support.public_names(inspect.getsource(losses))
        if not inspect.isroutine(getattr(losses, name)) and name.islower()
    }
    assert {name.split()[0] for name in LOSSES} >= own | {"over_batch"} and "cross_entropy" in own
    assert set(NETWORKS) == set(models.MODELS)
    assert "muon" in OPTIMIZERS and len(trials()) == len(names)
