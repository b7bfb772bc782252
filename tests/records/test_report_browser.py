"""The report in a browser: nothing is fetched, no errors, no horizontal scrolling."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import Kept, write_report
from tests.records.run_helpers import at, made_up


playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytest.importorskip("matplotlib", reason="pictures need matplotlib")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = made_up(
        members=8,
        config={"hostile": "<script>document.title = 'broken'</script>", "long": "a" * 500, "checkpoint_every": "1ep"},
        plan="event  " * 60,
        command="python train.py" + " --momentum 0.9" * 9,
        trained={"algorithms": ["mixup(alpha=0.2)"]},
        starts=(at(0, until=20, seconds=61.0), at(20, until=40, seconds=14.0, outcome="finished")),
        checkpoints=(
            Kept(Path("ep0004-ba00000040"), 40, 4, 5_890_000, dict.fromkeys(("eval/a", "eval/b"), [0.25, 0.5])),
        ),
    )
    return write_report(run, tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_the_report(browser: Any, report: Path, scheme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    assert requests == [report.as_uri()]
    assert complaints == []
    assert page.title() == "made-up"
    assert page.evaluate("document.compatMode") == "CSS1Compat"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    (picture,) = page.evaluate("[...document.images].map(image => [image.naturalWidth, image.currentSrc])")
    assert picture[0] >= (1200 if width == 1200 else 2 * 300)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    sources = page.evaluate("[...document.querySelectorAll('source')].map(one => one.srcset)")
    sources.append(page.evaluate("document.images[0].src"))
    assert len(set(sources)) == 4
    assert picture[1] == sources[(0 if width == 360 else 2) + (scheme == "light")]
    page.close()


# The number of lines of each text within elements.
LINES = """all => all.flatMap(one => [...one.childNodes]).filter(node => node.length).map(node => {
  const range = document.createRange()
  range.selectNodeContents(node)
  return range.getClientRects().length })"""


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_wide_parts_scroll_within_their_box_and_are_not_cramped(browser: Any, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(report.as_uri())
    page.evaluate("window.scrollTo(500, 0)")
    assert page.evaluate("window.scrollX") == 0
    # No head, no name of a row and no short cell of a table with columns is broken.
    assert set(page.locator(".many thead th").evaluate_all(LINES)) == {1}
    assert set(page.locator(".many tbody th, .many .short").evaluate_all(LINES)) == {1}
    for row in ("started", "folder"):
        table = page.locator(".many", has_text=row)
        inside, outside = table.evaluate("one => [one.scrollWidth, one.clientWidth]")
        assert outside <= width and (inside > outside) == (width < 640)
        table.evaluate("one => one.scrollTo(10000, 0)")
        assert table.evaluate("one => one.scrollLeft") == inside - outside
    # The last column has room for some words.
    assert page.locator(".many td.long").bounding_box()["width"] >= 200
    page.close()


def test_names_and_options_are_broken_between_words(browser: Any, report: Path) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.goto(report.as_uri())
    name = page.get_by_role("rowheader", name="checkpoint_every")
    assert name.evaluate_all(LINES) == [1, 1]  # each part on one line: broken after the underscore, if at all
    options = page.locator("pre .whole")
    assert options.count() == 9
    assert set(options.evaluate_all(LINES)) == {1}
    page.close()


def test_a_printed_report_is_light_and_complete(browser: Any, report: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('pre')).whiteSpace").startswith("pre-wrap")
    assert page.pdf().startswith(b"%PDF")
    page.close()
