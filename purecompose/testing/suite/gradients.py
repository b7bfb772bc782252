"""The law of gradients: a method that sets gradients builds on those that it is given, as others have left them."""

import torch

from purecompose import tree
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, acts_in_step, define_law, never_acts
from purecompose.testing.record import Act, Watched, run
from purecompose.testing.subject import Subject
from purecompose.time.event import Event


# Signs and bounded gradients change with the first, and what depends on sizes with the second.
_MOVES = (torch.neg, lambda grad: torch.ones_like(grad) - 2 * grad)


def _sets_no_gradients(algorithm: Algorithm) -> str | None:
    if Trait.RENEWS_GRADIENTS in algorithm.traits:
        return "it computes the gradients again, before others edit them (Trait.RENEWS_GRADIENTS)"
    return never_acts(algorithm) or (None if acts_in_step(algorithm) else "it never acts within a step")


@define_law(
    "a method that sets gradients builds on those that it is given, so that what others did to them is kept",
    "start from state.grads; a method that computes them again from the batch, by state.gradient or state.gradients, "
    "declares Trait.RENEWS_GRADIENTS, by which it acts before those that edit them",
    exempt=_sets_no_gradients,
    is_about_option=True,
    idle="it sets no gradients",
)
def gradients_taken(subject: Subject, case: Case) -> bool:
    """Apply the algorithm again to states with other gradients, wherever it sets gradients that are not zero.

    Each of them must be another one in one of these, unless the given ones are in its slot, for a later step.
    """
    was_judged = False

    def around(event: Event, state: State, act: Act) -> State:
        nonlocal was_judged
        after = act(state)
        given, found = state.grads or {}, after.grads or {}
        names = [name for name in found if name in given and found[name] is not given[name] and found[name].any()]
        if names:
            was_judged = True
            others = [act(state.replace(grads={name: move(grad) for name, grad in given.items()})) for move in _MOVES]
            slots = [one.slots.get(subject.name) for one in (after, *others)]
            is_kept = not all(tree.equal(slots[0], slot) for slot in slots)
            for name in names if not is_kept else ():
                if all(tree.equal(found[name], (one.grads or {}).get(name)) for one in others):
                    what = "it is the same whatever gradients are given, so edits of other methods are lost"
                    raise Broken(what, event=event, where=f"grads[{name!r}]")
        return after

    run(case.step(Watched(subject.algorithm, around).algorithm), case.state(), case.batches())
    return was_judged
