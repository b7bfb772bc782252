"""Compiled steps: one flat graph, forward to update, without guards, with donation.

`compile` (`step`) is the entry point. `graph_cache` decides where a step is cut and keeps its parts and plans,
`building` builds a part: `capture` traces it to a graph, and `backends` compiles that. `execution` runs one step.
`call_in_torch_compile` serves calls of a step within `torch.compile`.
"""

from purecompose.errors import TraceError as TraceError, VariantLimitError as VariantLimitError
from purecompose.transforms.compilation.parts import Variant as Variant, Variants as Variants
from purecompose.transforms.compilation.step import CompiledStep as CompiledStep, compile as compile
