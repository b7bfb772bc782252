import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from purecompose._support.messages import breakable
from purecompose.records import Predictions, RunRecords, write_report
from purecompose.records.layout import Start
from purecompose.records.report import Fact, facts_of, number
from tests.markup import HOSTILE, Checker, parsed
from tests.records.run_helpers import at, made_up


def parsed_file(path: Path) -> Checker:
    return parsed(path.read_text("utf-8"))


def test_the_report_contains_all_parts(tmp_path: Path) -> None:
    run = made_up(
        config={"lr": 0.25, "model": {"width": 16}},
        plan="event  order\n-----  -----\nINIT   0",
        command="python train.py --seed 3",
        versions={"torch": "2.99", "device": "cpu"},
        trained={"algorithms": ["mixup(alpha=0.2)"], "model": ["Linear(4, 3)"], "weights": 15},
        starts=(
            at(0, until=20, seconds=61.0, evaluation_seconds=1.0, outcome="killed"),
            at(20, until=40, seconds=14.0, outcome="finished", changed={"seed": [0, 1]}),
        ),
        result={"metrics": {"eval/accuracy": 0.9876, "loss": 0.5}, "batches": 40, "seconds": 75.0, "checksum": "f00"},
    )
    page = parsed_file(write_report(run, tmp_path / "report.html"))
    for words in (
        *("made-up", "finished", "98.76%", "0.5", "f00", "lr", "0.25", "model.width", "16", run.plan),
        *("python train.py --seed 3", "2.99", "mixup(alpha=0.2)", "Linear(4, 3)", "75 s", "seed: 0 → 1"),
        *("Started 2026-05-01 10:00 (UTC), continued 1 time. 75 s in all on cpu.", "0.5405 batches / s", "killed"),
    ):
        assert words in page.text
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


def test_all_strings_of_a_run_are_escaped(tmp_path: Path) -> None:
    run = made_up(
        HOSTILE,
        config={HOSTILE: HOSTILE, "list": [HOSTILE], "table": {HOSTILE: HOSTILE}},
        plan=HOSTILE,
        command=HOSTILE,
        versions={HOSTILE: HOSTILE},
        trained={"algorithms": [HOSTILE], "model": [HOSTILE], "optimizer": HOSTILE},
        starts=(at(0, outcome="killed"), at(3, outcome=HOSTILE, changed={HOSTILE: [HOSTILE, None]})),
        result={"metrics": {HOSTILE: 1.0}, HOSTILE: HOSTILE},
        batch_3={HOSTILE: 2.0},
    )
    page = parsed_file(write_report(run, tmp_path / "report.html"))
    plain = parsed_file(write_report(made_up(), tmp_path / "plain.html"))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"pre", "table", "tr", "th", "td"} | {
        *("thead", "tbody", "wbr")
    }
    assert not any(
        name.startswith("on") or "evil" in str(value) for _, attrs in page.tags for name, value in attrs.items()
    )
    assert page.text.count("alert('x')") >= 12
    assert "\x00" not in page.text and "\x1b" not in page.text


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    page = parsed_file(write_report(made_up(), tmp_path / "report.html"))
    urls = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "srcset", "href")]
    assert urls and all(str(url).startswith("data:") for url in urls)
    assert "url(" not in page.text and "@import" not in page.text


def test_only_the_script_of_the_page_may_run(tmp_path: Path) -> None:
    text = write_report(made_up(), tmp_path / "report.html").read_text("utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    (checksum,) = re.findall(r"script-src 'sha256-(.*?)'", text)
    assert base64.b64decode(checksum) == hashlib.sha256(script.encode()).digest()


def numbers_of(*runs: RunRecords, folder: Path) -> dict[str, Any]:
    """Return the numbers that the script of a page draws."""
    text = write_report(list(runs), folder / "report.html").read_text("utf-8")
    (numbers,) = re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', text, re.S)
    return json.loads(numbers)


def test_the_script_has_the_numbers_of_all_runs(tmp_path: Path) -> None:
    first = made_up("first", starts=(at(0, until=20), at(20, until=40)))
    found = numbers_of(first, made_up("second", count=10, members=3), folder=tmp_path)
    assert [(run["name"], run["resumed"]) for run in found["runs"]] == [("first", [20]), ("second", [])]
    assert list(found["axes"]) == ["batch", "epoch", "time/sample", "time/seconds"]
    axes = found["runs"][0]["axes"]
    assert [axes[x][axes["batch"].index(15)] for x in ("epoch", "time/sample", "time/seconds")] == [1.5, 120, 0.3]
    loss = found["panels"][0]
    one, many = loss["series"]
    assert (loss["title"], one["run"], many["run"]) == ("training loss", 0, 1)
    assert one["x"] == list(range(1, 41)) and one["y"][39] == pytest.approx(2 * math.exp(-1), rel=1e-5)
    assert (many["low"][9], many["y"][9], many["high"][9]) == pytest.approx([2 * math.exp(-1) + i for i in range(3)])


def test_a_long_line_has_means_in_a_band(tmp_path: Path) -> None:
    found = numbers_of(made_up(count=2500, batch_4={"loss": math.nan}), folder=tmp_path)
    (loss,) = found["panels"][0]["series"]
    expected = [2 * math.exp(-batch / 2500) for batch in (1, 2, 3)]
    assert len(loss["x"]) == 834 and loss["x"][:2] == [2, 5]
    assert (loss["low"][0], loss["y"][0], loss["high"][0]) == pytest.approx(
        (expected[2], expected[1], expected[0]), rel=1e-5
    )
    assert loss["y"][1] == pytest.approx(sum(2 * math.exp(-batch / 2500) for batch in (5, 6)) / 2, rel=1e-5)
    assert found["panels"][0]["bad"] == "1 of 2,500 not finite, the first at 4"
    assert len(found["runs"][0]["axes"]["batch"]) <= 1002


def test_what_differs_between_runs_comes_first(tmp_path: Path) -> None:
    one = made_up("one", config={"seed": 0, "lr": 0.1}, versions={"commit": "aaa", "torch": "2"}, plan="same")
    two = made_up(
        "two", config={"lr": 0.2, "seed": 0, "more": "x"}, versions={"commit": "bbb", "torch": "2"}, plan="same"
    )
    page = parsed_file(write_report([one, two], tmp_path / "report.html"))
    words = " ".join(page.text.split())
    assert words.count("differsonetwo") == 2
    assert words.index("settingonetwo lr0.10.2 more-x Curves") < words.index("Settings differs")
    assert "Settings differsonetwo lr0.10.2 more-x seed0" in words
    assert "Versions differsonetwo commitaaabbb torch2" in words
    assert words.count("Plan same Times") == 1
    with pytest.raises(ValueError, match="2 runs and 1 predictions"):
        write_report([one, two], tmp_path / "report.html", predictions=[None])


def test_mistakes_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    logits = torch.tensor([[3.0, 0, 0], [0, 2, 1], [2, 1, 0], [5, 0, 0]])
    targets, images = torch.tensor([0, 1, 1, 2]), torch.rand(4, 1, 2, 2)
    given = Predictions(logits, targets, images, ["cat", "dog", "<i>"])
    assert given.confusion().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert [(one.number, one.target, one.predicted) for one in given.worst()] == [(3, "<i>", "cat"), (2, "dog", "cat")]
    assert given.worst(1)[0].probability == pytest.approx(logits[3].softmax(0)[0].item())
    page = parsed_file(write_report(made_up(), tmp_path / "report.html", predictions=given))
    assert "2 of 4 examples are classified correctly." in page.text and "dog, predicted cat" in page.text
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 2 and all(str(one).startswith("data:image/png;base64,") for one in pictures)
    for outputs, classes in ((logits[:3], targets), (logits, targets + 1), (logits, targets.float())):
        with pytest.raises(ValueError, match="Predictions: expected"):
            Predictions(outputs, classes).confusion()


def test_targets_may_be_narrow_integers_and_outputs_nan() -> None:
    outputs, targets = torch.eye(20), torch.arange(20)
    assert Predictions(outputs, targets.to(torch.uint8)).confusion().equal(torch.eye(20, dtype=torch.int64))
    outputs[3:5] = math.nan  # as if class 0 were predicted
    outputs[0] = math.nan
    assert [one.number for one in Predictions(outputs, targets.to(torch.uint8)).worst()] == [3, 4]


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path) -> None:
    page = parsed_file(write_report(made_up(count=0), tmp_path / "report.html"))
    for words in ("Not started.", "There are no records yet.", "None were given.", "It was not written down."):
        assert words in page.text


def test_lines_may_end_between_words_and_not_within_numbers() -> None:
    assert breakable("checkpoint_every", "_") == "checkpoint_<wbr>every"
    assert breakable("sgd(lr=0.1,momentum=0.9,(1,2))") == "sgd(<wbr>lr=0.1,<wbr>momentum=0.9,(1,2))"
    assert breakable("a,<b>") == "a,&lt;b&gt;"


def test_counts_have_commas_and_settings_are_as_they_were_given(tmp_path: Path) -> None:
    run = made_up(config={"seed": 123456}, trained={"weights": 61050})
    text = parsed_file(write_report(run, tmp_path / "report.html")).text
    assert "61,050" in text and "123456" in text


def test_a_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "nowhere", tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "name", "words"),
    [
        (0.98765, "eval/accuracy", "98.77%"),
        (98.7, "eval/accuracy", "98.7"),
        (0.98765, "eval/loss", "0.9877"),
        (12345, "", "12,345"),
        (math.nan, "loss", "nan"),
        ([1.0, math.nan, 3.0], "loss", "2 (1 to 3)"),
        ([math.nan], "loss", "not finite"),
        (True, "", "True"),
        ("text", "", "text"),
    ],
)
def test_numbers_are_formatted_for_people(value: object, name: str, words: str) -> None:
    assert number(value, name) == words


def test_when_a_run_started_and_how_it_ended(tmp_path: Path) -> None:
    for outcome, words in (
        ("finished", "Started 2026-05-01 10:00 (UTC-07:00), continued 2 times."),
        ("KeyboardInterrupt", "continued 2 times. It was stopped by KeyboardInterrupt"),
        ("finished, but 3 records could not be written", "2 times. It finished, but 3 records could not be written."),
    ):
        starts = (Start(0, "2026-05-01T10:00:00-07:00"), at(10), at(20, outcome=outcome))
        path = write_report(made_up(starts=starts), tmp_path / "report.html")
        assert words in parsed_file(path).text


def test_every_number_has_a_description() -> None:
    run = made_up(batch_40={"train/accuracy": 0.25, "norm": 3.0}, starts=(at(0, until=40, seconds=75.0),))
    assert facts_of(run) == [
        Fact("eval/accuracy", "100.00%"),
        Fact("loss of the last batch", f"{2 * math.exp(-1):.4g}"),
        Fact("train/accuracy", "25.00%"),
        Fact("norm", "3"),
        Fact("batches", "40"),
        Fact("wall-clock time", "75 s"),
    ]


def test_a_population_has_medians_and_ranges_that_are_labelled_so() -> None:
    last = 2 * math.exp(-1)
    accuracy, loss, *_ = facts_of(made_up(members=8))
    assert accuracy == Fact("eval/accuracy", "56.25% (12.50% to 100.00%)", "median and range of 8")
    words = f"{last + 3.5:.4g} ({last:.4g} to {last + 7:.4g})"
    assert loss == Fact("loss of the last batch", words, "median and range of 8")


@pytest.mark.parametrize("batch", [40, 30])
def test_a_result_without_its_records_only_has_known_facts(batch: int) -> None:
    run = made_up(result={"metrics": {"eval/accuracy": 0.5, "loss": 0.25}, "batches": batch})
    assert facts_of(run)[0] == Fact("eval/accuracy", "50.00%")  # the records contain another one
    run.records.clear()
    assert facts_of(run)[1] == Fact("loss of the last batch", "0.25")
    assert facts_of(run)[2] == Fact("batches", str(batch))
