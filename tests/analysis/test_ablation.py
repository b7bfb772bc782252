"""An ablation trains what it says, with common random numbers, in any mode, and continues where it was stopped."""

import json
import pathlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, on
from purecompose.analysis import ablate
from purecompose.analysis.ablation import Trainer
from purecompose.analysis.effects import Ablation
from tests.analysis.problems import evaluator, make_step, new_state, train_data


METHODS = (alg.mixup(0.4), alg.label_smoothing(0.2), alg.gradient_clipping("norm", 0.1))


def run(methods: Any = METHODS, **options: Any) -> Ablation:
    given: dict[str, Any] = {"evaluate": evaluator(), "metric": "eval/loss", "seeds": 5, **options}
    return ablate(given.pop("make_step", make_step), given.pop("state", new_state), train_data(), methods, **given)


def values_of(ablation: Ablation) -> dict[str, tuple[float, ...]]:
    return {cell.name: cell.values for cell in ablation.cells}


def test_each_value_is_that_of_a_run_by_hand() -> None:
    """So a method that is left out changes no draw, batch or weight of the others."""
    found = run(sequential=True)
    for cell in found.cells:
        methods = [method for method in METHODS if method.name in cell.methods]
        for seed in (0, 3):
            state = pc.fit(make_step(methods), new_state(seed), train_data())
            assert cell.values[seed] == pc.evaluate(state, evaluator().data)["loss"]
    assert found.effects[0].differences[3] == found.cells[0].values[3] - found.cells[1].values[3]


def test_a_population_gives_the_values_of_single_runs() -> None:
    together, apart = run(), run(sequential=True)
    for name, values in values_of(together).items():
        torch.testing.assert_close(values, values_of(apart)[name], rtol=1e-4, atol=1e-6)


def test_all_cells_of_a_seed_have_the_weights_that_a_network_draws_itself() -> None:
    def unseeded(seed: int) -> State:
        net = torch.nn.Linear(8, 2)
        return State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), key=seed, duration="2ep")

    before = torch.get_rng_state()
    found = run([alg.label_smoothing(0.0, name="null")], state=unseeded)
    assert found.effects[0].differences == (0.0,) * 5
    assert len(set(found.cells[0].values)) == 5
    assert torch.equal(before, torch.get_rng_state())


def test_weights_that_a_network_draws_itself_depend_on_the_seed_only() -> None:
    drawn: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def unseeded(seed: int) -> State:
        net = torch.nn.Linear(8, 2)
        drawn[seed].append(net.weight.detach().clone())
        return State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), key=seed, duration="2ep")

    run([alg.mixup(0.4)], state=unseeded, seeds=2, report=lambda line: torch.rand(1))
    for weights in drawn.values():
        assert len(weights) >= 2 and all(torch.equal(weights[0], other) for other in weights)
    assert not torch.equal(drawn[0][0], drawn[1][0])


@pytest.mark.parametrize("sequential", [True, False])
def test_a_shuffled_evaluation_gives_all_cells_of_a_seed_the_same_batches(sequential: bool) -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*evaluator().data, strict=True))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    shuffled = pc.Evaluator(loader, num_batches=2)
    found = run([alg.label_smoothing(0.0, name="null")], evaluate=shuffled, sequential=sequential)
    assert found.effects[0].differences == (0.0,) * 5
    end = pc.fit(make_step([]), new_state(3), train_data())
    expected = pc.evaluate(end, loader, num_batches=2)["loss"]
    assert values_of(found)["none"][3] == pytest.approx(expected, rel=1e-4)


def unmappable() -> Algorithm:
    """A method that vmap refuses, since it reads a number, in the second half of a run."""

    def apply(event: Event, state: State) -> State:
        assert state.loss is not None
        return state.replace(loss=state.loss if state.loss.item() > -1 else -state.loss)

    return Algorithm("reads", on(Event.AFTER_LOSS) & pc.after(0.5), apply)


def test_an_error_in_a_population_is_raised_and_says_how_to_train_one_by_one() -> None:
    with pytest.raises(RuntimeError, match=r"\.item\(\)") as caught:
        run([unmappable()])
    assert "ablate(sequential=True)" in caught.value.__notes__[-1]
    assert len(run([unmappable()], sequential=True).effects) == 1


def test_a_method_with_neutral_settings_makes_no_difference_at_all() -> None:
    found = run([*METHODS, alg.label_smoothing(0.0, name="null")])
    null = found.effects[-1]
    assert null.differences == (0.0,) * 5
    assert null.verdict == "no difference" and null.seeds_needed == 0


def scaled(name: str, factor: float) -> Algorithm:
    """A method that scales gradients: with a small factor nothing is learnt."""

    def apply(event: Event, state: State) -> State:
        assert state.grads is not None
        return state.replace(grads={name: factor * grad for name, grad in state.grads.items()})

    return Algorithm(name, on(Event.AFTER_TRAIN_BATCH), apply)


def worse() -> Algorithm:
    return scaled("worse", 1e-3)


def test_verdicts_follow_the_direction_of_the_metric() -> None:
    by_loss, by_accuracy = (run([worse()], metric=name).effects[0] for name in ("eval/loss", "eval/accuracy"))
    assert by_loss.interval is not None and by_accuracy.interval is not None
    assert by_loss.interval.low > 0 > by_accuracy.interval.high
    assert by_loss.verdict == by_accuracy.verdict == "worse"


def test_a_table_says_what_is_undecided_and_how_many_seeds_it_needs() -> None:
    found = run([alg.label_smoothing(0.001), worse()], metric="eval/accuracy")
    lines = str(found).splitlines()
    assert lines[0] == ("eval/accuracy of 4 subsets of 2 methods, 5 seeds each; simultaneous 95% intervals")
    assert any(line.startswith("worse ") and line.endswith("worse") for line in lines)
    few = " ".join(str(run(METHODS[:1], seeds=3)).split())
    assert "too few" in few and "2 more seeds" in few


def test_runs_that_end_without_a_number_are_named() -> None:
    found = run([alg.mixup(0.4), scaled("spoils", float("nan"))])
    assert [effect.verdict for effect in found.effects] == ["not finite", "not finite"]
    assert "runs without a finite eval/loss: all, spoils" in str(found)


def test_an_interrupted_ablation_continues(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"methods": METHODS[:1], "folder": tmp_path / "runs"}
    trained: list[tuple[str, list[int]]] = []
    train = Trainer.train

    def stops(self: Trainer, subset: Any, name: str, seeds: Any) -> list[float]:
        trained.append((name, seeds))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(self, subset, name, seeds)

    monkeypatch.setattr(Trainer, "train", stops)
    with pytest.raises(KeyboardInterrupt):
        run(seeds=[0, 1], **options)
    found = run(seeds=[0, 1], **options)
    assert trained == [("all", [0, 1]), ("none", [0, 1]), ("none", [0, 1])]
    more = run(seeds=[0, 1, 2], **options)
    assert trained[3:] == [("all", [2]), ("none", [2])]
    assert {name: values[:2] for name, values in values_of(more).items()} == values_of(found)
    assert (tmp_path / "runs" / "all" / "seeds-0-to-1" / "report.html").exists()
    assert str(more) == (tmp_path / "runs" / "ablation.txt").read_text().rstrip("\n")


def test_another_ablation_in_the_folder_is_refused(tmp_path: pathlib.Path) -> None:
    run(METHODS[:1], seeds=2, folder=tmp_path / "first")
    with pytest.raises(ValueError, match=r"methods: mixup\(alpha=0\.4.* in the folder, label_smoothing"):
        run(METHODS[1:2], seeds=2, folder=tmp_path / "first")
    with pytest.raises(ValueError, match=r"methods that are never left out: none in the folder, sam\("):
        step = lambda methods: make_step([*methods, alg.sam(0.1)])  # noqa: E731
        run(METHODS[:1], make_step=step, seeds=3, folder=tmp_path / "first")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and has no ablation.json"):
        run(METHODS[:1], seeds=2, folder=tmp_path / "other")
    assert json.loads((tmp_path / "first" / "ablation.json").read_text())["cells"].keys() == {"all", "none"}
