"""Variants: their number, building them ahead, listing and limiting them; and short batches, which add none."""

from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, every, loop_events, tree
from purecompose.errors import VariantLimitError
from tests.helpers import changing, make_batch, make_batches, make_state, noise
from tests.transforms.compilation.compile_helpers import (
    LIBRARY,
    assert_runs_agree,
    average,
    compiled,
    made,
    scaling,
    sharpness,
)


SCHEDULES: dict[str, list[Algorithm]] = {
    "always": [noise()],
    "every": [scaling("a", Event.BATCH_END, 0.9, 3)],
    "before": [scaling("a", Event.AFTER_DATALOADER, 2) for _ in range(1)],
    "windows": [
        changing("a", Event.BEFORE_FORWARD, lambda s: s.replace(inputs=s.inputs * 2), when=pc.between(0.25, 0.5)),
        changing("b", Event.BATCH_END, lambda s: s, when=pc.before("2ba") | pc.after(0.9)),
        changing("c", Event.BATCH_END, lambda s: s, when=pc.epoch_ends()),
    ],
    "two sides": [sharpness(when=every(5)), average(when=every(4))],
    "selective": [pc.algorithms.selective_backprop(0.3, 0.9, keep=0.5, full_every=2), average(when=every(4))],
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("methods", SCHEDULES.values(), ids=SCHEDULES)
def test_warmup_builds_what_the_run_uses_and_no_more(
    methods: list[Algorithm], donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fast = made(methods, donate=donate)
    state = step.init(make_state(duration="12ba", batches_per_epoch=4))
    before = state.copy()
    built = fast.warmup(state, make_batch())
    assert tree.equal(before, state)
    assert len(built) >= 1 and not any(variant.hits for variant in built)
    monkeypatch.setattr(LIBRARY, "capture", None)  # would fail if anything more was traced
    assert_runs_agree(step, fast, state, make_batches(12))
    assert all(variant.hits for variant in fast.variants())


def test_warmup_takes_batches_of_several_forms() -> None:
    _, fast = made()
    fast.warmup(make_state(duration="4ba"), make_batch(), make_batch(size=3), make_batch(size=3))
    assert [variant.batch for variant in fast.variants()] == ["8x4 8", "3x4 3"]


def test_warmup_neither_spends_nor_changes_a_leased_state() -> None:
    step, fast = made([scaling("a", Event.BATCH_END, 0.9, 3)])
    state = fast(make_state(duration="12ba"), make_batch())
    kept = state.copy()
    fast.warmup(state, make_batch(1))
    count = len(fast.variants())
    for batch in make_batches(6):
        state = fast(state, batch)
    assert len(fast.variants()) == count
    assert pc.tree.equal(kept.key, state.key)
    for batch in make_batches(6):
        kept = step(kept, batch)
    assert not list(tree.differences(kept, state, tolerance=1e-5))


def test_warmup_without_a_duration_is_of_one_epoch() -> None:
    _, fast = made()
    assert len(fast.warmup(make_state(duration=None, batches_per_epoch=3), make_batch())) == 1


@pytest.mark.parametrize("donate", [True, False])
def test_short_batches_run_the_composed_step(donate: bool) -> None:
    step, fast = made([noise()], eager_below=8, donate=donate)
    sizes = [8, 8, 5, 8, 7, 1, 8, 9]
    assert_runs_agree(step, fast, make_state(), [make_batch(i, size) for i, size in enumerate(sizes)])
    assert [variant.batch for variant in fast.variants()] == ["8x4 8", "9x4 9"]
    assert [variant.hits for variant in fast.variants()] == [4, 1]


def test_short_batches_of_a_population_are_counted_by_examples() -> None:
    population = pc.population(made()[0], 2, batches="each")
    fast = pc.compile(population, backend="eager", quiet=True, eager_below=4)
    states = pc.stack_states([make_state(), make_state()])
    for size, num in ((3, 0), (4, 1)):
        fast(states, tuple(torch.stack([member, member]) for member in make_batch(size=size)))
        assert len(fast.variants()) == num


def test_a_run_whose_length_is_not_known_is_not_built_ahead() -> None:
    _, fast = made()
    for duration in ("3ep", None):
        with pytest.raises(ValueError, match="length in batches is not known: give State.create batches_per_epoch"):
            fast.warmup(make_state(duration=duration), make_batch())
    with pytest.raises(ValueError, match="the batch has no tokens, so a run of 8tok never ends"):
        fast.warmup(make_state(duration="8tok"), make_batch())


# The table


def test_the_table_says_that_nothing_is_compiled() -> None:
    _, fast = made()
    assert str(fast.variants()) == "nothing is compiled yet" and fast.variants() == ()


def test_the_table_lists_parts_shapes_and_actors() -> None:
    step, fast = made([sharpness(when=every(2)), average(when=every(3)), noise()])
    state = step.init(make_state())
    for batch in make_batches(6):
        state = fast(state, batch)
    text = str(fast.variants())
    head, line, *rows = text.splitlines()
    assert head.split() == ["part", "batch", "operations", "trace", "s", "compile", "s", "hits", "acting"]
    assert set(line) == {"-", " "}
    unwrapped = " ".join(text.split())
    assert "sam at" in unwrapped and "ema at" in unwrapped and "8x4 8" in unwrapped
    acting = {place for variant in fast.variants() for place in variant.acting}
    assert acting == {"sam at Event.AFTER_TRAIN_BATCH", "ema at Event.BATCH_END", "noise at Event.AFTER_DATALOADER"}
    assert len(rows) >= 4
    totals = {segment: sum(v.hits for v in fast.variants() if v.segment == segment) for segment in (0, 1)}
    assert totals == {0: 6, 1: 6}
    assert all(v.nodes > 10 and v.trace_seconds > 0 and v.compile_seconds >= 0 for v in fast.variants())


def test_compilations_are_announced_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    fast = compiled(compose(loop_events, [noise()]), quiet=False)
    state = fast(make_state(), make_batch())
    text = capsys.readouterr().err
    assert text.count("purecompose: compiling") == 1 and text.count("\n") == 1
    assert "noise at Event.AFTER_DATALOADER" in text and "8x4 8" in text and "operations" in text
    fast(state, make_batch(1))
    assert capsys.readouterr() == ("", "")


def test_a_short_last_batch_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names each remedy, and each of them is one."""
    inputs, targets = make_batch(size=20)

    def said(**options: Any) -> tuple[str, int]:
        data = pc.data.arrays(inputs, targets, batch_size=8, drop_last=options.pop("drop_last", False))
        fast = compiled(compose(loop_events), quiet=False, **options)
        pc.fit(fast, make_state(duration="3ep"), data)
        lines = [line for line in capsys.readouterr().err.splitlines() if "fewer than" in line]
        assert len(lines) <= 1
        return "".join(lines), len(fast.variants())

    text, num = said()
    assert num == 2 and "a batch has 4 examples, fewer than the 8 before" in text
    assert "drop_last=True" in text and "compile(eager_below=8)" in text and "compile(dynamic=True)" in text
    for options in ({"drop_last": True}, {"eager_below": 8}, {"dynamic": True}):
        assert said(**options) == ("", 1)
    longer = compiled(compose(loop_events), quiet=False)
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(4), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    state = make_state(net)
    for length in (9, 6):  # as many examples, of another length
        state = longer(state, (torch.ones(8, 1, length), targets[:8]))
    assert len(longer.variants()) == 2 and "fewer than" not in capsys.readouterr().err


# The limit


def run(fast: Any, state: State, batches: list[Any]) -> State:
    for batch in batches:
        state = fast(state, batch)
    return state


def test_too_many_schedules_name_the_algorithm() -> None:
    names = [("often", 2), ("seldom", 7)]
    methods = [noise(), *(scaling(name, Event.BATCH_END, 0.9, period) for name, period in names)]
    _, fast = made(methods, max_variants=2)
    with pytest.raises(VariantLimitError, match="often") as caught:
        run(fast, make_state(), make_batches(20))
    text = str(caught.value)
    assert "max_variants=2" in text and "noise" not in text and "torch.where" in text and "step.variants()" in text
    assert len(fast.variants()) == 2


def test_too_many_signatures_of_batches_name_the_batch() -> None:
    step, fast = made([noise()], max_variants=3)
    state = make_state()
    for size in (2, 3, 4):
        state = fast(state, make_batch(size=size))
    with pytest.raises(VariantLimitError, match="eager_below") as caught:
        fast(state, make_batch(size=5))
    assert "2x4 2" in str(caught.value) and "noise" not in str(caught.value)
    kept = state.copy()
    after = fast(state, make_batch(size=4))  # the state and the existing variants are still usable
    assert not list(tree.differences(step(kept, make_batch(size=4)), after.unleased(), tolerance=1e-5))


def test_the_refused_signature_counts_towards_the_limit() -> None:
    _, fast = made(max_variants=1)
    state = fast(make_state(), make_batch(size=8))
    with pytest.raises(VariantLimitError, match="2 forms .*8x4 8; 3x4 3"):
        fast(state, make_batch(size=3))


def test_sizes_that_could_not_be_left_open_have_a_reason() -> None:
    def by_number(state: State) -> State:
        if isinstance(state.num_examples, torch.SymInt):
            raise TypeError("an operation takes only numbers")
        return state

    _, fast = made([changing("ask", Event.BATCH_START, by_number)], dynamic=True, max_variants=1)
    state = fast(make_state(), make_batch(size=8))
    with pytest.raises(VariantLimitError, match="not be left open, because of TypeError: an operation takes"):
        fast(state, make_batch(size=3))


def test_too_many_variants_by_names_in_a_batch_blame_the_batch() -> None:
    _, fast = made(max_variants=4)
    batches = [
        {"x": x, "y": y, "ids": [f"{number}-{i}" for i in range(8)]} for number, (x, y) in enumerate(make_batches(9))
    ]
    with pytest.raises(VariantLimitError, match="ids, names") as caught:
        run(fast, make_state(input_field="x", target_field="y"), batches)
    del caught
