"""What is faster in bfloat16 on this CPU: operation by operation, and whole steps?

    python benchmarks/bf16.py [--threads 1]

Writes two files. `bf16_operations.json` has the forward and the backward pass of single operations, bfloat16 over
float32, from which `purecompose/nn/kernels.py` chooses how attention is computed under `precision="bf16"`. `bf16.json`
has steps of a GPT of four blocks (12 x 64 tokens) and of ResNet-8 (64 images of 32x32) in both precisions, and in
bfloat16 over a hand-written loop under torch.compile and autocast.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from _subjects import Subject, by_hand, gpt, ours, resnet8
from _timing import Row, against, arguments, median_us, paired, parse, save
from torch import Tensor
from torch.nn import functional as F

import purecompose as pc
from purecompose import compose, loop_events
from purecompose.nn.kernels import short_attention


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Operation(NamedTuple):
    """A function with the shapes of its arguments, all of which have gradients."""

    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    is_channels_last: bool = False


def _linear(rows: int, fan_in: int, fan_out: int) -> Operation:
    return Operation(F.linear, ((rows, fan_in), (fan_out, fan_in), (fan_out,)))


def _convolution(fan_in: int, fan_out: int, size: int, is_channels_last: bool) -> Operation:
    shapes = (64, fan_in, size, size), (fan_out, fan_in, 3, 3)
    return Operation(functools.partial(F.conv2d, padding=1), shapes, is_channels_last)


def _attention(heads: int, length: int, width: int) -> Operation:
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return Operation(causal, ((12, heads, length, width),) * 3)


def _short_attention(heads: int, length: int, width: int) -> Operation:
    """Attention as it is under `precision="bf16"`: by products in bfloat16, by torch's kernel in float32."""

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.dtype is torch.float32:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result = short_attention(query.dtype, query, key, value, is_causal=True)
        assert result is not None
        return result

    return Operation(causal, ((12, heads, length, width),) * 3)


OPERATIONS = {
    **{f"linear {m} x {k} -> {n}": _linear(m, k, n) for m, k, n in ((64, 128, 128), (768, 128, 512), (768, 512, 2048))},
    **{
        f"convolution 3x3, {k} -> {n}, {size}x{size}{', channels last' * last}": _convolution(k, n, size, last)
        for k, n, size in ((3, 16, 32), (16, 16, 32), (32, 64, 16))
        for last in (False, True)
    },
    **{
        f"attention, {heads} heads, {length} tokens, width {width}": _attention(heads, length, width)
        for heads, length, width in ((4, 64, 32), (4, 256, 32), (12, 128, 64))
    },
    **{
        f"attention by products in bfloat16, {heads} heads, {length} tokens, width {width}": _short_attention(
            heads, length, width
        )
        for heads, length, width in ((4, 64, 32), (4, 256, 32), (12, 128, 64))
    },
    "batched product 48 x (64 x 32) (32 x 64)": Operation(torch.bmm, ((48, 64, 32), (48, 32, 64))),
    "layer norm 768 x 128": Operation(lambda x, w, b: F.layer_norm(x, (128,), w, b), ((768, 128), (128,), (128,))),
    "batch norm 64 x 16 x 32 x 32": Operation(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((64, 16, 32, 32), (16,), (16,))
    ),
    "softmax 3072 x 64": Operation(lambda x: x.softmax(-1), ((3072, 64),)),
    "GELU 768 x 512": Operation(F.gelu, ((768, 512),)),
    "ReLU 64 x 16 x 32 x 32": Operation(F.relu, ((64, 16, 32, 32),)),
    "sum of two 768 x 128": Operation(torch.add, ((768, 128),) * 2),
}


def passes(operation: Operation, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The operation's forward pass, and its backward pass over a graph that is kept."""
    layout = torch.channels_last if operation.is_channels_last else torch.contiguous_format
    inputs = [torch.randn(shape, dtype=dtype) for shape in operation.shapes]
    inputs = [(x.to(memory_format=layout) if x.ndim == 4 else x).requires_grad_() for x in inputs]
    result = operation.fn(*inputs)
    grad = torch.randn_like(result)

    def forward() -> None:
        with torch.no_grad():
            operation.fn(*inputs)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True)}


def operation_rows(calls: int, blocks: int) -> list[Row]:
    """Two rows an operation."""
    rows: list[Row] = []
    for name, operation in OPERATIONS.items():
        of_dtype = {label: passes(operation, dtype) for label, dtype in DTYPES.items()}
        for direction in ("forward", "backward"):
            seconds = paired({dtype: of_dtype[dtype][direction] for dtype in DTYPES}, calls=calls, blocks=blocks)
            row: Row = {"operation": name, "pass": direction}
            row |= {f"{dtype} us": round(median_us(seconds[dtype]), 1) for dtype in DTYPES}
            rows.append(row | against(seconds, "bf16", "fp32"))
    return rows


def step_rows(name: str, subject: Subject, backend: str, calls: int, blocks: int) -> list[Row]:
    """One row a side."""
    fns: dict[str, Callable[[], object]] = {}
    for precision in DTYPES:
        step = compose(loop_events)
        fns |= {
            f"by hand {precision}": by_hand(subject, precision=precision),
            f"by hand + torch.compile {precision}": by_hand(subject, backend=backend, precision=precision),
            f"ours eager {precision}": ours(step, subject, precision=precision),
            f"ours compiled {precision}": ours(pc.compile(step, backend=backend), subject, precision=precision),
        }
    seconds = paired(fns, calls=calls, blocks=blocks)
    rows = []
    for side in ("by hand", "by hand + torch.compile", "ours eager", "ours compiled"):
        row: Row = {"step": name, "side": side}
        row |= {f"{precision} ms": round(median_us(seconds[f"{side} {precision}"]) / 1e3, 2) for precision in DTYPES}
        row |= {"of fp32": against(seconds, f"{side} bf16", f"{side} fp32")[f"of {side} fp32"]}
        rows.append(row | against(seconds, f"{side} bf16", "by hand + torch.compile bf16"))
    return rows


def main() -> None:
    """Measures, prints and saves."""
    parser = arguments(__doc__, blocks=15, calls=10)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    save("bf16_operations", operation_rows(args.calls, args.blocks), args.out)
    subjects = {"GPT, 4 blocks, 12 x 64": gpt(depth=4, batch_size=12), "ResNet-8, 64 x 32x32": resnet8()}
    rows = [
        row
        for name, subject in subjects.items()
        for row in step_rows(name, subject, args.backend, args.calls, args.blocks)
    ]
    save("bf16", rows, args.out)


if __name__ == "__main__":
    main()
