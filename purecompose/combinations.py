"""What does not work together: one table, with the reason and the remedy of each row.

Everything else does: each method, loss and network eager and compiled, in microbatches, resumed, as a population, on
several processes, and differentiated. `docs/concepts.md` shows the table, and a test tries each row.
"""

from typing import NamedTuple

from purecompose.errors import UnsupportedError


class Refusal(NamedTuple):
    """Why two features do not work together, and what to do instead."""

    reason: str
    remedy: str


_POPULATION, _PROCESSES, _LAYERS, _GRAPHS = (
    "a population",
    "several processes",
    'fully_sharded(gather="layer")',
    'compile(mode="reduce-overhead")',
)
REFUSED: dict[tuple[str, str], Refusal] = {
    (_POPULATION, "another population"): Refusal(
        "a state has one dimension of members", "put all members into one population"
    ),
    (_POPULATION, _PROCESSES): Refusal(
        "its members train in one process",
        "give each process a population of its own; pc.whole(state) puts a divided state together",
    ),
    (_POPULATION, "a host algorithm inside of a scope"): Refusal(
        "all members are computed as one there", "let it act outside of the scope, or drop host=True"
    ),
    (_POPULATION, "a host algorithm that matches by values"): Refusal(
        "members could differ in it, and a population has one schedule", "match by time, and decide in apply"
    ),
    (_POPULATION, "an observer of single algorithms"): Refusal(
        "tensors have no values under vmap",
        "observe a member by the step that population was given, traced(step)(unstack_states(state)[0], batch)",
    ),
    (_POPULATION, "stopping rules"): Refusal(
        "its members would stop at different times", "train them one by one (unstack_states)"
    ),
    (_POPULATION, "checkpoints chosen by a metric"): Refusal(
        "it has no single best state", "count the newest, Checkpoints(keep=...)"
    ),
    (_PROCESSES, "several processes again"): Refusal(
        "the step's batch is divided already", "divide the step that compose made"
    ),
    (_PROCESSES, "a Grad outside of Microbatches"): Refusal(
        "processes divide the batch of each Microbatches at the program's top level, and every process would compute "
        "this gradient for the whole batch",
        "put Microbatches(...) around it, and around scopes of your own, without an update in them",
    ),
    (_PROCESSES, "a stage of your own with denominators or losses.over_batch"): Refusal(
        "it needs the whole batch, of which each process has a part",
        "let the stages `forward` and `loss` run the network and a loss that declares it",
    ),
    (_PROCESSES, "derivatives through steps and maps over them"): Refusal(
        "no gradient or map goes through the messages",
        "differentiate and map the step of one process; pc.whole(state) puts a divided state together",
    ),
    (_PROCESSES, "nn.SyncBatchNorm"): Refusal(
        "it does not know how a batch's parts are weighted",
        "keep nn.BatchNorm, which has the statistics of the whole batch here",
    ),
    (_PROCESSES, "pickle"): Refusal(
        "the step belongs to a process group", "pickle the step that compose made, and divide it in each process"
    ),
    ("fully_sharded", "the gradient of one process's part"): Refusal(
        "it is taken at parameters that differ between processes", "use data_parallel"
    ),
    (_LAYERS, "methods that read gradients of parts of the batch"): Refusal(
        "no process computes the gradient of its own part", 'use gather="step"'
    ),
    (_LAYERS, "a Microbatches within another"): Refusal(
        "each slice sends messages, so that all processes must cut their parts alike", 'use gather="step"'
    ),
    ("a Grad", "a host algorithm in it"): Refusal(
        "its body is differentiated and compiled as a whole",
        "let it act before or after the gradient, or drop host=True",
    ),
    ("a host algorithm in Microbatches", "methods that compute the gradient again"): Refusal(
        "a compiled step runs both in one graph", "let it act outside of Microbatches"
    ),
    ("Microbatches", "several stages with denominators"): Refusal(
        "a slice has a share of one set of denominators", "put each stage into its own Microbatches"
    ),
    ("methods that take means over batches", "a stage of your own with num_terms"): Refusal(
        "they weight batches by the terms of the state's loss, or by examples",
        "use microbatches, or let the stages `forward` and `loss` compute the loss",
    ),
    ("state.gradients(of=...)", "a loss in a stage of your own"): Refusal(
        "no other loss can be put into its function",
        "use the stage `loss`, or a Stage(..., sets_loss=True) that calls state.context.loss",
    ),
    (_GRAPHS, "donate=False"): Refusal("new values are in other memory after each step", "leave out donate=False"),
    (_GRAPHS, "dynamic"): Refusal("its sizes are fixed", "leave out dynamic"),
    (_GRAPHS, "microbatches"): Refusal("they are cut and averaged on the host", "leave the mode out"),
    (_GRAPHS, _PROCESSES): Refusal("messages are not recorded", "leave the mode out"),
    (_GRAPHS, "host algorithms"): Refusal("they run between kernels", "leave the mode out"),
}
"""Why they do not work together, by a feature and another one."""


def unsupported(feature: str, other: str, where: str = "") -> UnsupportedError:
    """Return the error for two features of the table.

    Args:
        feature: The first key of a row.
        other: The second key.
        where: The call or the algorithm that asks for both, with which the message begins.

    Example:
        >>> print(unsupported("a population", "another population", "population(step, 3)"))
        population(step, 3): a population with another population is not supported: a state has one dimension of \
members; put all members into one population
    """
    row = REFUSED[feature, other]
    place = f"{where}: " if where else ""
    return UnsupportedError(f"{place}{feature} with {other} is not supported: {row.reason}; {row.remedy}")
