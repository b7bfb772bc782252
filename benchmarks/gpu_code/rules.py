"""The rules for the GPU code of a whole step, beside those that each line of it follows (`writing.violations`).

Some faults show only on a device: the interpreter runs the blocks of a kernel one after the other, so that it never
reads what another block has written too early, and nothing waits for a device.
"""

import re
from collections import Counter
from collections.abc import Iterator

from benchmarks.gpu_code.writing import Code


READ_VALUES = ("torch.ops.purecompose.ctc.default",)
"""Operators whose kernels read values on the host: torch's kernel of CTC reads the lengths."""

_LAUNCH = re.compile(r"^ +(triton_\w+)\.run\((.*), stream=\w+\)", re.M)
_KERNEL = re.compile(r"^def (triton_\w+)\(([^)]*)\):\n(.*?)^'''", re.M | re.S)
_ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ \((.*)")
_ALIAS = re.compile(r"^ +(foreach_arg\d+) = (\w+)$", re.M)
_BRANCH = re.compile(r"^    (?:el)?if pid .*:$", re.M)
_CONSTANT = re.compile(r"(arg|buf|workspace_|\w*constant)\w*|\d+")


def broken(code: Code) -> list[str]:
    """Return the rules that the code of a whole step breaks."""
    return [*reads(code), *races(code), *ungrouped(code), *unfit_for_replay(code)]


def reads(code: Code) -> list[str]:
    """Return the operators that read values, which lets the host wait for the device."""
    return [f"reads values in {name}" for name in dict.fromkeys(code.fallbacks) if name in READ_VALUES]


def ungrouped(code: Code) -> list[str]:
    """Return the number of pointwise kernels that each update one parameter or memory, though one could update more.

    A kernel that also reduces is left out: the gradient that it computes is read where it is. Two are allowed: counters
    are updated where they are read.
    """
    found: Counter[str] = Counter()
    for name, args in _launches(code):
        memories = Counter(arg for arg in args if arg.startswith("arg"))
        if name.startswith("triton_poi") and sum(number > 1 for number in memories.values()) == 1:
            found[re.sub(r"_?\d+$", "", name)] += 1
    return [f"updates by {number} kernels {name}" for name, number in found.items() if number > 2]


def races(code: Code) -> list[str]:
    """Return the kernels in which one block writes what another block may still read.

    That is the case if memory is read and written at different places of it, or in different parts of a kernel that
    updates a group of tensors.
    """
    kernels = {name: (parameters, body) for name, parameters, body in _KERNEL.findall(code.source)}
    found: dict[str, None] = {}
    for name, args in _launches(code):
        parameters, body = kernels[name]
        names = [parameter.partition(":")[0].strip() for parameter in parameters.split(",")]
        memory: dict[str, str] = dict(zip(names, args, strict=False))
        read: dict[str, set[tuple[int, str]]] = {}
        written: dict[str, set[tuple[int, str]]] = {}
        for part, lines in enumerate(_BRANCH.split(body)):
            memory |= {name: memory[other] for name, other in _ALIAS.findall(lines)}
            for kind, pointer, index in _ACCESS.findall(lines):
                places = read if kind == "load" else written
                places.setdefault(memory[pointer], set()).add((part, _place(index)))
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
        for name, args in _launches(code)
        for value in args
        if not _CONSTANT.fullmatch(value)
    ]
    body = code.source[code.source.index("def call(") :]
    for shape in re.findall(r"empty_strided_cuda\((.*)\)", body):
        if re.search(r"\b[su]\d+\b", shape):
            found.append(f"allocates memory of an open size: {shape}")
    if re.search(r"inductor_seed|aten\.(seed|rand|bernoulli|dropout)", body):
        found.append("draws from a generator of torch")
    return found


def _launches(code: Code) -> Iterator[tuple[str, list[str]]]:
    """Yield each launch of a kernel with its arguments."""
    for name, args in _LAUNCH.findall(code.source[code.source.index("def call(") :]):
        yield name, args.split(", ")
