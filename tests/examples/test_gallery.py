"""The programs of the gallery agree with plain loops, resume to the same bits, add up in slices, compile and learn.

Their pages show their code, and what they print.
"""

import functools
import inspect
import pathlib
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, compose
from tests.examples import plain_loops
from tests.examples.plain_loops import LOOPS, run, weights_of
from tests.helpers import assert_close, assert_same
from tests.pages import ROOT


SLICES_TOLERANCE = {"lora": 1e-5}
"""Differences between slices and the whole batch: transformers computes the loss of a language model in float32."""

each_program = pytest.mark.parametrize("name", LOOPS)


def made(name: str) -> tuple[pc.Step, State, Any]:
    """Return a program's step, the state before it, and the batches, in float64."""
    if name == "lora":
        pytest.importorskip("transformers", reason="transformers is not installed")
    return plain_loops.make(name, torch.float64)


@functools.cache
def trained(name: str) -> State:
    """Return a program's state after four batches."""
    step, start, batches = made(name)
    return pc.fit(step, start, batches, duration="4ba")


@each_program
def test_programs_agree_with_plain_loops(name: str) -> None:
    _, start, _ = made(name)
    end = trained(name)
    assert any(not torch.equal(end.params[key], param) for key, param in start.params.items()), "nothing was trained"
    assert_close(weights_of(end), run(name, 4), rtol=1e-9, atol=1e-9)


@each_program
def test_programs_resume_to_the_same_bits(name: str, tmp_path: pathlib.Path) -> None:
    end = None
    for duration in ("2ba", "4ba"):  # each as if in a process of its own
        step, start, batches = made(name)
        environment = getattr(batches, "fn", None)
        extra = environment if isinstance(environment, nn.Module) else None
        checkpoints = pc.Checkpoints(tmp_path, extra=extra)
        end = pc.fit(step, start, batches, duration=duration, checkpoints=checkpoints, resume="auto")
    assert_same(end, trained(name))


@each_program
def test_slices_agree_with_the_whole_batch(name: str) -> None:
    step, start, batches = made(name)
    cut = compose(step.program, step.algorithms, passes=step.passes, microbatches=4)
    end = pc.fit(cut, start, batches, duration="4ba")
    assert_close(end.params, trained(name).params, rtol=0, atol=SLICES_TOLERANCE.get(name, 1e-9))


# Quick: MAML, which differentiates inside of the traced network, under vmap.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "maml" else pytest.mark.slow) for name in LOOPS]
)
def test_compiled_programs_agree(name: str) -> None:
    step, start, batches = made(name)
    end = pc.fit(pc.compile(step, backend="eager", quiet=True), start, batches, duration="4ba")
    assert_close(weights_of(end), weights_of(trained(name)), rtol=1e-9, atol=1e-9)
    assert_close(end.metrics, trained(name).metrics, rtol=1e-9, atol=1e-9)


def page_of(name: str) -> str:
    return (ROOT / "docs" / "gallery" / f"{name}.md").read_text()


def without_indents(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


@each_program
def test_pages_show_excerpts_of_programs_and_the_plain_loops(name: str) -> None:
    excerpts, loop = re.findall(r"```python\n(.*?)```", page_of(name), re.S)
    program = without_indents((ROOT / "examples" / f"{name}.py").read_text())
    parts = without_indents(excerpts).split("\n\n...\n\n")
    assert [part for part in parts if part not in program] == []
    assert loop == inspect.getsource(LOOPS[name])


def test_the_gallery_has_a_page_and_a_picture_for_each_program() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text()
    assert re.findall(r"\(images/gallery_(\w+)\.svg\)\]\(gallery/(\w+)\.md\)", text) == [(name, name) for name in LOOPS]
    assert {path.stem for path in (ROOT / "docs" / "gallery").iterdir()} == {*LOOPS}


def elements(drawn: str) -> Counter[str]:
    """Return how many elements a picture has, except for lines: some of them mark errors."""
    found = Counter(re.findall(r"<(\w+)", drawn))
    del found["path"]
    return found


@pytest.mark.slow
@each_program
def test_pictures_are_drawn_from_the_programs(name: str, tmp_path: pathlib.Path) -> None:
    if name == "lora":
        pytest.importorskip("transformers", reason="transformers is not installed")
    images = ROOT / "docs" / "images"
    command = [sys.executable, images / "gallery.py", "--short", "--folder", tmp_path, name]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    shown = (images / f"gallery_{name}.svg").read_text()
    assert elements((tmp_path / f"gallery_{name}.svg").read_text()) == elements(shown)


@each_program
def test_programs_have_at_most_eighty_lines(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_examples_run_in_short_form_and_programs_learn(name: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", "--short"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    if name in LOOPS and "skipped" not in done.stdout:
        (shown,) = re.findall(r"```text\n\$ python [^\n]*\n(.*?)```", page_of(name), re.S)
        assert re.sub(r"[\d.]+", "0", shown) == re.sub(r"[\d.]+", "0", done.stdout)
        measure, before, after = re.findall(r"(\w+) ([\d.]+) -> ([\d.]+)", done.stdout)[0]
        assert (float(after) < float(before)) == (measure in ("loss", "distance"))
