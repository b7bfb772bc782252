"""The report as a browser shows it: nothing fetched, no complaints, no sideways scrolling."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import at, made_up

from purecompose.runs import write_report


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
        config={"hostile": "<script>document.title = 'broken'</script>", "long": "a" * 500},
        plan="event  " * 60,
        command="python train.py",
        trained={"algorithms": ["mixup(alpha=0.2)"]},
        starts=(at(0, until=20, seconds=61.0), at(20, until=40, seconds=14.0, outcome="finished")),
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
    assert picture[0] >= 1200
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    sources = page.evaluate("[document.querySelector('source').srcset, document.images[0].src]")
    assert picture[1] == sources[0 if scheme == "dark" else 1]
    page.close()


def test_paper_is_light_and_takes_the_whole_report(browser: Any, report: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('pre')).whiteSpace").startswith("pre-wrap")
    assert page.pdf().startswith(b"%PDF")
    page.close()
