"""The scripts in benchmarks/ run in their short form, and write rows that describe their measurements."""

import json
import math
import os
import pathlib
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import purecompose as pc


FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script with the eager backend, and return its rows."""

    def run_script(name: str, *arguments: str) -> list[dict[str, Any]]:
        given = ["--short", "--backend", "eager", "--out", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
        monkeypatch.setattr(sys, "path", [str((FOLDER / name).parent), str(FOLDER), *sys.path])
        num_threads = torch.get_num_threads()
        try:
            with torch.random.fork_rng():
                runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        finally:
            torch.set_num_threads(num_threads)
        written = json.loads((tmp_path / f"{name.replace('/', '_')}.json").read_text())
        assert written["torch"] == torch.__version__ and written["processor"]
        return written["rows"]

    return run_script


QUICK = {"unmatched", "quality/ensemble", "quality/rates", "quality/ensemble_time", "quality/schedules", "products"}
SCRIPTS: list[tuple[str, str, Callable[[list[dict[str, Any]]], bool]]] = [
    ("unmatched", "", lambda rows: [row["algorithms"] for row in rows] == ["none", "five", "none again"]),
    ("sparse_updates", "--rows 50000", lambda rows: [row["side"] for row in rows] == ["by hand", "ours"] * 3),
    ("recording", "", lambda rows: all(10 < row["checkpoints of 100,000 batches"] <= 20 for row in rows)),
    ("quality/ensemble", "", lambda rows: rows[3]["parameters"] == 8 * rows[0]["parameters"]),
    # The same training, compiled and traced.
    ("quality/rates", "", lambda rows: len(rows) == 5 and rows[2]["accuracy, %"] == rows[3]["accuracy, %"]),
    (
        "quality/ensemble_time",
        "",
        lambda rows: all(row["accuracy, %"] > row["accuracy of a member, %"] for row in rows),
    ),
    ("quality/schedules", "", lambda rows: rows[0]["trainings to its loss, of random search"] == "1.00"),
    ("quality/finetuning", "", lambda rows: rows[0]["of plain"] == rows[0]["time to it, of plain"] == "1.00"),
    ("products", "", lambda rows: rows[0]["side"] == "torch" and all(row["GFLOP/s"] > 0 for row in rows)),
    ("step_overhead", "", lambda rows: all((row["of by hand"] == 1.0) >= (row["side"] == "by hand") for row in rows)),
    ("run_overhead", "--examples 600", lambda rows: rows[-1]["what"] == "left over with a run's folder"),
    ("loader", "", lambda rows: [row["workers"] for row in rows] == [0, 2] * (len(rows) // 2)),
    # The graphs exist on one side and are removed on the other.
    ("many_leaves", "", lambda rows: all(0 < row["hollow us"] < row["whole us"] for row in rows)),
    ("layer_freezing", "", lambda rows: rows[0]["layers frozen"] == "9 of 19" and rows[0]["compiled ratio"] > 0),
    ("surgery", "--blocks 2", lambda rows: 0 < rows[0]["new_mb"] <= rows[0]["peak_mb"] <= rows[0]["allocated_mb"]),
    ("alibi_lengths", "", lambda rows: {row["loss_at_64"] is None for row in rows} == {True, False}),
    ("algorithms_cost", "--algorithm label_smoothing", lambda rows: all(row["compiled ratio"] > 0 for row in rows)),
    ("compile_time", "", lambda rows: rows[0]["from start s"] > rows[0]["from call s"] > 0),
    ("real_sizes", "--network GPT", lambda rows: len(rows) == 5 and all(row["ms a step"] > 0 for row in rows)),
    # It stops if two sides disagree about the loss.
    ("peers", "--network MLP", lambda rows: rows[0]["side"] == "by hand" and all(row["us a step"] > 0 for row in rows)),
    ("bf16", "", lambda rows: len(rows) == 8 and all(row["bf16 ms"] > 0 for row in rows)),
]
"""Scripts, their arguments, and what their rows must show."""


# torch.compile warns about its own code; and the machine may have fewer processors than there are workers.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "arguments", "is_right"),
    [pytest.param(*one, id=one[0], marks=[] if one[0] in QUICK else pytest.mark.slow) for one in SCRIPTS],
)
def test_a_script_runs_in_its_short_form(
    name: str, arguments: str, is_right: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "quality/finetuning":
        pytest.importorskip("transformers")
    monkeypatch.setattr(os, "sched_setaffinity", lambda *where: None, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    rows = run(name, *arguments.split())
    assert rows and is_right(rows), rows


def test_mutants_change_one_place_each(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    mutation = runpy.run_path(str(FOLDER / "mutation.py"))
    monkeypatch.setitem(mutation["mutants"].__globals__, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text("def f(x):\n    y = x + 1\n    return y if x < 0 else 2\n")
    assert sorted(found.change for found in mutation["mutants"](module)) == [
        "0 -> 1",
        "1 -> 2",
        "2 -> 3",
        "x + 1 -> x - 1",
        "x < 0 -> x <= 0",
        "y = x + 1 -> pass",
    ]


def test_states_that_differ_from_a_record_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(FOLDER / "same_states.py"))["main"]
    row = SimpleNamespace(examples=("label_smoothing(0.1)",), neutral=None, accepted=("vectors",))
    monkeypatch.setitem(main.__globals__, "SHIPPED", {"label_smoothing": row})
    monkeypatch.setattr(sys, "argv", ["same_states.py", str(tmp_path / "states.json")])
    main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--compare"])
    with pytest.raises(SystemExit, match="0|False"):
        main()
    assert "1 cases are the same" in capsys.readouterr().out
    row.examples = ("label_smoothing(0.2)",)
    with pytest.raises(SystemExit, match="1|True"):
        main()
    assert "label_smoothing(0.1) on vectors: gone" in capsys.readouterr().out


def test_profile_scores_integrate_the_fraction_of_workloads_near_the_fastest() -> None:
    scores = runpy.run_path(str(FOLDER / "quality" / "_score.py"))["profile_scores"]
    times = {
        "a": {"images": 10.0, "text": 9.0, "speech": math.inf, "graphs": math.inf},
        "b": {"images": 25.0, "text": 3.0, "speech": 7.0, "graphs": math.inf},
        "c": {"images": 41.0, "text": 4.5, "speech": 7.0, "graphs": math.inf},
    }
    grid = [1 + 3 * (i + 0.5) / 3000 for i in range(3000)]
    for name, own in times.items():
        best = {workload: min(other[workload] for other in times.values()) for workload in own}
        near = [sum(own[w] <= tau * best[w] < math.inf for w in own) / len(own) for tau in grid]
        assert scores(times)[name] == pytest.approx(sum(near) / len(near), abs=1e-3)
    with pytest.raises(ValueError, match="b: expected times of the workloads"):
        scores({"a": {"images": 1.0}, "b": {"text": 1.0}})


@pytest.mark.parametrize(("task", "name"), [("mnist", "mnist"), ("cifar10", "cifar10"), ("shakespeare", "text")])
def test_tasks_train_with_the_recipes_of_the_library(task: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER / "quality"), str(FOLDER), *sys.path])
    script = runpy.run_path(str(FOLDER / "quality" / f"{task}.py"))
    parts, recipe = script["recipe_parts"](script["RECIPE"]), pc.recipe(f"{name}-fast")
    assert parts.optimizer == recipe.optimizer and script["RECIPE"]["batch_size"] == recipe.batch_size
    assert script["RECIPE"].get("microbatches", 1) == recipe.microbatches
    length = script.get("length") or sys.modules["_cifar"].length
    assert f"{length(script['RECIPE'])}ba" == recipe.duration
    assert list(map(repr, parts.methods)) == list(map(repr, recipe.methods))


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Return the names of a script of the folder `quality`, without running it."""
    monkeypatch.setattr(sys, "path", [str(FOLDER / "quality"), str(FOLDER), *sys.path])
    return lambda name: runpy.run_path(str(FOLDER / "quality" / f"{name}.py"))


def test_a_record_counts_the_parameters_that_methods_add(quality: Any) -> None:
    """A table of 9 tokens and width 8, and two numbers for each of two blocks."""
    fit, net = quality("_fit"), pc.nn.models.gpt(9, 4, width=8, depth=2, num_heads=2)
    tokens = torch.arange(8).view(2, 4)
    parts = fit["Parts"]([pc.algorithms.value_embeddings()], pc.optim.sgd(0.1))
    options = {"num_batches": 1, "due": (), "metric": "loss", "seed": 0, "curve": quality("_curve")["Curve"]()}
    settings = {"precision": "fp32", "compile": False}
    batches = [(tokens, tokens)]
    found = fit["fit"](pc.nn.layers.ClassesSecond(net), parts, batches, batches, settings=settings, **options)
    assert found == fit["num_params"](net) + 9 * 8 + 2 * 2


def test_rungs_halve_to_the_members_with_the_least_loss(quality: Any) -> None:
    members = quality("_members")
    calls: list[tuple[list[int], int]] = []
    losses = {0: 0.4, 1: math.nan, 2: 0.1, 3: 0.3}

    def train(chosen: list[int], until: int) -> list[float]:
        calls.append((chosen, until))
        return [losses[index] - until / 100 for index in chosen]

    given = [members["Member"](seed, 0.1) for seed in losses]
    settings = {"rungs": [[1 / 4, 4], [1 / 2, 2], [1.0, 1]], "short": True}
    found = members["in_rungs"](given, settings, train, torch.tensor, members["seconds"]())
    assert calls == [([0, 1, 2, 3], 4), ([2, 3], 8), ([2], 16)]
    assert found.members == [given[2]] and found.losses == [pytest.approx(0.1 - 0.16)]
    assert found.outputs.tolist() == [2] and found.known <= found.seconds


def test_both_searches_for_a_schedule_train_alike(quality: Any) -> None:
    script = quality("schedules")
    s, places = {**script["SEARCH"].short, "short": True}, torch.tensor([0.6, 0.7, 0.4, 0.5])
    rates, momentum = script["schedule_of"](places, 4)
    peak, warmup, last = 0.003 * 1000**0.6, 0.01 * 50**0.7, 0.01 * 100**0.4
    assert momentum.item() == pytest.approx(0.9)
    down = [1 - (1 - last) * (elapsed - warmup) / (1 - warmup) for elapsed in (0.375, 0.625, 0.875)]
    assert rates.tolist() == pytest.approx([peak * 0.125 / warmup, *(peak * one for one in down)])

    batches = script["batches_of"](3, s)
    net = script["trained_plainly"](places, 3, s, batches)
    state = script["trained"](pc.compose(pc.loop_events), script["new_state"](3, s), places, batches)
    torch.testing.assert_close(dict(state.params), dict(net.named_parameters()))


def test_tables_without_results_are_left_out(quality: Any) -> None:
    report = quality("report")
    assert report["markdown"](report["saved_rows"]("missing")) == ""
    assert list(report["saved_rows"]("finetuning", ["side"])[0]) == ["side"]


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bits(run: Run) -> None:
    rows = run("kill_and_resume")
    total = rows[-1]
    assert total["algorithm"] == "all" and total["kills"] >= 3
    assert (total["differences"], total["half-written"], total["lost"]) == (0, 0, 0)


@pytest.mark.slow
def test_messages_counts_what_processes_send_and_hold(run: Run) -> None:
    rows = run("messages", "--sizes", "1", "2", "--methods", "none", "--side", "compiled")
    found = {(row["mode"], row["processes"]): row for row in rows}
    assert [*found] == [("data_parallel", 1), *((row["mode"], 2) for row in rows[1:])] and len(rows) == 4
    assert rows[0]["messages"] == 0
    for mode, least, most, rest in [("data_parallel", 1, 1.1, 3), ("sharded by step", 1, 1.1, 1.5)]:
        assert least <= found[mode, 2]["sent"] <= most and found[mode, 2]["rest P"] == pytest.approx(rest, abs=0.1)
    assert found["sharded by layer", 2]["sent"] > 1.2


def test_gallery_measures_programs_beside_plain_loops(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = run("gallery", "--program", "pcgrad")
    assert row["program"] == "pcgrad" and float(row["difference"]) < 1e-9
    assert row["eager of plain"] > 0 and row["compiled of plain"] > 0
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    table = runpy.run_path(str(FOLDER / "gallery.py"))["table"]
    results = json.loads((FOLDER / "results" / "gallery.json").read_text())
    assert table(results) in (FOLDER.parent / "docs" / "gallery.md").read_text()


def test_scaling_estimates_from_stored_counts_as_on_its_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    num_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(FOLDER / "scaling.py"), run_name="__main__")
    finally:
        torch.set_num_threads(num_threads)
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert rows == json.loads((FOLDER / "results" / "scaling.json").read_text())["rows"]
    page = (FOLDER.parent / "docs" / "scaling.md").read_text()
    page = "\n".join(line.strip() for line in page.splitlines())
    for table in runpy.run_path(str(FOLDER / "_scaling_picture.py"))["tables"](rows).values():
        assert table in page
