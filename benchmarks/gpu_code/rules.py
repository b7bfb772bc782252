"""The rules for the GPU code of a whole step.

Some faults show only on a device: the interpreter runs the blocks of a kernel one after the other, so that it never
reads what another block has written too early, and nothing waits for a device.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from benchmarks.gpu_code.writing import Code


FALLBACKS = re.compile(
    r"torch\.ops\.(?:aten\.(?:_scaled_dot_product_(?:flash|efficient)_attention(?:_backward)?|convolution_backward|"
    r"_adaptive_avg_pool2d(?:_backward)?|_foreach_norm)\.\w+|purecompose\.constants\.default)"
)
"""Kernels of torch that a step may call: they draw nothing and read no value on the host."""
HOST_WORK = (
    ("reads a value on the host", re.compile(r"\.item\(\)|_local_scalar_dense")),
    ("copies between host and device", re.compile(r"device_put|empty_strided_cpu\(|\.cpu\(\)|_to_copy.*cpu")),
    ("runs a kernel of the host", re.compile(r"cpp_fused|device_str='cpu'|async_compile\.cpp")),
)

_LAUNCH = re.compile(r"^ +(triton_\w+)\.run\((.*), stream=\w+\)", re.M)
_KERNEL = re.compile(r"^def (triton_\w+)\(([^)]*)\):\n(.*?)^'''", re.M | re.S)
_ACCESS = re.compile(r"tl\.(load|store|atomic_\w+)\((\w+) \+ \((.*)")
_VIEW = re.compile(r"(buf\d+) = (?:((?:buf|arg)\w+)(?:;|$)|reinterpret_tensor\(((?:buf|arg)\w+), .*, 0\))")
"""A name for the memory of another one, from its start; views of later parts have names of their own."""
_ALIAS = re.compile(r"^ +(foreach_arg\d+) = (\w+)$", re.M)
_BRANCH = re.compile(r"^    (?:el)?if pid .*:$", re.M)
_CONSTANT = re.compile(r"(arg|buf|workspace_|\w*constant)\w*|\d+")


def broken(code: Code, graph: fx.GraphModule) -> list[str]:
    """Return the rules that the code of a whole step breaks."""
    return [*host_work(code, graph), *other_fallbacks(code), *races(code), *ungrouped(code), *unfit_for_replay(code)]


def host_work(code: Code, graph: fx.GraphModule) -> list[str]:
    """Return what a step on a GPU must not do and this code does, each with the line of the code."""
    body = code.source[code.source.index("def call(") :]
    found = [
        f"{what}: {line.strip()[:120]}"
        for what, pattern in HOST_WORK
        for line in body.splitlines()
        if pattern.search(line) and not line.strip().startswith("#")
    ]
    for node in graph.graph.nodes:  # numbers that become constants are tensors of the host, too
        value, is_given = node.meta.get("val"), node.op in ("placeholder", "get_attr")
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and is_given:
            found.append(f"has a tensor of the host: {node.name}")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            found.append(f"passes a size by value: {node.name}")
    return found


def other_fallbacks(code: Code) -> list[str]:
    """Return the kernels of torch that may read values, for which the host waits, or draw."""
    return [f"calls {name}" for name in dict.fromkeys(code.fallbacks) if not FALLBACKS.fullmatch(name)]


def ungrouped(code: Code) -> list[str]:
    """Return the number of pointwise kernels that write into parameters and memories, if fewer could do it.

    A kernel that also reduces is left out: the gradient that it computes is read where it is. Two are allowed, since
    counters are updated where they are read, and one for every eight tensors, the most that Inductor combines.
    """
    kernels = tensors = 0
    for name, args, body in _launches(code):
        stored = {args[pointer] for kind, pointer, _ in _ACCESS.findall(body) if kind != "load" and pointer in args}
        num = sum(arg.startswith("arg") for arg in stored)
        if num and name.startswith("triton_poi"):
            kernels, tensors = kernels + 1, tensors + num
    return [f"updates by {kernels} pointwise kernels"] if kernels > 2 + math.ceil(tensors / 8) else []


def races(code: Code) -> list[str]:
    """Return the kernels in which one block writes what another block may still read.

    That is the case if memory is read and written at different places of it, at one place by all blocks, or in
    different parts of a kernel that updates a group of tensors.
    """
    found: dict[str, None] = {}
    for name, args, body in _launches(code):
        read: dict[str, set[tuple[int, str]]] = {}
        written: dict[str, set[tuple[int, str]]] = {}
        for part, lines in enumerate(_BRANCH.split(body)):
            memory = args | {alias: args[other] for alias, other in _ALIAS.findall(lines)}
            is_single = re.search(r"^ +xnumel = 1$", lines, re.M) is not None
            for kind, pointer, index in _ACCESS.findall(lines):
                place = _place(index)
                if kind != "load" and not is_single and place.isdigit():
                    place = "one place, by all blocks"
                for places in [read] * (kind != "store") + [written] * (kind != "load"):
                    places.setdefault(memory[pointer], set()).add((part, place))
        for one, places in written.items():
            if one in read and read[one] | places != places or len({part for part, _ in places}) > 1:
                found[f"{name} writes {one} while it is read"] = None
    return list(found)


def _place(text: str) -> str:
    """Return the index at the beginning of a text, up to its closing parenthesis, in its simplest form."""
    depth = 1
    for end, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            text = text[:end]
            break
    text = re.sub(r"^tl\.full\(\[[^]]*\], 0, .*", "0", text)
    return re.sub(r"^tl\.broadcast_to\((.*), \[[^]]*\]\)$", r"\1", text)


def unfit_for_replay(code: Code) -> list[str]:
    """Return what a CUDA graph of the code would not repeat: its addresses, sizes and numbers stay as recorded.

    Arguments of kernels are tensors and constants; memory is allocated in constant sizes; nothing is drawn from torch's
    generators, whose state is on the host; nothing waits for the device.
    """
    found = [
        f"passes {value} to {name} by value"
        for name, args, _ in _launches(code)
        for value in args.values()
        if not _CONSTANT.fullmatch(value)
    ]
    body = code.source[code.source.index("def call(") :]
    for shape in re.findall(r"empty_strided_cuda\((.*)\)", body):
        if re.search(r"\b[su]\d+\b", shape):
            found.append(f"allocates memory of an open size: {shape}")
    if re.search(r"inductor_seed|aten\.(seed|rand|bernoulli|dropout)", body):
        found.append("draws from a generator of torch")
    return found


def _launches(code: Code) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield the name of each kernel that is launched, its arguments by parameter, and its body.

    Arguments are named by the buffer whose memory they are.

    Raises:
        ValueError: A launch has another form.
    """
    kernels = {name: (parameters, body) for name, parameters, body in _KERNEL.findall(code.source)}
    num, owners = 0, dict[str, str]()
    for line in code.source[code.source.index("def call(") :].splitlines():
        for name, same, viewed in _VIEW.findall(line):
            owners[name] = str(owners.get(same or viewed, same or viewed))
        for name, args in _LAUNCH.findall(line):
            parameters, body = kernels[name]
            names: Any = [parameter.partition(":")[0].strip() for parameter in parameters.split(",")]
            values = [str(owners.get(arg, arg)) for arg in args.split(", ")]
            memory: dict[str, str] = dict(zip(names, values, strict=False))
            yield name, memory, body
            num += 1
    if num != len(code.kernels):
        raise ValueError(f"{len(code.kernels)} kernels are launched, and {num} of them in the form that is known")
