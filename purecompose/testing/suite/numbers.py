"""Laws of numbers: a step that is mapped or differentiated has the same result, within rounding; see `judging`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from purecompose import tree
from purecompose.core import loop
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import LASTING, Watched, run
from purecompose.testing.subject import Subject
from purecompose.testing.suite.derivative import Point, as_path, check_derivative
from purecompose.testing.suite.judging import (
    attempted,
    compare_rounded,
    is_on_the_edge,
    judged,
    judged_in_double,
    with_frozen_statistics,
)


@define_law(
    "a step under torch.func.vmap over stacked states gives what each state's own step gives, within rounding",
    "keep values out of Python inside apply: torch.where for if, x * mask for x[mask], tensors for .item() "
    "and .numpy(); keep nothing in a closure; or declare host=True",
    exempt=lambda algorithm: never_acts(algorithm) or ("a host algorithm reads values" if algorithm.host else None),
)
def vmap_agrees(subject: Subject, case: Case) -> bool:
    """Map three steps over two or three states with different seeds and learning rates.

    Two steps use the same batch for all states, the third a batch for each. Integers must agree exactly. An error that
    is raised only under vmap breaks the law, too. In half precision every step begins with equal states. The comparison
    ends if rounding alone changes a choice in the step itself, such as the selection of examples or the sign of a
    gradient.
    """
    return judged(_judge_vmap, subject, case)


def _judge_vmap(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    cases = [dataclasses.replace(case, seed=case.seed + 500 * i) for i in range(2 + case.seed % 2)]
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    states = [_with_rate(step.init(c.state(dtype=dtype)), 1 + i / 2) for i, c in enumerate(cases)]
    # The static parts are equal; members of a population may differ in tensors only, so all get the same object.
    states = [state.replace(static=states[0].static) for state in states]
    alone, mapped = states, _stacked(states)
    for batch, dim in _mapped_batches(cases, dtype):
        own = [batch if dim is None else _member(batch, i) for i in range(len(cases))]
        before, alone = alone, [step(s, b) for s, b in zip(alone, own, strict=True)]
        together = torch.func.vmap(step, in_dims=(0, dim))
        mapped = attempted("raised only under vmap", lambda f=together, s=mapped, b=batch: f(s, b))
        for i, expected in enumerate(alone):
            labels = (f"state {i} alone", f"state {i} of {len(cases)} under vmap")
            try:
                compare_rounded(expected, _member(mapped, i), labels, LASTING)
            except Broken:
                if is_on_the_edge(step, before[i], own[i], expected):
                    return watched.acted
                raise
        if case.task.is_half:  # rounding errors would add up from step to step
            mapped = _stacked(alone)
    return watched.acted


def _mapped_batches(cases: Sequence[Case], dtype: torch.dtype) -> Iterator[tuple[Any, int | None]]:
    """Yield each batch with the dimension that vmap maps, or None if all states share the batch."""
    yield from ((cases[0].batch(i, dtype), None) for i in range(2))
    own = _stacked([case.batch(2, dtype) for case in cases])
    if all(isinstance(leaf, Tensor) for leaf in torch_pytree.tree_leaves(own)):  # vmap maps nothing else
        yield own, 0


@define_law(
    "the gradient through whole steps is finite and equals finite differences",
    "leave the graph whole: no .detach(), .data, .item() or torch.no_grad() on the way from params and hparams to "
    "what lasts; under a root or a norm, keep away from 0 (torch.where before it, or a small constant in it); what "
    "the step's own gradient must not see, compute before the gradient, at AFTER_DATALOADER",
    exempt=lambda algorithm: (
        never_acts(algorithm)
        or ("a host algorithm reads values, through which no gradient flows" if algorithm.host else None)
        or ("it stops gradients on purpose (Trait.STOPS_GRADIENTS)" if _stops_gradients(algorithm) else None)
    ),
    unsuited=lambda task: "differences are lost in the rounding of half precision" if task.is_half else None,
    is_about_option=True,
    idle="it never acted, refuses float64, or has a jump or kink at the point",
)
def gradient_exact(subject: Subject, case: Case) -> bool:
    """Differentiate the loss after two steps by "lr", the method's own hparams and the initial params.

    The derivatives are taken along a random direction.

    Nothing is judged if the loss has a jump or a kink within the difference, or is not finite; nor if the algorithm
    does not accept float64, the only dtype in which differences are precise enough. BatchNorm's running statistics
    carry no gradient from step to step, so a fault that only they cause does not count.
    """
    return judged_in_double(_judge_gradient, subject, case)


def _judge_gradient(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    try:
        return _judge_derivative(subject, case, dtype)
    except Broken:
        if not case.task.has_buffers:
            raise
        return _judge_derivative(subject, with_frozen_statistics(case), dtype)


def _judge_derivative(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    if case.lr == 0:
        # With a learning rate of 0, zeros remain zeros, at which a guard (torch.where) has a different derivative.
        case = dataclasses.replace(case, lr=_SMALL_LR)
    # Two slices are enough, and the gradient of each takes time.
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm, microbatches=min(case.microbatches, 2))
    start = step.init(case.state(dtype=dtype))
    data = [case.batch(i, dtype) for i in range(2)]

    def loss(point: Point) -> Tensor:
        state = start.replace(hparams={**start.hparams, **point["hparams"]}, params={**start.params, **point["params"]})
        for batch in data:
            state = step(state, batch)
        # In training mode, which does not read running statistics, because torch has no gradient for them.
        end = loop.loss(loop.forward(state.replace(batch=data[0]))).loss
        assert end is not None
        return end

    point = _point(start, {"lr", *(hparam.name for hparam in subject.algorithm.hparams)})
    value = loss(point)
    if not watched.acted or not value.isfinite():
        return False
    grads = attempted("raised only where a gradient is taken through the step", lambda: torch.func.grad(loss)(point))
    for path, leaf in tree.leaves_with_paths(grads).items():
        if not leaf.isfinite().all():
            bad = leaf[~leaf.isfinite()][0].item()
            raise Broken(tree.Difference(as_path(path), f"the gradient is not finite: {bad}"))
    return check_derivative(
        loss,
        point,
        grads,
        seed=case.seed,
        what="the derivative of the loss after 2 steps",
        by="by torch.func.grad",
        value=value,
    )


_SMALL_LR = 0.01


def _stops_gradients(algorithm: Algorithm) -> bool:
    return Trait.STOPS_GRADIENTS in algorithm.traits


def _point(state: State, names: set[str]) -> Point:
    """Return the inputs of the derivative: the floating params, and these hparams."""
    hparams = {key: value.to(torch.float64) for key, value in state.hparams.items() if key in names}
    return {"hparams": hparams, "params": {key: p for key, p in state.params.items() if p.is_floating_point()}}


def _with_rate(state: State, factor: float) -> State:
    """Return the state with another learning rate, because members of a population differ in their settings, too."""
    changed = {"lr": state.hparams["lr"] * factor} if "lr" in state.hparams else {}
    return state.replace(hparams={**state.hparams, **changed})


def _stacked(trees: Sequence[Any]) -> Any:
    return tree.map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *trees)


def _member(stacked: Any, i: int) -> Any:
    return tree.map(lambda leaf: leaf[i] if isinstance(leaf, Tensor) else leaf, stacked)


_FIELDS = ("loss", "params", "buffers", "opt_state")


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
    for field in _FIELDS:
        for path, leaf in tree.leaves_with_paths(getattr(state, field)).items():
            if isinstance(leaf, torch.Tensor) and not leaf.isfinite().all():
                return f"{field}{path}"
    return None
