"""The Algorithm record: what it checks, what it prints, and what it finds in its settings."""

import copy
import dataclasses
from typing import Any

import pytest

from purecompose.core.algorithm import Algorithm, Trait, identity
from purecompose.schedule import hparam, linear
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Custom, every, on


def keep(event: Event, state: Any) -> Any:
    del event
    return state


def algorithm(**changes: Any) -> Algorithm:
    return Algorithm(**{"name": "mixup", "match": on("init"), "apply": keep, **changes})


def test_arguments_of_every_accepted_type_are_stored_in_one_form() -> None:
    made = algorithm(
        traits=[Trait.EDITS_LOSS], runs_before=["sam", Trait.CLIPS_GRADIENTS], runs_after="ema", config={"alpha": 0.2}
    )
    assert made.traits == frozenset({Trait.EDITS_LOSS})
    assert made.runs_before == ("sam", Trait.CLIPS_GRADIENTS)
    assert made.runs_after == ("ema",)
    assert dict(made.config) == {"alpha": 0.2}
    assert made.predicate is made.match == on("init")
    assert (made.host, made.apply) == (False, keep)


def test_a_single_trait_needs_no_brackets() -> None:
    made = algorithm(traits=Trait.EDITS_LOSS, runs_after=Trait.SECOND_ORDER)
    assert made.traits == {Trait.EDITS_LOSS}
    assert made.runs_after == (Trait.SECOND_ORDER,)


def test_a_plain_match_function_becomes_a_predicate() -> None:
    made = algorithm(match=lambda event, state: state.timestamp.batch == 3)
    assert isinstance(made.match, Custom)
    assert made.events == tuple(Event)


def test_events_lists_the_events_at_which_an_algorithm_may_act() -> None:
    assert algorithm(match=on("batch_end", "init") & every(2)).events == (Event.INIT, Event.BATCH_END)
    assert algorithm(match=ALWAYS).events == tuple(Event)
    assert algorithm(match=on("init") & on("batch_end")).events == ()


def test_repr_shows_the_settings() -> None:
    assert repr(algorithm()) == "mixup()"
    assert repr(algorithm(config={"alpha": 0.2, "mode": "soft"})) == "mixup(alpha=0.2, mode='soft')"


def test_named_scalars_and_schedules_are_found_in_the_settings() -> None:
    lr, decay, warm = hparam("lr", 0.1), hparam("decay", 0.5), linear()
    made = algorithm(config={"rho": 0.5 * lr * warm, "parts": [decay, {"again": lr}], "mode": "soft"})
    assert made.hparams == (lr, decay)
    assert made.schedules == (warm,)
    assert (algorithm().hparams, algorithm().schedules) == ((), ())


def test_an_algorithm_is_hashable_immutable_and_compares_by_value() -> None:
    first, second = algorithm(config={"alpha": 0.2}), algorithm(config={"alpha": 0.2})
    assert first == second
    assert hash(first) == hash(second)
    assert first != algorithm(config={"alpha": 0.3})
    assert dataclasses.replace(first, name="other").config == first.config
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="does not support item assignment"):
        first.config["alpha"] = 1.0  # pyright: ignore[reportIndexIssue]


def test_later_changes_of_the_config_dict_do_not_reach_the_algorithm() -> None:
    config = {"alpha": 0.2}
    made = algorithm(config=config)
    config["alpha"] = 0.9
    assert made.config == {"alpha": 0.2}
    assert copy.copy(made) == made


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"name": ""}, ValueError, "name='': an algorithm needs a name"),
        ({"name": 3}, ValueError, "name=3: an algorithm needs a name"),
        ({"match": None}, TypeError, r"mixup: match: expected a predicate.*got None \(NoneType\)"),
        ({"match": Event.BATCH_END}, TypeError, r"such as on\(Event.BATCH_END\).*got <Event.BATCH_END"),
        ({"apply": "soft"}, TypeError, r"mixup: apply: expected a function .* -> state, got 'soft' \(str\)"),
        ({"traits": "EDITS_LOSS"}, TypeError, "mixup: traits=.*EDITS_LOSS.*: expected members of Trait"),
        ({"traits": ["edits", Trait.EDITS_LOSS]}, TypeError, "mixup: traits=.*expected members of Trait"),
        ({"traits": [3]}, TypeError, "mixup: traits=.*expected members of Trait"),
        ({"traits": None}, TypeError, "mixup: traits=None: expected members of Trait"),
        ({"runs_before": 3}, TypeError, "mixup: runs_before=3: expected algorithms' names or traits"),
        ({"runs_after": ["sam", keep]}, TypeError, "mixup: runs_after=.*: expected algorithms' names or traits"),
    ],
)
def test_bad_arguments_are_rejected_at_construction(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        algorithm(**changes)


def test_identity_never_acts() -> None:
    assert identity().match == NEVER
    assert identity().events == ()
    assert (identity().name, identity("pause").name) == ("identity", "pause")
    state = object()
    assert identity().apply(Event.INIT, state) is state  # pyright: ignore[reportArgumentType]
