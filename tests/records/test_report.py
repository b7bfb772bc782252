import math
from pathlib import Path

import pytest

from purecompose._support.tables import breakable
from purecompose.records import write_report
from purecompose.records.layout import Start
from purecompose.records.report import Fact, facts_of, number
from tests.markup import HOSTILE, Checker, parsed
from tests.records.run_helpers import at, made_up


def parsed_file(path: Path) -> Checker:
    return parsed(path.read_text("utf-8"))


def test_the_report_contains_all_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
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
    assert [attrs["src"] for tag, attrs in page.tags if tag == "img"][0].startswith("data:image/png")  # pyright: ignore
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
    page = parsed_file(write_report(run, tmp_path / "report.html", curves=False))
    plain = parsed_file(write_report(made_up(), tmp_path / "plain.html", curves=False))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"pre", "table", "tr", "th", "td"} | {
        *("thead", "tbody", "wbr")
    }
    assert not any(
        name.startswith("on") or "evil" in str(value) for _, attrs in page.tags for name, value in attrs.items()
    )
    assert page.text.count("alert('x')") >= 12
    assert "\x00" not in page.text and "\x1b" not in page.text


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = parsed_file(write_report(made_up(), tmp_path / "report.html"))
    urls = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "srcset", "href")]
    assert urls and all(str(url).startswith("data:") for url in urls)
    assert "url(" not in page.text and "@import" not in page.text
    assert "script" not in {tag for tag, _ in page.tags}


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path) -> None:
    page = parsed_file(write_report(made_up(count=0), tmp_path / "report.html"))
    for words in ("Not started.", "There are no records yet.", "None were given.", "It was not written down."):
        assert words in page.text


def test_curves_that_cannot_be_drawn_leave_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise MemoryError("too large")

    monkeypatch.setattr("purecompose.records.report.picture", fail)
    with pytest.warns(RuntimeWarning, match="has no curves: too large"):
        path = write_report(made_up(), tmp_path / "report.html")
    assert "could not be drawn: too large" in parsed_file(path).text


def test_lines_may_end_between_words_and_not_within_numbers() -> None:
    assert breakable("checkpoint_every", "_") == "checkpoint_<wbr>every"
    assert breakable("sgd(lr=0.1,momentum=0.9,(1,2))") == "sgd(<wbr>lr=0.1,<wbr>momentum=0.9,(1,2))"
    assert breakable("a,<b>") == "a,&lt;b&gt;"


def test_counts_have_commas_and_settings_are_as_they_were_given(tmp_path: Path) -> None:
    run = made_up(config={"seed": 123456}, trained={"weights": 61050})
    text = parsed_file(write_report(run, tmp_path / "report.html", curves=False)).text
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
        path = write_report(made_up(starts=starts), tmp_path / "report.html", curves=False)
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
