"""Compiled steps: one flat graph, forward to update, without guards, with donation.

`compile` is the way in. `segments` says where a step may be cut, `capture` turns a part into a graph, `backends`
makes that fast, `graphs` keeps what was compiled, and `flight` is one step through it.
"""

from purecompose.transforms.compilation.capture import TraceError
from purecompose.transforms.compilation.step import CompiledStep, compile
from purecompose.transforms.compilation.variants import Variant, VariantLimitError, Variants


__all__ = ["CompiledStep", "TraceError", "Variant", "VariantLimitError", "Variants", "compile"]
