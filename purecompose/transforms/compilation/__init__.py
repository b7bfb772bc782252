"""Compiled steps: one flat graph, forward to update, without guards, with donation.

`compile` is the entry point. `segments` decides where a step may be cut, `capture` traces a part to a graph, `backends`
compiles the graph, `graph_cache` keeps compiled graphs, and
`execution` runs one step. `dynamo` serves calls of a step within `torch.compile`.
"""

from purecompose.errors import TraceError, VariantLimitError
from purecompose.transforms.compilation.step import CompiledStep, compile
from purecompose.transforms.compilation.variants import Variant, Variants


__all__ = ["CompiledStep", "TraceError", "Variant", "VariantLimitError", "Variants", "compile"]
