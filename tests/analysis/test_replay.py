"""A replay computes the states of a run again, bit for bit, and refuses what would compute others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events, optim
from purecompose.analysis import RecordedRun, replay
from purecompose.errors import MismatchError
from purecompose.testing.process import in_process_group
from tests.analysis.forms import FORMS, Form, differences, differences_of_processes, digests, recorded
from tests.helpers import make_batches, make_mlp, make_state


@pytest.mark.parametrize("name", FORMS)
def test_states_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    run, states = recorded(FORMS[name](), tmp_path)
    before = digests(tmp_path)
    assert differences(run, states, 3) == []
    assert digests(tmp_path) == before


@pytest.mark.slow
def test_states_are_those_of_a_run_of_two_processes(tmp_path: Path) -> None:
    assert in_process_group(differences_of_processes, 2, tmp_path, 50) == [[], []]


def small(**options: object) -> Form:
    return Form(compose(loop_events, [alg.ema("3ba")]), make_state(**{"duration": "2ep", **options}), make_batches(6))


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return recorded(small(), tmp_path / "run")[0]


def test_the_point_is_a_number_or_a_time(run: RecordedRun) -> None:
    assert [replay(run, at).state.timestamp.batch for at in (0, 7, "7ba", "1ep", "0.75dur")] == [0, 7, 7, 6, 9]
    assert str(replay(run, 7)) == "batch 7 (epoch 1), 1 batch after ep0001-ba00000006: bit-identical to the run"
    for at, words in (
        (13, "recorded up to batch 12, its last checkpoint, not to 13ba"),
        ("-1ba", "expected a point of the run"),
        ("3sec", "expected a point of the run"),
        ("soon", "cannot read the time"),
    ):
        with pytest.raises(ValueError, match=words):
            replay(run, at)


def test_a_run_without_its_start_begins_with_its_first_checkpoint(tmp_path: Path) -> None:
    form = small()
    pc.fit(*form, checkpoints=pc.Checkpoints(tmp_path, every="3ba", keep=2, background=False))
    run = RecordedRun(tmp_path, *form)
    assert replay(run, "10ba").num_batches == 1
    with pytest.raises(ValueError, match=r"no checkpoint before 8ba: the first one is of 9ba; Checkpoints\(keep="):
        replay(run, 8)


def test_observers_see_events_and_batches(run: RecordedRun) -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def __call__(self, event: pc.Event, state: pc.State) -> None:
            if event is pc.Event.BATCH_END:
                self.seen.append(state.timestamp.batch)

        def see_batch(self, state: pc.State, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
            number = next(i for i, one in enumerate(run.data) if torch.equal(one[0], batch[0]))
            self.seen.append((state.timestamp.batch, number))

    observer = Observer()
    replay(run, 8, observers=observer)
    assert observer.seen == [(6, 0), 7, (7, 1), 8]


def _changed_net() -> pc.State:
    return make_state(make_mlp(dropout=0.5))


def loss_of_other_code(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return 1.5 * pc.losses.cross_entropy(outputs, targets, reduction)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda form: form._replace(data=[(inputs + 1, targets) for inputs, targets in form.data]), "data: content: "),
        (lambda form: form._replace(data=form.data[:5]), "batches_per_epoch: 6 in the run, 5 here"),
        (lambda form: form._replace(state=_changed_net()), "model: 2: Dropout"),
        (lambda form: form._replace(state=make_state(optimizer=optim.sgd(0.2, momentum=0.9))), "optimizer: "),
        (lambda form: form._replace(state=make_state(loss=loss_of_other_code)), "loss: "),
        (lambda form: form._replace(step=compose(loop_events, [alg.ema("4ba")])), "algorithm ema: "),
        (lambda form: form._replace(step=compose(loop_events, [alg.ema("3ba")], microbatches=2)), "microbatches: 1"),
    ],
)
def test_other_data_or_code_are_refused_by_name(run: RecordedRun, change: Callable[[Form], Form], named: str) -> None:
    before = digests(Path(run.path))
    other = RecordedRun(run.path, *change(Form(run.step, run.state, run.data)))
    with pytest.raises(MismatchError, match="is of another run") as caught:
        replay(other, 8)
    assert any(named in line for line in caught.value.differences), caught.value.differences
    assert digests(Path(run.path)) == before


def test_without_strict_differences_are_warnings(run: RecordedRun) -> None:
    data = [(inputs + 1, targets) for inputs, targets in run.data]
    with pytest.warns(pc.errors.CheckpointWarning, match="data: content"):
        found = replay(RecordedRun(run.path, run.step, run.state, data, strict=False), 8)
    assert not pc.tree.equal(found.state, replay(run, 8).state)
    assert str(found).endswith(": with strict=False, perhaps not bit-identical to the run")


def test_what_checkpoints_do_not_know_is_found_by_the_recorded_losses(tmp_path: Path) -> None:
    hidden = {"scale": torch.ones(())}

    def scaled(event: pc.Event, state: pc.State) -> pc.State:
        return state.replace(inputs=state.inputs * hidden["scale"])

    method = pc.Algorithm("scaled", pc.on(pc.Event.AFTER_DATALOADER), scaled)
    form = small()._replace(step=compose(loop_events, [method]))
    with pc.records.RunFolder(tmp_path / "run") as folder:
        folder.begin(form.step, form.state)
        pc.fit(
            *form, observers=folder.observer, checkpoints=folder.checkpoints(keep="log", every="5ba", background=False)
        )
    run = RecordedRun(tmp_path / "run", *form)
    before = digests(tmp_path)
    assert replay(run, 8).state.timestamp.batch == 8
    hidden["scale"] = torch.full((), 1.5)
    with pytest.raises(MismatchError, match="the replay is not the run: loss of batch 6: "):
        replay(run, 8)
    assert digests(tmp_path) == before


def test_rules_that_read_evaluations_act_again(tmp_path: Path) -> None:
    state = make_state(optimizer=optim.sgd(pc.hparam("lr", 0.5)), duration="4ep")
    form = Form(compose(loop_events), state, make_batches(4))
    rules = {
        "evaluate": pc.Evaluator(make_batches(2), {"cost": pc.metrics.mean_loss()}, every="1ba"),
        "stop": pc.EarlyStopping("eval/cost", "12ba"),
        "adjust": pc.ReduceOnPlateau("eval/cost", patience="1ba"),
    }
    checkpoints = pc.Checkpoints(tmp_path, keep="log", every="5ba", background=False)
    states = {state.timestamp.batch: state for state in pc.training(*form, checkpoints=checkpoints, **rules)}
    run = RecordedRun(tmp_path, *form, **rules)
    assert float(states[14].hparams["lr"]) < 0.5
    for batch in (7, 14):
        assert pc.tree.diff(replay(run, batch).state, states[batch]) == []


def test_a_run_that_was_continued_for_longer_has_two_lengths(tmp_path: Path) -> None:
    form = small(optimizer=optim.adam(0.1 * pc.schedule.cosine()))
    checkpoints = pc.Checkpoints(tmp_path, keep="log", every="4ba", background=False)
    states = {one.timestamp.batch: one for one in pc.training(*form, checkpoints=checkpoints)}
    longer = pc.training(*form, checkpoints=checkpoints, duration="3ep", resume="auto")
    with pytest.warns(UserWarning, match="the run is 3ep long, and was 2ep"):
        states |= {one.timestamp.batch: one for one in longer if one.timestamp.batch > 12}
    run = RecordedRun(tmp_path, *form)
    for batch in (3, 11, 14, 17):
        assert pc.tree.diff(replay(run, batch).state, states[batch]) == [], batch


class Stream:
    """Data that continue where they were left, also in the middle of an epoch."""

    def __init__(self) -> None:
        self.batches = make_batches(4)
        self.number = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        while self.number < len(self):
            self.number += 1
            yield self.batches[self.number - 1]
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_data_with_a_position_are_at_their_start_in_each_replay(tmp_path: Path) -> None:
    state, step = make_state(duration="2ep"), compose(loop_events)
    settings = pc.Checkpoints(tmp_path, keep="log", every="3ba", background=False)
    states = {now.timestamp.batch: now for now in pc.training(step, state, Stream(), checkpoints=settings)}
    run = RecordedRun(tmp_path, step, state, Stream())
    for at in (2, 2, 5, 1, 7, 2):
        assert pc.tree.equal(replay(run, at).state.params, states[at].params)
