"""Pairs of features that do not work together: one table, with the reason and the remedy of each.

`docs/concepts.md` shows it, and a test tries each row. Limits of single functions are stated where they are.
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
        "give each process a population of its own, of states that are not divided (pc.whole)",
    ),
    (_POPULATION, "a host algorithm inside Microbatches or another scope"): Refusal(
        "inside scopes all members are computed at once under vmap",
        "let it act outside, such as at AFTER_TRAIN_BATCH, or drop host=True",
    ),
    (_POPULATION, "a host algorithm that matches by values"): Refusal(
        "members could differ in what it decides, and a population has one schedule",
        "match by time, and decide in apply",
    ),
    (_POPULATION, "traced"): Refusal(
        "tensors have no values under vmap",
        "observe a member by the step that population was given, traced(step)(unstack_states(state)[0], batch)",
    ),
    (_POPULATION, "stopping rules"): Refusal(
        "its members would stop at different times", "train them one by one (unstack_states)"
    ),
    (_POPULATION, "states chosen by a metric"): Refusal(
        "it has no single best state", "keep the newest, Checkpoints(keep=...), and the last one"
    ),
    (_PROCESSES, "a step that is divided already"): Refusal(
        "its batch would be divided twice", "divide the step that compose made"
    ),
    (_PROCESSES, "a Grad outside of Microbatches"): Refusal(
        "processes divide the batch of each Microbatches at the program's top level, and every process would compute "
        "this gradient for the whole batch",
        "put Microbatches(...) around it, and around scopes of your own, without an update in them",
    ),
    (_PROCESSES, "a stage of your own with denominators or losses.over_batch"): Refusal(
        "the stage needs the whole batch, of which each process has a part",
        "let the stages `forward` and `loss` run the network and a loss that declares it",
    ),
    (_PROCESSES, "transforms of torch.func and gradients through steps"): Refusal(
        "no gradient or map goes through messages between processes",
        "differentiate and map the step of one process, on pc.whole(state)",
    ),
    (_PROCESSES, "nn.SyncBatchNorm"): Refusal(
        "SyncBatchNorm does not know how the parts of a batch are weighted",
        "keep nn.BatchNorm, which has the statistics of the whole batch here",
    ),
    (_PROCESSES, "pickle"): Refusal(
        "the step belongs to a process group", "pickle the step that compose made, and divide it in each process"
    ),
    ("fully_sharded", "the gradient of one process's part"): Refusal(
        "parameters would differ between processes", "use data_parallel"
    ),
    (_LAYERS, "methods that read gradients of parts of the batch"): Refusal(
        "no process computes the gradient of its own part", 'use gather="step"'
    ),
    (_LAYERS, "a Microbatches within another"): Refusal(
        "each slice sends messages, so that all processes must cut their parts alike", 'use gather="step"'
    ),
    ("a Grad", "a host algorithm in it"): Refusal(
        "the body of a Grad is differentiated and compiled as a whole",
        "let it act before or after the gradient, or drop host=True",
    ),
    ("Microbatches", "several stages with denominators"): Refusal(
        "a slice has a share of one set of denominators", "put each stage into its own Microbatches"
    ),
    ("methods that take means over batches", "a stage of your own with num_terms"): Refusal(
        "batches are weighted by the terms of the state's loss, or by examples",
        "use microbatches, or let the stages `forward` and `loss` compute the loss",
    ),
    ("state.gradients(of=...)", "a loss in a stage of your own"): Refusal(
        "the stage computes its loss itself, so another loss cannot take its place",
        "use the stage `loss`, or a Stage(..., sets_loss=True) that calls state.context.loss",
    ),
    ("lbfgs", "compile"): Refusal(
        "numbers decide in each iteration how it goes on",
        "leave the step uncompiled: a step is many evaluations anyway",
    ),
    ("lbfgs", "a population, and gradients through steps"): Refusal(
        "numbers decide in each iteration how it goes on, and they differ among members",
        "train members one by one (unstack_states), or use another optimizer",
    ),
    ("lbfgs", "fully_sharded"): Refusal("it takes products of whole gradients", "use data_parallel"),
    ("lbfgs", "optimizers around it"): Refusal(
        "they change gradients or parameters in one of many evaluations only",
        "leave out by_pattern, and methods such as skip_nonfinite and decoupled_weight_decay",
    ),
    ("lbfgs", "methods that change gradients"): Refusal(
        "later evaluations of a step compute the gradient of the loss",
        "leave them out, or add what they do to the loss",
    ),
    (_GRAPHS, "donate=False"): Refusal("a CUDA graph needs the new values in the old memory", "leave out donate=False"),
    (_GRAPHS, "dynamic"): Refusal("a CUDA graph has fixed sizes", "leave out dynamic"),
    (_GRAPHS, "microbatches"): Refusal("slices are cut and averaged on the host", "leave the mode out"),
    (_GRAPHS, _PROCESSES): Refusal("messages between processes are not recorded", "leave the mode out"),
    (_GRAPHS, "host algorithms"): Refusal("host algorithms run between kernels", "leave the mode out"),
}
"""Why they do not work together, by a feature and another one."""


def unsupported(feature: str, other: str, where: str = "") -> UnsupportedError:
    """Return the error for two features of the table.

        Args:
            feature: The first key of a row.
            other: The second key.
            where: The call or the algorithm that asks for both, with which the message begins.
    of members. Instead: put all members into one population
    """
    row = REFUSED[feature, other]
    place = f"{where}: " if where else ""
    return UnsupportedError(f"{place}{feature} with {other} does not work, because {row.reason}. Instead: {row.remedy}")
