"""HTML of plans, traces, states and law reports; the notebooks of the documents run, and show it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose.testing.report import Outcome, Report, Status
from tests.helpers import make_batch, make_state, noise
from tests.markup import HOSTILE, Checker, parsed
from tests.pages import ROOT


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def contents(markup: str) -> Checker:
    """Return the contents of HTML without its style, and with spaces between cells."""
    return parsed(re.sub(r"(?=</t[hd]>)", " ", re.sub(r"<style>.*?</style>", "", markup, flags=re.S)))


def page_of(shown: Any) -> Checker:
    return contents(shown._repr_html_())


def test_a_plan_and_a_trace_have_the_words_of_their_text() -> None:
    step = pc.compose(pc.loop_events, [noise("a"), noise("b", when=pc.after(0.5))])
    state = step.init(make_state(duration="4ba"))
    plan, (_, trace) = step.plan(state), pc.traced(step)(state, make_batch())
    for shown in (plan, trace, plan._replace(rows=(), warnings=("look here",))):
        assert sorted(re.findall(r"\w+", page_of(shown).text)) == sorted(re.findall(r"\w+", str(shown)))


def test_a_state_shows_its_time_and_the_shapes_of_its_fields() -> None:
    optimizer = pc.optim.sgd(0.1, momentum=0.9)
    state = make_state(torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)]), optimizer=optimizer)
    text = page_of(state.replace(timestamp=state.timestamp.replace(batch=7))).text
    assert "at batch 7" in text and "cpu" in text
    assert re.search(r"params 6 18 float32 0.weight \(2, 2\), 0.bias \(2,\), 1.weight \(2, 2\), and 3 more", text)
    assert re.search(r"key 1 2 int64 \(2,\)", text)


def test_texts_of_a_report_are_escaped() -> None:
    outcome = Outcome(law="a_law", status=Status.BROKEN, reason=HOSTILE, rows=((HOSTILE, HOSTILE),))
    page = page_of(Report(algorithm=HOSTILE, outcomes=(outcome,), tasks=("one",), refused={HOSTILE: HOSTILE}))
    assert page.text.count("alert('x')") == 5 and "\x00" not in page.text
    assert {tag for tag, _ in page.tags} == {"div", "pre"} and "BROKEN" in page.text


def test_notebooks_have_no_outputs() -> None:
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Run a notebook as Jupyter does, and return the outputs of its cells by their types."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = [line for output in outputs if output.output_type == "stream" for line in output.text.splitlines()]
    assert [
        line for line in printed if line and " ep  loss " not in line
    ] == []  # only lines of Progress, and no warnings
    return [dict(output.data) for output in outputs if output.output_type != "stream"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's packages
def test_the_tutorial_shows_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed(ROOT / "docs" / "notebooks" / "tutorial.ipynb", monkeypatch)
    pages = [contents(one["text/html"]) for one in outputs if "text/html" in one]
    assert len(pages) == 7
    assert any("ok:" in page.text for page in pages) and any("NOT OK" in page.text for page in pages)
    assert [one["text/plain"] for one in outputs if "text/html" not in one][0] == "True"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's packages
def test_the_gallery_shows_a_picture_for_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed(ROOT / "docs" / "notebooks" / "gallery.ipynb", monkeypatch)
    assert len({one["image/png"] for one in outputs if "image/png" in one}) == 10
