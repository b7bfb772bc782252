"""The script of a report, in a browser, if there is one."""

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import write_report
from tests.records.run_helpers import at, made_up


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="the script needs playwright and chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the script needs chromium")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a report on a wide screen; errors of its script fail."""
    errors: list[str] = []
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(path.as_uri())
        yield page
        browser.close()
    assert errors == []


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """The report of two runs."""
    runs = [made_up("first", starts=(at(0), at(20))), made_up("second", count=20, batch_5={"loss": 0.001})]
    for run in runs:
        run.records.extend({"batch": i, "epoch": i // 10, "eval/loss": 2.0 - i / 20} for i in (10, 20))
        run.records.sort(key=lambda record: record["batch"])
    with opened(write_report(runs, tmp_path / "report.html")) as page:
        yield page


def num_curves(page: Any) -> int:
    return page.locator("figure").first.locator("path.curve").count()


def test_runs_and_columns_can_be_hidden(page: Any) -> None:
    assert page.locator("figure").count() == 5
    assert num_curves(page) == 4  # of two runs in training and evaluation
    page.click("button:has-text('first')")
    assert num_curves(page) == 2
    assert page.locator("button:has-text('first')").get_attribute("aria-pressed") == "false"
    page.click("button:has-text('eval/loss')")
    assert num_curves(page) == 1
    page.click("button:has-text('first')")
    assert num_curves(page) == 2


def test_values_are_shown_at_the_pointer_and_by_the_keyboard(page: Any) -> None:
    plot, values = page.locator(".plot > svg").first, page.locator(".values").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 52 + (box["width"] - 62) / 4, box["y"] + 50)  # a quarter of the way
    assert values.inner_text().splitlines() == [
        *("batch 10", "first loss 1.558", "second loss 1.213", "first eval/loss 1.5", "second eval/loss 1.5")
    ]
    page.select_option("select", "epoch")
    assert not values.is_visible()
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert values.inner_text().startswith("epoch 2.04\nfirst loss 1.213")


def test_smoothing_and_logarithmic_axes_change_the_curves(page: Any) -> None:
    def shape() -> str:
        return page.locator("figure").first.locator("path.curve").nth(1).get_attribute("d")

    first = shape()
    page.locator("input[type=range]").fill("20")
    smooth = shape()
    ticks = page.locator("figure").first.locator("text[text-anchor=end]")
    assert ticks.all_text_contents() == ["1", "1.5"]  # the smoothed loss
    page.locator("figure input").first.uncheck()  # the loss falls far
    assert len({first, smooth, shape()}) == 3


@pytest.mark.parametrize("width", [390, 1300])
def test_the_page_is_not_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".resumed").count() == 5


def test_a_population_has_a_band_that_ends_where_numbers_are_missing(tmp_path: Path) -> None:
    run = made_up(members=3, batch_5={"loss": [math.nan] * 3}, batch_20={"loss": [1.0, 1.5, 1e30]})
    with opened(write_report(run, tmp_path / "report.html")) as page:
        assert page.locator("path.band").first.get_attribute("d").count("Z") == 2
        assert page.locator("figure .bad").inner_text() == "1 of 40 not finite, the first at 5"
        assert page.locator("figure").first.locator("text[text-anchor=end]").count() <= 10
        page.locator("figure input").first.uncheck()
        ticks = page.locator("figure").first.locator("text[text-anchor=end]").all_text_contents()
        assert float(ticks[-1]) < 10  # one member that has diverged does not decide
