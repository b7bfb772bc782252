"""`Checkpoints(keep="log")` spreads checkpoints over a run; they hold the identity of the code."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Checkpoints, compose, loop_events
from purecompose.run.saving import comparison as code
from purecompose.run.saving.folder import all_in
from purecompose.run.saving.keeping import surplus
from tests.helpers import make_batches, make_mlp, make_state
from tests.pages import ROOT


def kept(batches: range) -> list[int]:
    """Return the batches of the checkpoints that remain when one is written at each of these batches."""
    settings, found = Checkpoints("unused", keep="log"), list[Any]()
    for batch in batches:
        found = [SimpleNamespace(index=SimpleNamespace(batch=batch, metrics={})), *found]
        gone = surplus(found, settings)
        found = [one for one in found if all(one is not other for other in gone)]
    return [one.index.batch for one in reversed(found)]


@pytest.mark.parametrize(("length", "every"), [(100_000, 100), (100_000, 37), (5_000, 10), (300, 1), (6, 1)])
def test_about_log2_of_a_run_remain_evenly_spread(length: int, every: int) -> None:
    batches = kept(range(0, length + 1, every))
    assert len(batches) <= 2 + math.ceil(math.log2(length)) and len(batches) <= 20
    assert batches[0] == 0 and batches[-1] == length // every * every
    widest = max(after - before for before, after in itertools.pairwise(batches))
    assert widest <= max(every, 4 * length / len(batches))


def test_the_start_of_the_run_is_kept_and_continues_it(tmp_path: Path) -> None:
    step, state, batches = compose(loop_events), make_state(duration="4ep"), make_batches(4)
    settings = Checkpoints(tmp_path, keep="log", every="1ba", background=False)
    end = pc.fit(step, state, batches, checkpoints=settings)
    found = [one.index.batch for one in all_in(tmp_path)[0]]
    assert found[0] == 16 and found[-1] == 0 and len(found) == 2 + 5
    assert pc.tree.diff(pc.load(tmp_path / "ep0000-ba00000000", state), step.init(state)) == []
    again = pc.fit(step, state, batches, resume=tmp_path / "ep0000-ba00000000")
    assert pc.tree.diff(again, end) == []


def test_methods_see_the_start_again_after_the_first_checkpoint(tmp_path: Path) -> None:
    def count(event: pc.Event, state: pc.State) -> pc.State:
        now = torch.zeros(()) if event is pc.Event.INIT else state.slots["starts"] + 1
        return state.replace(slots={**state.slots, "starts": now})

    step = compose(loop_events, [pc.Algorithm("starts", pc.on(pc.Event.INIT, pc.Event.FIT_START), count)])
    state, settings = make_state(), Checkpoints(tmp_path, keep="log", background=False)
    pc.fit(step, state, make_batches(4), checkpoints=settings)
    for found in all_in(tmp_path)[0]:
        end = pc.fit(step, state, make_batches(4), resume=found.path, duration="3ep")
        assert end.slots["starts"] == 1, found.path


def test_the_best_one_is_kept_too() -> None:
    settings = Checkpoints("unused", keep="log", best="eval/loss")
    found: list[Any] = [
        SimpleNamespace(index=SimpleNamespace(batch=batch, metrics={"eval/loss": abs(batch - 7)}))
        for batch in range(99, -1, -1)
    ]
    assert 7 not in [one.index.batch for one in surplus(found, settings)]


SCALE = 2.0


def scaled_loss(outputs: Any, targets: Any, reduction: str = "mean") -> Any:
    """Call another function of this module."""
    return _scaled(pc.losses.cross_entropy(outputs, targets, reduction))


def _scaled(value: Any) -> Any:
    return SCALE * value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_mlp()

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs)


def described() -> dict[str, str]:
    return code.describe_code(make_state(Net(), loss=scaled_loss), compose(loop_events))


def test_code_is_described_by_what_is_called() -> None:
    assert {name for name in described() if not name.startswith("(")} == {
        "test_log.Net",
        "test_log.Net.__init__",
        "test_log.Net.forward",
        "test_log.scaled_loss",
        "test_log._scaled",
        "helpers.make_mlp",
        "helpers._reset",
    }
    # torch and this library are known by version.
    plain = code.describe_code(make_state(), compose(loop_events, [pc.algorithms.mixup(0.2)]))
    assert [name for name in plain if not name.startswith("(")] == []


@pytest.mark.parametrize(
    ("name", "value", "changed"),
    [
        ("SCALE", 3.0, ["test_log._scaled"]),
        ("_scaled", lambda value: 2.0 * value, ["test_log._scaled", "test_log.<lambda>"]),
    ],
)
def test_changes_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, changed: list[str]) -> None:
    before = described()
    monkeypatch.setitem(globals(), name, value)
    lines = code.code_differences(before, described())
    assert [line.split(": ")[1] for line in lines] == changed


def test_a_changed_method_of_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setattr(Net, "forward", lambda self, inputs: self.layers(-inputs))
    assert "code: test_log.Net.forward: called by the run, not here" in code.code_differences(before, described())


def test_functions_inside_decorators_and_of_equal_names_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(before: Any, after: Any) -> list[str]:
        found = []
        for called in (before, after):
            monkeypatch.setitem(globals(), "_scaled", called)
            found.append(described())
        return code.code_differences(*found)

    @torch.enable_grad()
    def once(value: Any) -> Any:
        return 1.0 * value

    def twice(value: Any) -> Any:
        return 2.0 * value

    twice.__qualname__ = once.__qualname__
    assert changes(once, torch.enable_grad()(twice)) != []
    assert changes(once, once) == []
    # Two functions of the same name, of which the second one changes.
    first, second, other = (lambda value: value), (lambda value: 2 * value), (lambda value: 3 * value)
    assert changes([first, second], [first, other]) != []


def test_a_changed_decorated_method_of_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "forward", torch.enable_grad()(lambda self, inputs: self.layers(inputs)))
    before = described()
    monkeypatch.setattr(Net, "forward", torch.enable_grad()(lambda self, inputs: self.layers(-inputs)))
    (line,) = code.code_differences(before, described())
    assert line.endswith("<lambda>: changed since the run")


def test_code_of_another_python_or_an_older_checkpoint_is_not_compared() -> None:
    now = described()
    assert code.code_differences({}, now) == []
    assert code.code_differences({**now, "(python)": "3.9", "test_log.Net": "0"}, now) == []


def test_what_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(start: Any) -> list[Any]:
        if start is scaled_loss:
            raise RuntimeError("odd")
        return list(reached(start))

    reached = code.reached
    monkeypatch.setattr(code, "reached", unreadable)
    now = described()
    assert "test_log.scaled_loss" in now and "test_log._scaled" not in now


def test_hashes_are_the_same_in_another_process() -> None:
    program = "from tests.run.saving.test_log import described; import json; print(json.dumps(described()))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert json.loads(done.stdout) == described()


def test_comments_and_lines_do_not_matter() -> None:
    made: list[Any] = []
    for text in ("def f(x):\n    return x + 1\n", "# why\n\n\ndef f(x):\n    # more\n    return x + 1\n"):
        names: dict[str, Any] = {"__name__": "typed"}
        exec(compile(text, f"<cell {len(made)}>", "exec"), names)
        made.append(code._digest(names["f"]))
    assert made[0] == made[1]
