"""What the programs in `examples` share: compiled they agree, they resume to the same bits, and slices add up."""

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import tree
from tests.pages import ROOT


NAMES = ["lora", "graphs", "translation", "segmentation", "ppo", "distillation", "pcgrad"]
NOT_SLICED: dict[str, str] = {}
"""Programs without slices, and why."""
TOLERANCES = {"lora": 1e-5}
"""Of slices, which round otherwise; transformers computes the loss of a language model in float32."""


def made(name: str, *options: Any, **settings: Any) -> Any:
    """Return a program's step, state and batches."""
    if name == "lora":
        pytest.importorskip("transformers", reason="transformers is not installed")
    return importlib.import_module(f"examples.{name}").make(*options, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_agrees(name):
    step, start, batches = made(name, torch.float64)
    plain = pc.fit(step, start, batches, duration="3ba")
    step, start, batches = made(name, torch.float64)
    compiled = pc.fit(pc.compile(step, backend="eager"), start, batches, duration="3ba")
    torch.testing.assert_close(compiled.params, plain.params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_to_the_same_bits(name, tmp_path):
    step, start, batches = made(name)
    whole = pc.fit(step, start, batches, duration="6ba")
    for length in ("3ba", "6ba"):  # each as if in a process of its own
        step, start, batches = made(name)
        checkpoints = pc.Checkpoints(tmp_path, extra=getattr(batches, "fn", None))
        resumed = pc.fit(step, start, batches, duration=length, checkpoints=checkpoints, resume="auto")
    assert tree.equal(resumed, whole)


@pytest.mark.parametrize("name", NAMES)
def test_slices_agree_with_the_whole_batch(name):
    if name in NOT_SLICED:
        pytest.skip(NOT_SLICED[name])
    step, start, batches = made(name, torch.float64)
    whole = pc.fit(step, start, batches, duration="3ba")
    step, start, batches = made(name, torch.float64, microbatches=4)
    cut = pc.fit(step, start, batches, duration="3ba")
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=TOLERANCES.get(name, 1e-9))


@pytest.mark.parametrize("name", NAMES)
def test_the_program_learns_in_short_form(name):
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 80
    run = subprocess.run([sys.executable, path, "--short"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    if "skipped" not in run.stdout:
        metric, before, after = re.findall(r"(\w+) ([\d.]+) -> ([\d.]+)", run.stdout)[0]
        assert (float(after) < float(before)) == (metric == "loss")
