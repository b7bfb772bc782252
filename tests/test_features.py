"""Each cell of the column "here" in docs/features.md is tried."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, algorithms as alg
from purecompose.__main__ import main


PAGE = pathlib.Path(__file__).parents[1] / "docs/features.md"
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 4, generator=GENERATOR)
TARGETS = (INPUTS[:, 0] > 0).long()
TRIALS: dict[str, Callable[[pathlib.Path], Any]] = {}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def data(**settings: Any) -> Any:
    return pc.data.arrays(INPUTS, TARGETS, 8, **settings)


def evaluator(**settings: Any) -> pc.Evaluator:
    return pc.Evaluator(data(shuffle=False), ["accuracy", "loss"], **settings)


def new_state(duration: str = "4ep", **settings: Any) -> State:
    chosen = {"loss": pc.losses.cross_entropy, "optimizer": pc.optim.adam(0.05), "key": 0, **settings}
    return State.create(net(), duration=duration, **chosen)


def run(*methods: Any, duration: str = "4ep", step: Any = None, state: State | None = None, **settings: Any) -> State:
    step = step or pc.compose(pc.loop_events, methods)
    return pc.fit(step, state or new_state(duration), data(), duration=duration, **settings)


def same(one: State, other: State) -> bool:
    return all(torch.equal(param, other.params[name]) for name, param in one.params.items())


def accuracy(state: State) -> float:
    return float(pc.evaluate(state, data(shuffle=False), "accuracy")["accuracy"])


def trial(what: str) -> Callable[[Callable[[pathlib.Path], Any]], Callable[[pathlib.Path], Any]]:
    def add(function: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path], Any]:
        TRIALS[what] = function
        return function

    return add


@trial("training in one call")
def _(folder: pathlib.Path) -> None:
    state, history = pc.train(
        net(), data(), data(), loss=pc.losses.cross_entropy, optimizer=pc.optim.adam(0.05), duration="8ep"
    )
    assert accuracy(state) > 0.9 and len(history.series("eval/loss")[1]) == 8


@trial("training in your own loop")
def _(folder: pathlib.Path) -> None:
    step, state = pc.compose(pc.loop_events), new_state()
    for _ in range(12):
        state = step(state, (INPUTS, TARGETS))
    assert accuracy(state) > 0.8


@trial("speed-up methods that combine")
def _(folder: pathlib.Path) -> None:
    both = run(alg.mixup(), alg.label_smoothing())
    assert not same(both, run(alg.mixup())) and not same(both, run(alg.label_smoothing()))


@trial("metrics by name")
def _(folder: pathlib.Path) -> None:
    history = pc.observers.History()
    run(evaluate=evaluator(), observers=[history])
    assert 0 <= history.series("eval/accuracy")[1][-1] <= 1


@trial("early stopping")
def _(folder: pathlib.Path) -> None:
    stop = pc.EarlyStopping("eval/loss", "1ep", min_delta=10.0)
    assert run(evaluate=evaluator(), stop=stop).timestamp.epoch == 2


@trial("the k best checkpoints")
def _(folder: pathlib.Path) -> None:
    kept = pc.Checkpoints(folder, best="eval/loss", keep_best=3, keep=1, background=False)
    run(evaluate=evaluator(), checkpoints=kept, duration="6ep")
    values = [one.value for one in pc.saving.ranked(folder)]
    assert len(values) == 3 and values == sorted(values)


@trial("the best weights at the end")
def _(folder: pathlib.Path) -> None:
    kept = pc.Checkpoints(folder, best="eval/loss", background=False)
    found = run(evaluate=evaluator(), checkpoints=kept, result="best")
    best = pc.saving.best(folder)
    assert best is not None and same(found, pc.load(best, like=new_state()))


@trial("bit-identical resuming, also within an epoch")
def _(folder: pathlib.Path) -> None:
    step, kept = pc.compose(pc.loop_events, [alg.mixup(), alg.ema("2ba")]), pc.Checkpoints(folder, background=False)
    assert run(step=step, state=step.init(new_state()), checkpoints=kept, duration="4ba").timestamp.batch_in_epoch == 1
    resumed = run(step=step, state=step.init(new_state()), checkpoints=kept, resume="auto", duration="10ba")
    assert same(resumed, run(step=step, state=step.init(new_state()), duration="10ba"))


@trial("trackers")
def _(folder: pathlib.Path) -> None:
    with pc.observers.CSV(folder / "run.csv") as table, pc.observers.TensorBoard(folder) as board:
        run(observers=[table, board])
    assert "loss" in (folder / "run.csv").read_text() and list(folder.glob("events*"))
    assert pc.observers.WandB and pc.observers.MLflow  # tests/observers/test_trackers.py


@trial("search for settings")
def _(folder: pathlib.Path) -> None:
    state = new_state(optimizer=pc.optim.sgd(pc.hparam("lr", 0.1)))
    found = pc.analysis.sweep(pc.compose(pc.loop_events), state, data(), {"lr": [1e-4, 0.5]}, evaluate=evaluator())
    assert found.trials[0].values["lr"] == 0.5


@trial("learning-rate range test")
def _(folder: pathlib.Path) -> None:
    state = new_state(optimizer=pc.optim.sgd(pc.hparam("lr", 0.1)))
    found = pc.analysis.learning_rate_range(pc.compose(pc.loop_events), state, data(), num_batches=100)
    assert 0.01 < found.suggested <= 1.0


@trial("profiler")
def _(folder: pathlib.Path) -> None:
    with pc.observers.Profile(folder) as profile:
        run(observers=[profile])
    assert list(folder.rglob("*.json*"))


@trial("augmentation and mixing of batches")
def _(folder: pathlib.Path) -> None:
    images, key = torch.rand(4, 3, 8, 8), pc.random.key(0)
    assert not torch.equal(pc.functional.randaugment_batch(key, images, severity=9), images)
    assert not same(run(alg.mixup()), run())


@trial("class weights")
def _(folder: pathlib.Path) -> None:
    outputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    weighted = pc.losses.CrossEntropy(weight=[1.0, 5.0])(outputs, TARGETS[:8])
    torch.testing.assert_close(weighted, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))(outputs, TARGETS[:8]))


@trial("weights of examples")
def _(folder: pathlib.Path) -> None:
    step, weights = pc.compose(pc.loop_events), torch.zeros(24)
    weights[:8] = 1.0
    some = step(new_state(weight_field=2), (INPUTS, TARGETS, weights))
    expected = step(new_state(), (INPUTS[:8], TARGETS[:8]))
    torch.testing.assert_close(some.params["0.weight"], expected.params["0.weight"])


@trial("clipping and accumulation of gradients")
def _(folder: pathlib.Path) -> None:
    clipped = run(alg.gradient_clipping("norm", 0.01), state=new_state(optimizer=pc.optim.sgd(0.1)))
    moved = [(param - clipped.params[name]).norm() for name, param in new_state().params.items()]
    assert sum(moved) < 12 * 0.1 * 0.01 * len(moved) ** 0.5 + 1e-6
    step, start = pc.compose(pc.loop_events, [alg.gradient_accumulation(2)]), new_state()
    half = step(step.init(start), (INPUTS[:12], TARGETS[:12]))
    assert same(half, start) and not same(step(half, (INPUTS[12:], TARGETS[12:])), start)


@trial("averages of weights")
def _(folder: pathlib.Path) -> None:
    for method in (alg.ema("2ba"), alg.swa(start=0.0, end=1.0)):
        state = run(method)
        averaged = pc.to_module(state, weights=method.name)
        assert not torch.equal(averaged.get_parameter("0.weight"), state.params["0.weight"])


@trial("half precision")
def _(folder: pathlib.Path) -> None:
    state = run(state=new_state(precision="bf16"), duration="8ep")
    assert state.params["0.weight"].dtype == torch.float32 and accuracy(state) > 0.9


@trial("compilation of the whole step")
def _(folder: pathlib.Path) -> None:
    step = pc.compose(pc.loop_events, [alg.label_smoothing()])
    state = pc.compile(step, quiet=True)(step.init(new_state()), (INPUTS, TARGETS))
    torch.testing.assert_close(state.params, step(step.init(new_state()), (INPUTS, TARGETS)).params)


@trial("several processes")
def _(folder: pathlib.Path) -> None:
    # Trained in several processes in tests/transforms; here, what needs a process group asks for one.
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        pc.data_parallel(pc.compose(pc.loop_events))
    assert callable(pc.fully_sharded)


@trial("export")
def _(folder: pathlib.Path) -> None:
    state = run()
    torch.testing.assert_close(pc.to_module(state)(INPUTS), state.forward(INPUTS))
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    assert pc.saving.export_onnx(state, INPUTS, folder / "net.onnx").stat().st_size > 0


@trial("weights in the format of the Hub")
def _(folder: pathlib.Path) -> None:
    from safetensors.torch import load_file

    state, other = run(), net()
    other.load_state_dict(load_file(pc.saving.save_weights(state, folder / "model.safetensors")))
    torch.testing.assert_close(other(INPUTS), state.forward(INPUTS))


@trial("settings from a file, TOML or YAML")
def _(folder: pathlib.Path) -> None:
    (folder / "run.toml").write_text('duration = "2ba"\nmodel = "mlp"\n')
    assert main(["train", "--config", str(folder / "run.toml"), "--out", str(folder / "run")]) == 0
    assert 'duration = "2ba"' in (folder / "run/config.toml").read_text()
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    (folder / "run.yaml").write_text("duration: 3ba\nmodel: mlp\n")
    assert main(["train", "--config", str(folder / "run.yaml"), "--out", str(folder / "yaml")]) == 0
    assert 'duration = "3ba"' in (folder / "yaml/config.toml").read_text()


@trial("interactive curves of several runs")
def _(folder: pathlib.Path) -> None:
    for name in ("one", "two"):
        with pc.records.RunFolder(folder / name, {"name": name}) as kept:
            run(observers=[kept])
    page = pc.records.write_report([folder / "one", folder / "two"], folder / "both.html").read_text()
    assert "<script" in page and "one" in page and "two" in page


@trial("your own code during a run")
def _(folder: pathlib.Path) -> None:
    seen = list[Any]()
    method = pc.Algorithm("halved", pc.on(pc.Event.AFTER_TRAIN_BATCH), lambda event, state: state)
    run(method, observers=[lambda event, state: seen.append(event)])
    assert seen.count(pc.Event.EPOCH_END) == 4 and seen.count(pc.Event.BATCH_END) == 12


@trial("table of layers and parameters")
def _(folder: pathlib.Path) -> None:
    assert "Linear" in str(pc.surgery.summary(new_state(), (INPUTS, TARGETS)))


@trial("networks by the hundred, in one step")
def _(folder: pathlib.Path) -> None:
    states = [new_state(key=number) for number in range(100)]
    trained = pc.population(pc.compose(pc.loop_events), 100)(pc.stack_states(states), (INPUTS, TARGETS))
    assert trained.params["0.weight"].shape == (100, 8, 4)


@trial("recomputing any batch of a finished run")
def _(folder: pathlib.Path) -> None:
    step, kept = pc.compose(pc.loop_events), pc.Checkpoints(folder, keep="log", background=False)
    run(step=step, checkpoints=kept)
    recorded = pc.analysis.RecordedRun(folder, step, new_state(), data())
    assert same(pc.analysis.replay(recorded, 5).state, run(step=step, duration="5ba"))


@trial("pruning and quantization")
def _(folder: pathlib.Path) -> None:
    from torch.nn.utils import prune

    plain: Any = pc.to_module(run())
    prune.l1_unstructured(plain[0], "weight", amount=0.5)
    assert (plain[0].weight == 0).float().mean() == 0.5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", TRIALS)
def test_each_feature_works(what: str, tmp_path: pathlib.Path) -> None:
    TRIALS[what](tmp_path)


def test_all_rows_are_tried_and_all_columns_filled() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == [*TRIALS]
    assert {len(row) for row in rows} == {6} and all(re.search(r"`.*`", row[1]) for row in rows)
