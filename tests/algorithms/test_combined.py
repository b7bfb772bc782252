"""Methods made of methods: what they choose, how often, and what stays as it is for the parts alone."""

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import algorithms as alg
from purecompose._support import specs
from purecompose.errors import FormError
from tests.helpers import assert_same


NUM, CLASSES = 8, 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM, 1, 8, 8, generator=generator)
    return inputs, torch.randint(CLASSES, (NUM,), generator=generator)


def begin(*methods, key=0, duration: Any = "400ba", **options: Any):
    step = pc.compose(pc.loop_events, methods)
    state = pc.State.create(
        net(), loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), key=key, duration=duration, **options
    )
    return step, step.init(state)


def marker(name, *, event=pc.Event.AFTER_DATALOADER):
    """Return a method that adds 1 to its slot where it acts."""

    def apply(at, state):
        count = torch.zeros(()) if at is pc.Event.INIT else state.slots[name] + 1
        return state.replace(slots={**state.slots, name: count})

    return pc.Algorithm(name, pc.on(pc.Event.INIT, event), apply)


def metrics_of(step, state, num):
    found = []
    for _ in range(num):
        state = step(state, batch())
        found.append({name: value.item() for name, value in state.metrics.items()})
    return found, state


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_a_method_is_chosen_with_its_probability(p):
    step, state = begin(alg.sometimes(marker("mark"), p))
    found, state = metrics_of(step, state, 400)
    share = sum(one["mark/chosen"] for one in found) / 400
    assert state.slots["mark"].item() == sum(one["mark/chosen"] for one in found)
    assert abs(share - p) < 4 * (p * (1 - p) / 400) ** 0.5
    # Batches decide independently of each other.
    pairs = [(a["mark/chosen"], b["mark/chosen"]) for a, b in zip(found, found[1:], strict=False)]
    both = sum(a * b for a, b in pairs) / len(pairs)
    assert abs(both - p * p) < 4 * (p * p * (1 - p * p) / 400) ** 0.5


def test_one_of_several_is_chosen_by_weight():
    weights = (1, 3, 0, 4)
    step, state = begin(alg.one_of(*[marker(f"m{i}") for i in range(4)], weights=weights, name="one"))
    found, state = metrics_of(step, state, 400)
    for i, weight in enumerate(weights):
        count, p = sum(one[f"one/m{i}"] for one in found), weight / 8
        assert state.slots[f"m{i}"].item() == count
        assert abs(count / 400 - p) <= 4 * (p * (1 - p) / 400) ** 0.5
    assert all(sum(one.values()) == 1 for one in found)


def test_choices_within_each_other_are_independent():
    step, state = begin(alg.sometimes(alg.sometimes(marker("mark"), 0.5), 0.5))
    found, state = metrics_of(step, state, 400)
    assert abs(state.slots["mark"].item() / 400 - 0.25) < 4 * (0.25 * 0.75 / 400) ** 0.5
    assert {"mark/chosen", "mark/chosen.2"} <= found[0].keys()


def test_examples_are_chosen_one_by_one():
    method = alg.cutout(1, 1.0)  # covers whole images
    step, state = begin(alg.sometimes(method, 0.25, per_example=True))
    shares = [one["cutout/chosen"] for one in metrics_of(step, state, 200)[0]]
    assert abs(sum(shares) / 200 - 0.25) < 4 * (0.25 * 0.75 / (200 * NUM)) ** 0.5
    seen = []
    look = pc.Algorithm("look", pc.on("batch_start"), lambda event, state: seen.append(state.inputs) or state)
    step, state = begin(alg.sometimes(method, 0.5, per_example=True), look)
    step(state, batch())
    changed = (seen[-1] != batch()[0]).flatten(1)
    covered = changed.any(1)
    assert 0 < covered.sum() < NUM
    assert torch.equal(seen[-1][~covered], batch()[0][~covered])


@pytest.mark.parametrize(
    "method",
    [alg.mixup(0.4), alg.cutmix(1.0), alg.label_smoothing(0.1), alg.ema("2ba"), alg.sam(0.5)],
    ids=lambda method: method.name,
)
def test_the_choice_is_the_method_or_nothing(method):
    """In each batch the state is that of the method, or that without it, from the same state on."""
    (step, state), (always, _), (never, _) = begin(alg.sometimes(method, 0.5)), begin(method), begin()
    kinds = set()
    for number in range(6):
        start, state = state, step(state, batch(number))
        chosen = state.metrics[f"{method.name}/chosen"].item()
        other = always(start, batch(number)) if chosen else never(start, batch(number))
        for name, param in other.params.items():
            torch.testing.assert_close(state.params[name], param, rtol=1e-6, atol=1e-7)
        kinds.add(chosen)
    assert kinds == {0.0, 1.0}


def test_a_choice_among_equal_forms_is_exact():
    step, state = begin(alg.one_of(alg.mixup(0.4), alg.cutmix(1.0)))
    names = set()
    for number in range(6):
        start, state = state, step(state, batch(number))
        chosen = next(name for name in ("mixup", "cutmix") if state.metrics[f"mixup_or_cutmix/{name}"])
        alone, _ = begin({"mixup": alg.mixup(0.4), "cutmix": alg.cutmix(1.0)}[chosen])
        after = alone(start.replace(metrics={}, initialised=(chosen,)), batch(number))
        assert_same(after.params, state.params)
        assert_same(after.loss, state.loss)
        names.add(chosen)
    assert names == {"mixup", "cutmix"}


def test_identity_is_a_choice():
    step, state = begin(alg.one_of(alg.mixup(0.4), pc.identity(), weights=(1, 1)))
    found, _ = metrics_of(step, state, 20)
    assert {one["mixup_or_identity/identity"] for one in found} == {0.0, 1.0}


def test_a_probability_may_be_a_schedule():
    step, state = begin(alg.sometimes(marker("mark"), pc.schedule.step("10ba", 0.0)), duration="20ba")
    assert metrics_of(step, state, 20)[1].slots["mark"].item() == 10


def test_gradients_flow_to_the_settings_of_a_part():
    smoothing = pc.hparam("smoothing", 0.1)
    step, state = begin(alg.sometimes(alg.label_smoothing(smoothing), 0.5))

    def loss(value, given):
        return step(given.replace(hparams={"smoothing": value}), batch()).loss

    grads = []
    for _ in range(8):
        following = step(state, batch())
        grad = torch.func.grad(loss)(torch.tensor(0.1), state)
        grads.append((following.metrics["label_smoothing/chosen"].item(), grad.item() != 0))
        state = following
    assert all(bool(chosen) == has_grad for chosen, has_grad in grads)
    assert {chosen for chosen, _ in grads} == {0.0, 1.0}


def test_members_of_a_population_choose_for_themselves():
    step, state = begin(alg.sometimes(alg.mixup(0.4), 0.5))
    members = pc.stack_states([state.replace(key=pc.random.key(seed)) for seed in range(8)])
    chosen = pc.population(step, 8)(members, batch()).metrics["mixup/chosen"]
    assert set(chosen.tolist()) == {0.0, 1.0}


def test_a_compiled_step_has_one_variant_for_all_choices():
    step, state = begin(alg.sometimes(alg.one_of(alg.mixup(0.4), alg.cutmix(1.0)), 0.7))
    compiled = pc.compile(step, backend="eager")
    found = set()
    for number in range(8):
        state = compiled(state, batch(number))
        found.add(tuple(value.item() for value in state.metrics.values()))
    assert len(found) > 2
    assert len(compiled.variants()) == 1


def test_what_changes_shapes_is_chosen_on_the_host():
    with pytest.raises(FormError, match=r"colout: state.batch .*host=True"):
        step, state = begin(alg.sometimes(alg.colout(), 0.5))
        step(state, batch())
    step, state = begin(alg.sometimes(alg.colout(0.5, 0.5), 0.5, host=True))
    seen = []
    look = pc.Algorithm("look", pc.on("batch_start"), lambda event, state: seen.append(state.inputs.shape[-1]) or state)
    step = step.replace(algorithms=[*step.algorithms, look])
    found, _ = metrics_of(step, state, 10)
    assert [size < 8 for size in seen[-10:]] == [bool(one["colout/chosen"]) for one in found]


def test_a_method_acts_during_a_part_of_the_run():
    for event in ("after_dataloader", "batch_end"):
        step, state = begin(alg.during(marker("mark", event=pc.Event(event)), "3ba", "7ba"), duration="10ba")
        counts = []
        for _ in range(10):
            state = step(state, batch())
            counts.append(state.slots["mark"].item())
        assert counts == [0, 0, 0, 1, 2, 3, 4, 4, 4, 4], event


def test_a_method_acts_in_every_nth_batch():
    step, state = begin(alg.every(marker("mark"), 3), duration="10ba")
    assert metrics_of(step, state, 10)[1].slots["mark"].item() == 3


def test_names_make_two_of_a_kind_different():
    twice = [alg.ema("10ba"), alg.named(alg.during(alg.ema("1ba"), 0.0, 0.5), "short")]
    step, state = begin(*twice)
    assert set(step(state, batch()).slots) >= {"ema", "short"}
    choice = alg.named(alg.one_of(alg.mixup(), alg.cutmix()), "mix")
    assert choice.names == {"mix", "mix.mixup", "mix.cutmix"}
    assert repr(alg.named(alg.mixup(0.3), "other")) == "other(alpha=0.3, interpolate_loss=False, per_example=False)"
    with pytest.raises(ValueError, match="two algorithms are named 'mixup'"):
        pc.compose(pc.loop_events, [alg.mixup(), alg.sometimes(alg.mixup())])
    with pytest.raises(TypeError, match="whose factory takes a name"):
        alg.named(marker("mark"), "other")


def test_constraints_and_traits_of_the_parts_hold():
    mixing = alg.one_of(alg.cutmix(), alg.mixup())
    order = pc.compose(pc.loop_events, [mixing, alg.sometimes(alg.cutout()), alg.selective_backprop(0, 1.0)])
    state = order.init(begin()[1])
    found = order.plan(state).order("after_dataloader")
    assert found == ("selective_backprop", "cutout", "cutmix_or_mixup")


def test_a_plan_says_what_a_method_is_made_of():
    step, state = begin(alg.sometimes(alg.one_of(alg.mixup(), alg.cutmix(), weights=(1, 3)), p=0.8))
    assert "no other acts there; sometimes(one_of(mixup, cutmix, weights=(1, 3)), p=0.8)" in {
        row.reason for row in step.plan(state).rows
    }


CHAINS = [
    lambda: (alg.gradient_accumulation(2), alg.gradient_clipping("norm", 0.01)),
    lambda: (alg.gradient_clipping("norm", 0.01), alg.gradient_accumulation(2)),
    lambda: (alg.mixup(0.4), alg.cutout()),
    lambda: (alg.ema("2ba"), alg.squeeze_excite(0.5, 1)),
]


@pytest.mark.parametrize("make", CHAINS)
def test_a_chain_has_the_order_of_a_step(make):
    ends = []
    for methods in (make(), (alg.chain(*make()),)):
        step, state = begin(*methods)
        for seed in range(4):
            state = step(state, batch(seed))
        ends.append(state)
    assert_same(ends[1].params, ends[0].params)
    assert_same(ends[1].slots, ends[0].slots)


def test_a_chain_whose_methods_have_no_order_is_refused():
    first, second = (dataclasses.replace(marker(a), runs_before=(b,)) for a, b in (("a", "b"), ("b", "a")))
    with pytest.raises(ValueError, match="no order at .* satisfies all constraints"):
        alg.chain(first, second)


SOURCE = "sometimes(one_of(mixup(0.4), chain(cutout(), cutmix(1.0)), weights=(1, 3)), 0.5)"


def test_text_and_pickle_give_the_same_method():
    made = specs.build(specs.parse_one(SOURCE), alg.BY_NAME, "algorithm")
    again = specs.build(specs.parse_one(str(specs.parse_one(SOURCE))), alg.BY_NAME, "algorithm")
    assert repr(made) == repr(again) == repr(pickle.loads(pickle.dumps(made)))
    assert specs.parse_one("sometimes(my_module:method())").names == {"sometimes", "my_module:method"}
    step, state = begin(pickle.loads(pickle.dumps(made)))
    other, _ = begin(made)
    assert_same(step(state, batch()), other(state, batch()))


REFUSED = [
    (lambda: alg.sometimes("mixup"), TypeError, "expected a method"),  # pyright: ignore[reportArgumentType]
    (
        lambda: specs.parse_one("sometimes(mixup, 0.5)"),
        ValueError,
        r"mixup is not a literal: .* a call such as mixup\(\)",
    ),
    (lambda: alg.sometimes(alg.blurpool()), ValueError, "acts in training steps"),
    (lambda: alg.sometimes(alg.mixup(), 1.5), ValueError, r"p: expected a finite number in \[0, 1\]"),
    (lambda: alg.sometimes(alg.colout(), per_example=True, host=True), ValueError, "acts on the device"),
    (lambda: alg.one_of(alg.mixup()), ValueError, "at least two methods"),
    (lambda: alg.one_of(alg.mixup(), alg.mixup(0.3)), ValueError, "two methods are called 'mixup'"),
    (lambda: alg.one_of(alg.mixup(), alg.cutmix(), weights=(1,)), ValueError, "one for each method"),
    (lambda: alg.one_of(alg.mixup(), alg.cutmix(), weights=(0, 0)), ValueError, "not only 0"),
    (lambda: alg.one_of(alg.mixup(), alg.every(alg.cutmix(), 2)), ValueError, "different batches"),
    (lambda: alg.during(alg.loss_scaling(), 0, 0.5), ValueError, "before and after the time advances"),
    (lambda: alg.during(alg.mixup(), 0.5, 0.2), ValueError, "start before the end"),
    (lambda: alg.every(alg.mixup(), 0), ValueError, "positive"),
    (lambda: alg.every(alg.gradient_accumulation(4), 2), ValueError, "keeps gradients for later batches"),
    (lambda: alg.during(alg.gradient_accumulation(4), 0.5), ValueError, "keeps gradients for later batches"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_cannot_be_combined_is_an_error(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_methods_that_change_more_than_the_batch_are_not_chosen_by_example():
    step, state = begin(alg.sometimes(alg.sam(), per_example=True))
    with pytest.raises(ValueError, match=re.escape("per_example=True: expected a method that changes the batch only")):
        step(state, batch())


def test_examples_along_another_dimension_are_not_chosen():
    double = pc.Algorithm("double", pc.on("batch_start"), lambda event, state: state.replace(inputs=state.inputs * 2))
    step, state = begin(alg.sometimes(double, per_example=True), batch_dim=1)
    with pytest.raises(ValueError, match="examples lie along the first dimension"):
        step(state, (torch.zeros(4, NUM), batch()[1]))


@pytest.mark.parametrize(
    "method", [alg.mixup(0.4), alg.cutmix(1.0), alg.label_smoothing(0.1)], ids=lambda one: one.name
)
def test_weights_of_examples_stay_with_what_is_chosen(method):
    fields: Any = {"input_field": "x", "target_field": "y", "weight_field": "w"}
    (step, state), (always, _), (never, _) = (
        begin(*methods, **fields) for methods in ([alg.sometimes(method, 0.5)], [method], [])
    )
    chosen = set()
    for number in range(6):
        weighted = dict(zip("xyw", (*batch(number), torch.arange(NUM)), strict=True))
        start, state = state, step(state, weighted)
        chosen.add(is_chosen := bool(state.metrics[f"{method.name}/chosen"]))
        other = (always if is_chosen else never)(start, weighted)
        torch.testing.assert_close(state.loss, other.loss)
        torch.testing.assert_close(state.params, other.params, rtol=1e-5, atol=1e-6)
    assert chosen == {False, True}


@dataclasses.dataclass
class Images:
    x: torch.Tensor
    y: Any
    source: str = "made up"


def test_batches_may_be_dataclasses():
    method = alg.sometimes(alg.one_of(alg.mixup(0.4), alg.cutmix(1.0)), 0.5)
    (step, state), (other, _) = begin(method, input_field="x", target_field="y"), begin(method)
    for number in range(4):
        start, state = state, step(state, Images(*batch(number)))
        assert_same(state.params, other(start.replace(input_field=0, target_field=1), batch(number)).params)


@pytest.mark.parametrize(
    ("start", "end"), [(0.0, 0.5), (0.5, 1.0), (1 / 3, 2 / 3), (0.1, 0.1), (0.999, None), ("2ba", 0.9)]
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_part_of_a_run_is_the_same_batches_at_all_events(start, end, is_compiled):
    counts = []
    for event in ("after_dataloader", "batch_end"):
        step, state = begin(alg.during(marker("mark", event=pc.Event(event)), start, end), duration="7ba")
        step = pc.compile(step, backend="eager") if is_compiled else step
        counts.append([int((state := step(state, batch())).slots["mark"]) for _ in range(8)])
    assert counts[0] == counts[1]


def test_a_part_of_a_run_without_a_length_may_have_one_end():
    for event in ("after_dataloader", "batch_end"):
        for points, expected in (({"start": "2ba"}, [0, 0, 1, 2]), ({"end": "2ba"}, [1, 2, 2, 2])):
            step, state = begin(alg.during(marker("mark", event=pc.Event(event)), **points), duration=None)
            counts = [int((state := step(state, batch())).slots["mark"]) for _ in range(4)]
            assert counts == expected


def test_the_decision_is_reported_where_a_method_acts_at_other_events_later():
    """SWA acts at AFTER_TRAIN_BATCH only after its end, and at BATCH_END before."""
    step, state = begin(alg.sometimes(alg.swa("0ba", "2ba", "1ba"), 0.5), duration="6ba")
    found, state = metrics_of(step, state, 2)
    assert all(one.keys() == {"swa/chosen"} for one in found)
    assert state.slots["swa"].averages.num == sum(one["swa/chosen"] for one in found)


def test_rules_know_the_period_of_a_metric_that_a_part_measures():
    step, state = begin(alg.every(alg.training_metrics(reset="2ba"), 1), duration="8ba")
    end = pc.fit(step, state, [batch(number) for number in range(8)], stop=pc.Threshold("train/accuracy", 0.0))
    assert end.timestamp.batch == 2
