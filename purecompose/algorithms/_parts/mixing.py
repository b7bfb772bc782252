"""Shared parts of methods that mix pairs of examples: the draw of the partner's share, and the algorithm's skeleton."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses, random
from purecompose._support.checks import check_flag, check_number
from purecompose.algorithms._parts.checks import check_can_write, check_reads_targets, check_scalar, given_fields
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.losses.terms import for_mixtures
from purecompose.random.distributions import beta_number
from purecompose.schedule import Scalar
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


def draw_share(rng: random.Rng, alpha: float | Tensor, num: int | None, where: str, hint: str) -> float | Tensor:
    """Return a draw from Beta(alpha, alpha), or 0 for an alpha of 0.

    Args:
        rng: The source of the draw, which is for the whole batch or, with `num`, for each example.
        alpha: The parameter, at least 0; the value of a (0-d) tensor is not checked.
        num: The number of examples with separate draws; `None` for one draw.
        where: Prefix of error messages, which names the parameter.
        hint: End of error messages.

    Returns:
        The draw, 0-d or (num,), float32; a number where the host can read it at once, and 0.0 if alpha is the number 0.
    """
    if not isinstance(alpha, Tensor):
        check_number(alpha, where, 0, hint=hint)
        if alpha == 0:
            return 0.0
        if num is None:
            return beta_number(rng, alpha, alpha)
    shape: tuple[int, ...] = () if num is None else (num,)
    share = random.beta(for_examples(rng, num), alpha, alpha, shape)
    # The draw is NaN for an alpha of 0, which a member of a population may have.
    return torch.where(alpha > 0, share, 0) if isinstance(alpha, Tensor) else share


def for_examples(rng: random.Rng, num: int | None) -> random.Rng:
    """Return the source of draws for each of `num` examples; with `None`, for the whole batch."""
    return rng if num is None else rng.per_example(torch.arange(num, device=rng.key.device))


def mixture_for(inputs: Tensor, targets: Tensor | Mixture, where: str) -> Mixture:
    """Return the targets of these inputs as a mixture."""
    mixture = Mixture.of(targets)
    num, num_targets = inputs.shape[0], mixture.weights[0].shape[0]
    if num_targets != num:
        raise ValueError(
            f"{where}: expected inputs and targets of the same length, one target per example in the first dim, got "
            f"inputs of {num} examples and targets of {num_targets}"
        )
    return mixture


def mixing_method(
    name: str,
    core: Callable[..., tuple[Tensor, Any]],
    check_inputs: Callable[[str, Any], None],
    *,
    alpha: Scalar,
    alpha_hint: str,
    flags: Mapping[str, bool],
    input_field: batches.Field | None,
    target_field: batches.Field | None,
) -> Algorithm:
    """Return a method that mixes each example of a batch with a partner.

    Args:
        name: Name of the algorithm.
        core: A function `(rng, inputs, targets, *, alpha, **flags) -> (inputs, targets)`, called `<factory>_batch`.
        check_inputs: A function `(name, inputs)` that raises for inputs that cannot be mixed.
        alpha: The parameter of the Beta distribution; with the number 0 the algorithm never matches.
        alpha_hint: The meaning of alpha, for error messages.
        flags: The other settings, including `interpolate_loss`, which the repr always shows; others only if True.
        input_field, target_field: As in a factory.
    """
    factory = core.__name__.removesuffix("_batch")
    check_scalar(alpha, f"{factory}: alpha", 0, hint=alpha_hint)
    for setting, value in flags.items():
        check_flag(value, f"{factory}: {setting}")
    fields = given_fields(writes=("input_field", "target_field"), input_field=input_field, target_field=target_field)
    mix = partial(core, **flags)

    def apply(event: Event, state: State) -> State:
        own_input = fields.get("input_field", state.context.input_field)
        own_target = fields.get("target_field", state.context.target_field)
        if event is Event.INIT:
            check_can_write(own_input, "input_field")
            check_can_write(own_target, "target_field")
            check_reads_targets(name, state.context.loss)
            losses.check_loss(for_mixtures(state.context.loss), per_example=flags["interpolate_loss"])
            if own_target == own_input and flags["interpolate_loss"]:
                raise ValueError(
                    f"{name}: interpolate_loss=True: expected a target besides the input, got the field {own_input!r} "
                    "for both: the mixed input is its own target, so there are no two losses to mix; leave "
                    "interpolate_loss out"
                )
            return state
        inputs, targets = batches.get(state.batch, own_input), batches.get(state.batch, own_target)
        check_inputs(name, inputs)
        inputs, targets = mix(state.rng(name), inputs, targets, alpha=state.scalar(alpha))
        batch = batches.put(state.batch, own_input, inputs)
        # The input of an autoencoder is its target, too: the mixed input.
        return state.replace(batch=batch if own_target == own_input else batches.put(batch, own_target, targets))

    is_neutral = isinstance(alpha, (int, float)) and alpha == 0
    shown = {setting: value for setting, value in flags.items() if value or setting == "interpolate_loss"}
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.MIXES_EXAMPLES}),
        runs_after=(Trait.AUGMENTS_EXAMPLES,),
        config={"alpha": alpha, **shown, **fields},
    )
