"""Laws of agreement: a step that is cut, divided among processes, mapped or compiled does what the step does.

These laws work in double precision, or in float32 with a wide tolerance where an algorithm refuses float64, and a wider
one for tasks in half precision. If the network or the companions break a law without the algorithm, nothing is judged.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from purecompose import batch as batches, losses, tree
from purecompose._support.device import AUTOCAST, whole
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import Step
from purecompose.core.context import SealedTimeError
from purecompose.core.means import has_mean
from purecompose.core.state import State
from purecompose.testing.attempt import is_refusal
from purecompose.testing.case import COMPANY, Case, Subject
from purecompose.testing.law import Broken, NotJudged, define_law, never_acts
from purecompose.testing.process import Unportable, in_process_group, played
from purecompose.testing.record import LASTING, Watched, begun, closed, compare, opened, run
from purecompose.time.event import Event
from purecompose.time.predicates import every, on
from purecompose.transforms.compilation import compile as compile_step
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.fully_sharded import check_needs_no_parts, fully_sharded, shard
from purecompose.transforms.members import member, stacked


Judge: TypeAlias = Callable[[Subject, Case, torch.dtype], bool]
"""A function that judges a law with weights in a dtype: float64, or float32 if the algorithm or task requires it."""


def at_best_precision(judge: Judge) -> Callable[[Subject, Case], bool]:
    """Return a judge that uses float64 if possible, and returns False if the law is broken without the algorithm."""

    def tried(subject: Subject, case: Case) -> bool:
        if case.task.is_half:  # autocast does not affect float64, so methods for half precision would do nothing
            return judge(subject, case, torch.float32)
        try:
            return judge(subject, case, torch.float64)
        except (Broken, NotJudged):
            raise
        except Exception:  # an error that is not due to float64 is raised again in float32
            return judge(subject, case, torch.float32)

    @functools.wraps(judge)
    def judged(subject: Subject, case: Case) -> bool:
        return _unless_idle_breaks(tried, subject, case)

    return judged


def in_double(judge: Judge) -> Callable[[Subject, Case], bool]:
    """Return a judge in float64; it returns False if the algorithm refuses that, or the law is broken without it."""

    @functools.wraps(judge)
    def judged(subject: Subject, case: Case) -> bool:
        try:
            return _unless_idle_breaks(lambda one, where: judge(one, where, torch.float64), subject, case)
        except (Broken, NotJudged):
            raise
        except Exception as error:
            if is_refusal(error):
                return False
            raise

    return judged


def _unless_idle_breaks(judge: Callable[[Subject, Case], bool], subject: Subject, case: Case) -> bool:
    try:
        return judge(subject, case)
    except Broken:
        try:
            # It acts, so that there is something to judge, but does nothing.
            judge(Subject(Algorithm(subject.name, on(Event.BATCH_START), _unchanged)), case)
        except Exception:
            return False
        raise


def _unchanged(event: Event, state: State) -> State:
    """Return the state; a function of the module, so that it can be sent to another process."""
    del event
    return state


def attempted(doing: str, act: Callable[[], Any]) -> Any:
    """Return the result of `act`; an error that the plain step does not raise breaks the law."""
    try:
        return act()
    except NotJudged:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise Broken(f"{doing}: {type(error).__name__}: {message}", event=getattr(error, "event", None)) from error


# Rounding in double precision is far below any mistake. The floors are for numbers that cancel, whose rounding errors
# are not relative to their size.
_DOUBLE, _SINGLE = tree.Tolerance(1e-6, 1e-13), tree.Tolerance(1e-3, 1e-6)
# Twice the largest difference of 36 plain steps in bfloat16, whole or in slices, alone or under vmap.
_HALF = tree.Tolerance(0.1, 2e-3)


def rounding(dtype: torch.dtype) -> tree.Tolerance:
    """Return the rounding tolerance for a leaf's dtype; slots may be float32 in any state."""
    return _DOUBLE if dtype in (torch.float64, torch.complex128) else _SINGLE


def compare_rounded(first: State, second: State, labels: tuple[str, str], fields: Sequence[str]) -> None:
    """Raise `Broken` for the first leaf in which two states differ by more than rounding; integers agree exactly."""
    is_half = first.context.precision in AUTOCAST
    compare(first, second, labels, fields=fields, tolerance=(lambda dtype: _HALF) if is_half else rounding)


def agree_unless_on_the_edge(
    first: State, second: State, labels: tuple[str, str], fields: Sequence[str], is_on_edge: Callable[[], bool]
) -> bool:
    """Return whether two states agree; False if rounding alone explains why they do not, else `Broken` is raised."""
    try:
        compare_rounded(first, second, labels, fields)
    except Broken:
        if is_on_edge():
            return False
        raise
    return True


def is_on_the_edge(step: Step, state: State, batch: Any, expected: State) -> bool:
    """Return whether the step has another result if params and inputs change by less than rounding.

    Then a discrete choice in it has changed. A step that has another result anyway, because it counts its calls, is not
    such a case.
    """
    # With one repetition, a method that acts in every second call would agree by chance.
    if any(_differs(step(state, batch), expected) for _ in range(3)):
        return False
    is_half = state.context.precision in AUTOCAST
    for seed in range(16 if is_half else 4):  # in half precision ratios of differences vary by a tenth
        generator = torch.Generator().manual_seed(seed)
        params = {name: _shaken(param, generator, is_half) for name, param in state.params.items()}
        shaken = batches.map_tensors(lambda tensor, g=generator: _shaken(tensor, g, is_half), batch)
        if _differs(step(state.replace(params=params), shaken), expected):
            return True
    return False


def _differs(first: State, second: State) -> bool:
    try:
        compare_rounded(first, second, ("as it is", "moved"), LASTING)
    except Broken:
        return True
    return False


def _shaken(tensor: Tensor, generator: torch.Generator, is_half: bool) -> Tensor:
    """Return the tensor with each element changed by less than rounding.

    In half precision the relative change is at most its rounding error, otherwise a thousandth of the share that
    comparisons tolerate.
    """
    if not tensor.is_floating_point():
        return tensor
    moves = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    share = 2**-8 if is_half else 1e-3 * rounding(tensor.dtype).share
    return tensor * (1 + share * moves).to(tensor)


def with_frozen_statistics(case: Case) -> Case:
    """Return the case with BatchNorm in evaluation mode, also in training."""
    kind = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in case.task.make_net(0).named_modules() if isinstance(module, kind)]
    options = {**case.task.options, "eval_mode": (*case.task.options.get("eval_mode", ()), *names)}
    return dataclasses.replace(case, task=dataclasses.replace(case.task, options=options))


@define_law(
    "a step under torch.func.vmap over stacked states gives what each state's own step gives, within rounding",
    "keep values out of Python inside apply: torch.where for if, x * mask for x[mask], tensors for .item() "
    "and .numpy(); keep nothing in a closure; or declare host=True",
    exempt=lambda algorithm: never_acts(algorithm) or ("a host algorithm reads values" if algorithm.host else None),
)
@at_best_precision
def vmap_agrees(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Map three steps over two or three states with different seeds and learning rates.

    Two steps use the same batch for all states, the third a batch for each. Integers must agree exactly. An error that
    is raised only under vmap breaks the law, too. In half precision every step begins with equal states. The comparison
    ends if rounding alone changes a choice in the step itself, such as the selection of examples or the sign of a
    gradient.
    """
    cases = [dataclasses.replace(case, seed=case.seed + 500 * i) for i in range(2 + case.seed % 2)]
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    states = [_with_rate(step.init(c.state(dtype=dtype)), 1 + i / 2) for i, c in enumerate(cases)]
    # The static parts are equal; members of a population may differ in tensors only, so all get the same object.
    states = [state.replace(static=states[0].static) for state in states]
    alone, mapped = states, stacked(states)
    for batch, dim in _mapped_batches(cases, dtype):
        own = [batch if dim is None else member(batch, i) for i in range(len(cases))]
        before, alone = alone, [step(s, b) for s, b in zip(alone, own, strict=True)]
        together = torch.func.vmap(step, in_dims=(0, dim))
        mapped = attempted("raised only under vmap", lambda f=together, s=mapped, b=batch: f(s, b))
        for i, expected in enumerate(alone):
            labels = (f"state {i} alone", f"state {i} of {len(cases)} under vmap")
            edge = functools.partial(is_on_the_edge, step, before[i], own[i], expected)
            if not agree_unless_on_the_edge(expected, member(mapped, i), labels, LASTING, edge):
                return watched.acted
        if case.task.is_half:  # rounding errors would add up from step to step
            mapped = stacked(alone)
    return watched.acted


def _mapped_batches(cases: Sequence[Case], dtype: torch.dtype) -> Iterator[tuple[Any, int | None]]:
    """Yield each batch with the dimension that vmap maps, or None if all states share the batch."""
    yield from ((cases[0].batch(i, dtype), None) for i in range(2))
    own = stacked([case.batch(2, dtype) for case in cases])
    if all(isinstance(leaf, Tensor) for leaf in torch_pytree.tree_leaves(own)):  # vmap maps nothing else
        yield own, 0


def _with_rate(state: State, factor: float) -> State:
    """Return the state with another learning rate, because members of a population differ in their settings, too."""
    changed = {"lr": state.hparams["lr"] * factor} if "lr" in state.hparams else {}
    return state.replace(hparams={**state.hparams, **changed})


_FINITE_FIELDS = ("loss", "params", "buffers", "opt_state")


@define_law(
    "where the plain step stays finite, so does the step with the algorithm",
    "look for 0 / 0, the root or logarithm of what may become negative, such as 1 - elapsed after the run's end, and "
    "means over nothing; where a value may be missing choose with torch.where, on both sides finite",
    exempt=never_acts,
)
def stays_finite(subject: Subject, case: Case) -> bool:
    """Check loss, params, buffers and opt_state after each step; for the other laws NaN equals NaN."""
    plain = run(case.step(), case.state(), case.batches())
    ours = run(case.step(subject.algorithm), case.state(), case.batches(), subject.name)
    for without, with_it in zip(plain.states[1:], ours.states[1:], strict=True):
        if _first_not_finite(without) is not None:
            break
        path = _first_not_finite(with_it)
        if path is not None:
            raise Broken("NaN or infinite, and finite without the algorithm", where=path)
    return ours.acted


def _first_not_finite(state: State) -> str | None:
    """Return the key path of the first tensor with a NaN or an infinity."""
    for field in _FINITE_FIELDS:
        for path, leaf in tree.leaves_with_paths(getattr(state, field)).items():
            if isinstance(leaf, torch.Tensor) and not leaf.isfinite().all():
                return f"{field}{path}"
    return None


@define_law(
    "a batch cut into microbatches gives the gradients, loss and new state that it gives whole, within rounding",
    "between BEFORE_FORWARD and AFTER_BACKWARD the batch is a slice: draw from state.example_rng(name), add to the "
    "loss only means over examples; statistics of the batch belong to AFTER_DATALOADER, clipping and counting to "
    "AFTER_TRAIN_BATCH",
    exempt=never_acts,
)
@at_best_precision
def microbatches_agree(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Take one step with each batch, whole and in slices: the case's number of microbatches, at least two.

    This compares gradients, loss, params, opt_state, hparams, the algorithm's slot, and metrics that are single
    numbers. Metrics are left out if the weights of slices are not proportional to their examples (the loss ignores some
    positions), because a mean over all positions then has another weight. BatchNorm, which mixes the examples of a
    slice, uses its running statistics. The comparison ends if rounding alone changes a choice in the step itself.
    """
    num = max(case.microbatches, 2)
    sliced = with_frozen_statistics(case).step(subject.algorithm, microbatches=num)
    return _divided(subject, case, dtype, f"{num} microbatches", lambda state, batch: [sliced.fold(state, batch)])


@define_law(
    "several processes that share each batch, as under data_parallel, all get the state that one process gets, within "
    "rounding",
    "between BEFORE_FORWARD and AFTER_BACKWARD a process sees its own part of the batch: remember sums, counts and "
    "flags there, to which each part adds, and leave outputs alone afterwards, when they are those of one part",
    exempt=never_acts,
)
@at_best_precision
def ranks_agree(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Take one step with each batch in one process and in two or three, simulated one after the other.

    The processes are compared with each other, bit for bit, and the first of them with the single process, as in
    `microbatches_agree`.
    """
    size = 2 + case.seed % 2
    play = played(with_frozen_statistics(case).step(subject.algorithm), size)
    return _divided(
        subject, case, dtype, f"{size} processes", lambda state, batch: play(lambda step: step.fold(state, batch))
    )


def _divided(
    subject: Subject, case: Case, dtype: torch.dtype, parts: str, divided: Callable[[State, Any], list[State]]
) -> bool:
    """Compare each step on whole batches with its ends in parts; return whether the algorithm acted."""
    case, watched = with_frozen_statistics(case), Watched(subject.algorithm)
    whole = case.step(watched.algorithm, microbatches=1)
    state = whole.init(case.state(dtype=dtype))
    for batch in case.batches(dtype):
        expected = whole.fold(state, batch)
        found = attempted(f"raised only with {parts}", functools.partial(divided, state, batch))
        edge = functools.partial(is_on_the_edge, whole, state, batch, whole.finish(expected))
        if not _are_near(subject, expected, found, parts, edge):
            break
        state = whole.finish(expected)
    return watched.acted


@define_law(
    "several processes that divide the parameters, as under fully_sharded, or only the batch all get the states that "
    "one process gets, within rounding",
    "a process holds some rows of each parameter and gradient: compute with them as they are, DTensors, not with "
    "to_local(); draw what is added to them as random.normal(rng, grad); take norms over several by tree.global_norm; "
    "remember tensors of their shapes in a mapping by the parameters' names",
    exempt=never_acts,
    most_cases=10,
)
@at_best_precision
def shards_agree(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Train on each batch in one process and in two or four, with the events between steps.

    They divide the parameters, and gather them for a step or layer by layer, or only the batch, by the case's seed.
    After each batch they are compared as in `ranks_agree`. BatchNorm uses the statistics of the whole batch, unless
    microbatches cut it, or the algorithm replaces layers, perhaps by some that use parts of the batch on purpose.

    Nothing is judged if `fully_sharded` refuses the algorithm, or if the case cannot be sent to other processes: the
    algorithm must come from a text, such as "my_module:my_algorithm".
    """
    # Companions come last: if surgery replaces parameters of which they remember something, that is not divided.
    case = dataclasses.replace(case, place=0)
    if case.microbatches > 1 or Trait.REPLACES_LAYERS in subject.algorithm.traits:
        case = with_frozen_statistics(case)
    watched = Watched(subject.algorithm)
    whole = case.step(watched.algorithm, microbatches=1)
    # In half precision rounding errors would add up from step to step.
    data = case.batches(dtype)[: 1 if case.task.is_half else None]
    steps = list(_steps(whole, begun(whole, case.state(dtype=dtype)), data))
    if not watched.acted and subject.algorithm.events != (Event.INIT,):
        return False
    size, gather = _DIVISIONS[case.seed % len(_DIVISIONS)]
    by = "data_parallel" if gather is None else f"fully_sharded, gather={gather!r}"
    parts = f"{size} processes by {by}"
    if gather == "layer":
        try:
            check_needs_no_parts(whole)
        except ValueError as refusal:
            raise NotJudged(str(refusal)) from refusal
    found = attempted(f"raised only with {parts}", lambda: _in_processes(size, subject, case, dtype, gather, len(data)))
    for batch, (before, end, expected), *fields in zip(data, steps, *found, strict=True):
        ends = [expected.replace(**values) for values in fields]
        edge = functools.partial(is_on_the_edge, whole, before, batch, whole.finish(end))
        if not _are_near(subject, expected, ends, parts, edge):
            break
    return watched.acted


def _steps(step: Step, state: State, data: Sequence[Any]) -> Iterator[tuple[State, State, State]]:
    """Train, and yield the states at the beginning and end of each step, and the latter after the events that follow.

    The last of these states has the gradients, batch and outputs of the step.
    """
    for batch in data:
        before = opened(step, state)
        end = step.fold(before, batch)
        state = closed(step, before, step.finish(end))
        yield before, end, state.replace(grads=end.grads, batch=end.batch, outputs=end.outputs)


_DIVISIONS: tuple[tuple[int, Any], ...] = ((2, "step"), (4, "layer"), (4, "step"), (2, "layer"), (4, None))
"""Numbers of processes, and how they gather parameters; `None` if they divide only the batch."""


def _in_processes(size: int, subject: Subject, *arguments: Any) -> list[list[dict[str, Any]]]:
    try:
        return in_process_group(_trained_apart, size, subject, *arguments)
    except Unportable as reason:
        if subject.source is None:
            raise NotJudged("other processes need a text, such as 'my_module:my_algorithm'") from reason
        raise NotJudged(f"it cannot be sent to other processes: {reason}") from reason


def _trained_apart(
    mesh: Any, subject: Subject, case: Case, dtype: torch.dtype, gather: Any, num_batches: int
) -> list[dict[str, Any]]:
    """Return what all processes have alike at the end of each step, in one of several processes, put together."""
    step = case.step(subject.algorithm)
    state = begun(step, case.state(dtype=dtype))
    if gather is None:
        step = data_parallel(step, mesh)
    else:
        step, state = fully_sharded(step, mesh, gather), shard(state, mesh)
    ends = _steps(step, state, case.batches(dtype)[:num_batches])
    return [{name: tree.map(whole, getattr(end, name)) for name in _SHARED} for _, _, end in ends]


# What the laws share


_COMPARED = ("grads", "loss", "params", "opt_state", "slots", "hparams", "metrics")
_SHARED = (*_COMPARED, "buffers", "key")
"""What all processes have alike."""


def _are_near(
    subject: Subject, expected: State, found: Sequence[State], parts: str, is_on_edge: Callable[[], bool]
) -> bool:
    """Compare the end of a step with those in parts, which must be equal bit for bit, as `agree_unless_on_the_edge`."""
    first, *others = [_without_own_metrics(one) for one in found]
    for rank, other in enumerate(others, 1):
        compare(first, other, ("in process 0", f"in process {rank}"), fields=_SHARED)
    measures, num = Trait.MEASURES_MICROBATCHES in subject.algorithm.traits, int(parts.partition(" ")[0])
    with_metrics = not measures and _weighs_examples(expected, num)

    def comparable(state: State) -> State:
        # Companions may count slices in their slots. Metrics that have no mean are those of the last slice.
        slots = {key: slot for key, slot in state.slots.items() if key == subject.name and not measures}
        return (_without_own_metrics(state) if with_metrics else state.replace(metrics={})).replace(slots=slots)

    labels = ("as a whole", f"with {parts}")
    return agree_unless_on_the_edge(comparable(expected), comparable(found[0]), labels, _COMPARED, is_on_edge)


def _without_own_metrics(state: State) -> State:
    return state.replace(metrics={key: metric for key, metric in state.metrics.items() if has_mean(metric)})


def _weighs_examples(whole: State, num: int) -> bool:
    """Return whether the weights of slices are proportional to their examples, at the end of the whole step."""
    loss_fn = whole.context.loss
    given = whole.batch if isinstance(loss_fn, losses.ModelLoss) else whole.targets

    def num_terms(outputs: Any, targets: Any) -> float:
        return float(whole.call_loss(lambda loss: losses.num_terms(loss, outputs, targets), train=True)[0])

    try:
        parts = batches.split((whole.outputs, given), min(num, whole.num_examples))
        counts = [(num_terms(*part), batches.num_examples(part)) for part in parts]
    except (TypeError, ValueError):  # the loss was computed for other examples than those in the final batch
        return False
    terms, examples = (sum(count) for count in zip(*counts, strict=True))
    return all(own_terms * examples == own_examples * terms for own_terms, own_examples in counts)


_DRAWING = ("bystander", "noise")
"""Companions whose draws make graphs up to ten times as long; draws are the topic of other laws."""


@define_law(
    "a compiled step does what the step does, with the same draws, within rounding",
    "apply runs once, on tensors without numbers, and its graph serves all steps: choose with torch.where, not if; no "
    "float(), .item(), .numpy() or x[mask]; what changes from step to step comes from the state: time from "
    "state.clock, memory from state.slots[name], settings from hparams; keep no tensor in a closure, a cache or a "
    "global; or declare host=True",
    owns=(SealedTimeError,),
    exempt=never_acts,
    most_cases=12,
)
@at_best_precision
def compiled_agrees(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Take the case's steps and two more as composed, and the same steps in traced graphs.

    The graphs run as they were traced (`compile(backend="eager")`), so that only the tracing is judged. The case's seed
    decides whether steps are donated, and whether those without microbatches are one graph, like most steps, or are cut
    into parts with variants, for which a companion acts in every third step. If the algorithm has a source text, it is
    created again for the compiled run, without state that earlier runs left in its closures.

    Integers must agree exactly. If rounding alone changes a discrete choice in the step itself, the comparison ends.
    Host algorithms run between the graphs.
    """
    case = dataclasses.replace(case, others=tuple(name for name in case.others if name not in _DRAWING))
    # Microbatches divide a step as well: the parts before and after them are compiled separately.
    is_divided = case.microbatches == 1 and case.seed % 4 < 2
    watched, turns = Watched(subject.algorithm), [_turns()] if is_divided else []
    composed = case.step(watched.algorithm, *turns)
    compiled = compile_step(
        case.step(subject.rebuilt().algorithm, *turns), donate=case.seed % 2 == 0, backend="eager", quiet=True
    )
    state, twin = (step.init(case.state(dtype=dtype)) for step in (composed, compiled))
    for index in range(case.num_batches + 2):
        if state.timestamp.is_finished():
            break
        batch, had_acted = case.batch(index, dtype), watched.acted
        expected = composed(state, batch)
        found = attempted("raised only where the step is compiled", lambda s=twin, b=batch: compiled(s, b))
        edge = functools.partial(is_on_the_edge, composed, state, batch, expected)
        if not agree_unless_on_the_edge(expected, found, ("as composed", "compiled"), LASTING, edge):
            return had_acted
        state, twin = expected, found
    return watched.acted


def _turns() -> Algorithm:
    """Return an algorithm that cuts the step before and after AFTER_TRAIN_BATCH, with two variants of the last part.

    A cut needs something that may vary on both sides, but before it nothing ever does (2**40 batches), since the part
    with the network's gradient takes long to trace. Variants alternate in threes: an algorithm that wrongly counts its
    calls, to act in every second step, would agree with variants in twos.
    """
    match = on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END) & every(3) | on(Event.BATCH_START) & every(2**40)
    return Algorithm(f"{COMPANY}turns", match, lambda event, state: state)
