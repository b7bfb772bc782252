"""Batches of any structure: read and replace a member, count, split and select examples.

A batch is a tensor, a tuple, a list, a mapping, a dataclass or any object with attributes, nested to any depth. A
*field* identifies one member: an index, a key of a mapping, an attribute, a list of these (several members), a
getter, or a pair (getter, setter) where a setter is `(batch, value) -> new batch`. A single tensor has one member,
itself, with the field 0. Two fields stand for the whole batch: `WHOLE` passes a mapping to the model as keyword
arguments, anything else unchanged; `AS_ARGUMENT` passes the batch as the only argument. `None` is the field of a member
that batches do not have. No function here edits a batch in place.

Examples are rows, indexed by the first dimension. If `dim` is not 0, as for sequences (T, N, ...), they are
indexed by that dimension in every tensor that has it, and by the first dimension in the others. `num_examples` states
the rule for batches that also contain what all examples share.

Batches of graphs, in the form of torch_geometric's `Batch`, and packed sequences know how many examples they hold;
their rows are nodes, edges and time steps, and they cannot be cut without a `Splitter`.
"""

from purecompose._support import publish
from purecompose.batch.examples import (
    Splitter as Splitter,
    bounds as bounds,
    num_examples as num_examples,
    num_tokens as num_tokens,
    reported_size as reported_size,
    split as split,
    take as take,
)
from purecompose.batch.fields import (
    AS_ARGUMENT as AS_ARGUMENT,
    WHOLE as WHOLE,
    Field as Field,
    check_field as check_field,
    get as get,
    map_tensors as map_tensors,
    put as put,
    tensors as tensors,
    with_tensors as with_tensors,
)


publish(__name__)
