"""The code of the pages in docs/ runs with the printed results, and their links lead to existing files."""

import contextlib
import importlib
import inspect
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
import warnings
from typing import Any, get_type_hints

import pytest
import torch
from PIL import Image

import purecompose as pc
from purecompose.algorithms import FACTORIES, GROUPS
from purecompose.schedule import Scalar
from tests.pages import ROOT, run_page


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)")
CARD_HEADS = [
    "When to use it",
    "Settings",
    "Together with other methods",
    "Cost",
    "What differs from Composer",
    "Source",
]
CARDS = {page.stem: page for page in (ROOT / "docs" / "algorithms").glob("*.md")}
# One of them is a function of the state.
METHODS = {**FACTORIES, "scale_schedule": pc.algorithms.scale_schedule}


def test_methods_are_grouped_as_on_their_page() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for group, factories in GROUPS.items():
        section = text.partition(f"## {group}\n")[2].partition("\n## ")[0]
        listed = set(re.findall(r"\(algorithms/(\w+)\.md\) \|", section))
        assert listed - {"scale_schedule"} == {factory.__name__ for factory in factories}


def test_methods_act_where_their_page_says() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| \[`(\w+\(.*?\))`\]\(algorithms/\w+\.md\) \| (.*?)(?:, and .*?)? \|", text, re.M)
    listed = {call: events for call, events in rows if not call.startswith("scale_schedule")}
    acting = {call: eval(call, dict(vars(pc.algorithms))).events for call in listed}  # noqa: S307
    assert listed == {call: ", ".join(event.name for event in events) for call, events in acting.items()}
    assert len(listed) == len(FACTORIES)


@pytest.fixture(scope="module")
def own_method() -> tuple[dict[str, Any], str]:
    """Run the page on your own methods, whose last block asserts the laws; return its names and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = run_page("own_method.md")
    return names, printed.getvalue()


@pytest.mark.slow
def test_the_page_on_your_own_methods(own_method: tuple[dict[str, Any], str]) -> None:
    names, printed = own_method
    assert printed.count("('gradient_noise', 'clip')\n") == 2
    assert (
        "('selective_backprop', 'mixup', 'early_dropout')\n('selective_backprop', 'early_dropout', 'mixup')" in printed
    )
    assert "late at Event.BEFORE_FORWARD: a Grad with a host algorithm in it" in printed
    assert names["lengths"] == [8] * 4 + [10] * 4 + [12] * 4 + [14] * 4


@pytest.mark.slow
def test_the_pages_scope_is_truncated_backpropagation_through_time(own_method: tuple[dict[str, Any], str]) -> None:
    names, _ = own_method
    net, (inputs, targets) = names["Recurrent"](), names["sequences"]
    net.load_state_dict({**names["untrained"].params, **names["untrained"].buffers})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.hidden.zero_()
    for x, y in zip(inputs.split(4, dim=1), targets.split(4, dim=1), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert "length=4" in repr(names["truncated"].program)
    for name, param in net.named_parameters():
        torch.testing.assert_close(names["end"].params[name], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_page_on_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    run_page("architecture.md")
    printed, page = capsys.readouterr().out, (ROOT / "docs" / "architecture.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert shown in printed and re.search(r"AFTER_UPDATE +0 +unit_rows +no other acts there\n", printed)
    comments = re.findall(r"print\(error\)  # (.*?)(?: \.\.\.)?\n", page)
    assert len(comments) == 2 and [text for text in comments if text not in printed] == []


def test_files_that_the_page_on_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.S)
    folders = [ROOT, ROOT / "purecompose", ROOT / "purecompose" / "transforms" / "compilation"]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", prose)
    assert len(named) > 40
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def without_numbers(text: str) -> str:
    """Return only words and punctuation, on one line: values and line breaks differ between machines."""
    return " ".join(re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "0", text).split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # while Inductor is imported
def test_the_tutorial(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")  # as without a terminal; a worker process may appear to have one
    names = run_page("tutorial.md")
    printed = without_numbers(capsys.readouterr().out)
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.S)
    shown = [part for block in blocks for part in block.split("...\n")]
    assert len(shown) == 8 and [part for part in shown if without_numbers(part) not in printed] == []
    assert names["report"].ok and "True {" in printed and "bit-identical to the run" in printed


@pytest.mark.slow
def test_the_page_on_laws(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("laws.md")
    printed = without_numbers(capsys.readouterr().out)
    page = (ROOT / "docs" / "laws.md").read_text()
    reports = re.findall(r"```text\n(.*?)```", page, re.S)
    assert len(reports) == 3
    for report in reports:
        assert without_numbers(report) in printed, report
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)
    assert rows == [(law.name, law.promise) for law in names["LAWS"]]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # while Inductor is imported
def test_the_page_on_training(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("training.md")
    printed = capsys.readouterr().out
    assert "3.0/3 ep" in printed  # the progress observer
    assert re.search(r"\n5 30\n32 8\n\{'loss': [\d.]+\} in epoch [123]\n12\n12\n16\n8\n", printed)
    assert names["best"].timestamp.batch in (6, 12, 18)
    assert names["epochs_seen"] == [1, 2, 3]
    batch_numbers, accuracies = names["history"].series("eval/accuracy")
    assert batch_numbers == [6, 12, 18] and accuracies[-1] > 0.7
    assert len(names["losses"]) == 18 and names["outputs"].shape == (48, 2)
    assert isinstance(names["net"], torch.nn.Sequential)
    assert names["slower"].hparams["lr"].item() == pytest.approx(0.01)


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")  # the line of the forward pass
def test_the_page_on_analysis(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("analysis.md")
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "analysis.md").read_text()
    shown = [text for text in re.findall(r"print\(.*\) +# (.*)$", page, re.M) if not text.startswith("None")]
    assert len(shown) == 4 and [text for text in shown if text not in printed] == []
    assert printed.endswith("None\n")


@pytest.mark.slow
def test_the_program_for_two_processes(tmp_path: pathlib.Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "processes.md").read_text(), re.S)
    (tmp_path / "two.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(torchrun, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("2 processes: {'accuracy': 0.9") and done.stdout.endswith("agrees with one process\n")


@pytest.mark.slow
def test_the_page_on_experiments(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("experiments.md")
    printed = capsys.readouterr().out
    assert "5 subsets of 3 methods, 8 seeds each" in printed and "suggested lr: " in printed
    assert (tmp_path / "runs" / "ablation" / "ablation.json").exists()


@pytest.fixture(scope="module")
def own_loop() -> tuple[dict[str, Any], str]:
    """Run the page on your own loop, as far as packages are installed; return its names and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|transformers|accelerate")
        names = run_page("own_loop.md")
    return names, printed.getvalue()


def numbers(printed: str) -> list[list[float]]:
    """Return the printed lines of numbers; the trainers print other lines as well."""
    return [[float(part) for part in line.split()] for line in printed.splitlines() if re.fullmatch(r"[\d. ]+", line)]


def test_plain_loops_of_your_own_learn(own_loop: tuple[dict[str, Any], str]) -> None:
    lines = numbers(own_loop[1])[:8]  # of a step after each epoch, then of methods, cores and SAM
    assert [line[0] for line in lines[:3]] == [0, 1, 2]
    assert min(line[-1] for line in lines[2:]) > 0.85


def test_methods_in_a_plain_loop_count_its_batches_and_remember(own_loop: tuple[dict[str, Any], str]) -> None:
    names, _ = own_loop
    assert names["held"].state.timestamp.batch == 3 * len(names["train"])
    assert names["held"].state.slots.keys() == {"ema"}


def test_lightning_learns_by_cores_methods_and_a_step(own_loop: tuple[dict[str, Any], str]) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    names, printed = own_loop
    (cores,), (averaged,), (num_steps, validated, composed) = numbers(printed)[8:11]
    assert min(cores, averaged, composed) > 0.85 and validated == pytest.approx(composed)
    assert num_steps == names["composed"].state.timestamp.batch == 3 * len(names["train"])


def test_hugging_faces_trainer_learns_by_cores(own_loop: tuple[dict[str, Any], str]) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    assert numbers(own_loop[1])[-1][0] < 2.3  # the mean over the run; its first value was log 10


def test_the_pages_gradient_through_two_steps_is_the_difference_quotient() -> None:
    fn = run_page("training.md")["loss_after_two_steps"]
    gradient = torch.func.grad(fn)(torch.tensor(0.1))
    quotient = (fn(torch.tensor(0.11)) - fn(torch.tensor(0.09))) / 0.02
    torch.testing.assert_close(gradient, quotient, rtol=0.02, atol=1e-3)


@pytest.mark.slow
def test_the_page_on_compiled_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # as without a terminal; a worker process may appear to have one
    names = run_page("compile.md")
    shown = capsys.readouterr()
    page = (ROOT / "docs" / "compile.md").read_text()
    (table,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert re.sub(r"[\d.]+|\s+", "", table) in re.sub(r"[\d.]+|\s+", "", shown.out)
    assert "this state is spent" in shown.out
    assert "a step cannot be compiled in by_number at" in shown.out
    assert shown.err.count("purecompose: compiling part") == len(names["compiled"].variants()) == 2
    assert names["state"].timestamp.batch == 28


def test_the_page_on_populations() -> None:
    assert run_page("populations.md")["best"].hparams["lr"] in torch.tensor([0.01, 0.03, 0.1, 0.3])


def test_the_page_on_half_precision() -> None:
    assert run_page("precision.md")["state"].metrics["loss_scaling/skipped"].item() == 0


def test_the_page_on_surgery(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("surgery.md")
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "surgery.md").read_text()
    step = names["pc"].compose(names["pc"].loop_events, [names["method"]])
    once = step.init(names["state"])
    assert "0.2.weight" in once.params and step.init(once).params.keys() == once.params.keys()


def test_the_page_on_models(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    for name in pc.nn.models.MODELS:
        (row,) = [line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line]
        described = re.sub(r"`, `", ", ", row.replace('"', "'"))
        assert pc.nn.models.describe(name).partition("(")[2].removesuffix(")") in described
    pytest.importorskip("transformers", reason="transformers is not installed")
    names = run_page("models.md")
    assert capsys.readouterr().out.startswith("torch.Size([4, 100, 65])\n")
    assert names["state"].loss < 4.1  # its first value was log 65


def test_the_page_on_data(capsys: pytest.CaptureFixture[str]) -> None:
    run_page("data.md")
    assert capsys.readouterr().out == "3 True\nTrue\n8\n16\nTrue\n"


def test_the_page_on_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("checkpoints.md")
    for place in (0, 2):
        weight, given = names["tuned"][place].weight, names["pruned"][place].parametrizations.weight
        assert 0.75 < (weight == 0).float().mean() < 0.85 and torch.equal(weight != 0, given[0].mask)
        assert not torch.equal(weight, given.original)  # the others are trained
    if "quantised" in names:
        inputs, net = names["inputs"], pc.to_module(names["state"]).eval()
        difference = (names["quantised"](inputs) - net(inputs)).abs().max() / net(inputs).abs().max()
        assert 0 < difference < 0.02
    assert "True" in capsys.readouterr().out


HOWTO = (ROOT / "docs" / "howto.md").read_text()
SECTIONS = re.findall(r"^### (.*)$", HOWTO, re.M)
SLOW_SECTIONS = {"Compile a step"}


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] * (title in SLOW_SECTIONS)) for title in SECTIONS]
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # while Inductor is imported
def test_howto_sections_run_after_the_first_block(
    title: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|transformers")
        run_page("howto.md", title)


def test_howto_has_code_and_a_guide_in_each_section_and_lists_all() -> None:
    listed = re.findall(r"\[([^]]*)\]\(#", HOWTO)
    assert [title.casefold() for title in listed] == [title.casefold() for title in SECTIONS]
    for title, section in zip(SECTIONS, HOWTO.split("\n### ")[1:], strict=True):
        assert section.count("```python") == 1 and "Guide: [" in section, title


def test_every_method_has_a_card_and_a_row() -> None:
    assert set(CARDS) == set(METHODS)
    table = (ROOT / "docs" / "algorithms.md").read_text()
    assert [name for name in CARDS if f"(algorithms/{name}.md)" not in table] == []


@pytest.mark.parametrize("name", CARDS)
def test_cards_have_one_form_and_all_settings(name: str) -> None:
    text = CARDS[name].read_text()
    heads = re.findall(r"^## (.*)$", text, re.M)
    assert heads == [head for head in CARD_HEADS if head in heads] and "Cost" in heads
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.M)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(inspect.signature(METHODS[name]).parameters)


@pytest.mark.parametrize("name", CARDS)
def test_the_code_of_a_methods_card_runs(name: str) -> None:
    names = run_page(f"algorithms/{name}.md")
    assert name in str(names) and len(CARDS[name].read_text().splitlines()) < 80


def test_cards_of_methods_with_a_core_show_it() -> None:
    page = (ROOT / "docs" / "own_loop.md").read_text()
    (without,) = re.findall(r"have no core: (.*?)\.\s", page, re.S)
    blocks = {name: "".join(re.findall(r"```python\n(.*?)```", card.read_text(), re.S)) for name, card in CARDS.items()}
    shown = {
        name for name, block in blocks.items() if "purecompose.functional import" in block or "pc.functional." in block
    }
    assert {*CARDS} - shown == {*re.findall(r"`(\w+)`", without)}


def test_the_page_names_each_setting_that_may_move() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    told = text.partition("**Scalars that change.**")[2].partition("\n* ")[0]
    moving = {
        name for factory in FACTORIES.values() for name, hint in get_type_hints(factory).items() if hint == Scalar
    }
    assert moving == {name for name in re.findall(r"`(\w+)`", told) if name != "hparam"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: pathlib.Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


MODULES = (
    r"batch|data|errors|functional|layers|loop|losses|metrics|models|nn\.layers|nn\.models|optim|passes|saving|schedule|"
    "surgery|testing"
)
DOTTED = re.compile(rf"\b(?:pc|purecompose)((?:\.[A-Za-z_]\w*)+)|`((?:{MODULES}|Event|State|Step|Trait)(?:\.\w+)+)")


def is_name(dotted: str) -> bool:
    """Whether this is an attribute of the package, or a module in it."""
    found: Any = pc
    for i, part in enumerate(parts := dotted.split(".")):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(["purecompose", *parts[: i + 1]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


# The change log has names of earlier versions.
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=lambda page: page.name)
def test_dotted_names_exist(page: pathlib.Path) -> None:
    dotted = [absolute.lstrip(".") or short for absolute, short in DOTTED.findall(page.read_text())]
    assert [name for name in dotted if not is_name(name)] == []


def test_every_page_is_reached_from_the_readme() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {(page.parent / link).resolve() for page in new for link in LINK.findall(page.read_text())}
        new = {page for page in links if page.suffix == ".md" and page.exists()} - found
    assert {*(ROOT / "docs").glob("*.md")} <= found


@pytest.mark.slow
def test_the_pictures_of_the_ideas_are_what_steps_report(tmp_path: pathlib.Path) -> None:
    folder = ROOT / "docs" / "images"
    subprocess.run([sys.executable, str(folder / "explained.py"), str(tmp_path)], check=True)
    subprocess.run([sys.executable, str(folder / "architecture.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = [*folder.glob("explained_*.svg"), folder / "architecture.svg"]
    assert drawn == {path.name: path.read_text() for path in kept}


def test_the_pictures_of_the_methods_are_those_that_the_script_draws() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "images" / "make.py"))
    shown = set(re.findall(r"images/(\w+)\.webp\)", "".join(card.read_text() for card in CARDS.values())))
    assert shown == set(names["PICTURES"])
    photos = torch.randint(256, (2, 3, names["SIDE"], names["SIDE"]), dtype=torch.uint8)
    for name, images in names["PICTURES"].items():
        with Image.open(ROOT / "docs" / "images" / f"{name}.webp") as kept:
            assert names["row_of"](images(photos)).size == kept.size
