"""A report of a real merge in a real browser: nothing is logged, loaded, cut off or hard to read."""

import base64
from pathlib import Path

import pytest

from covmerge.front import api
from covmerge.front.reporting.job import write_html
from tests.e2e.models import save_family
from tests.report.browsing import (
    DESKTOP,
    PHONE,
    SCHEMES,
    asked_for,
    at_every_width,
    check_width,
    hard_to_read,
    logged,
    picture,
    show,
)
from tests.report.merges import merge

pytestmark = pytest.mark.slow

# Text of a picture that leaves it, or lies on other text of it.
BAD_TEXT = """
const found = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
  const boxes = texts.map(t => t.getBoundingClientRect());
  boxes.forEach((box, i) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      found.push(["outside", texts[i].textContent]);
    for (let j = i + 1; j < boxes.length; j++) {
      const other = boxes[j], gap = 1.5;  // the room that a line leaves above and below
      if (box.left + gap < other.right && other.left + gap < box.right
          && box.top + gap < other.bottom && other.top + gap < box.bottom)
        found.push(["overlap", texts[i].textContent, texts[j].textContent]);
    }
  });
}
return found;
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report of a real model's merge, and one of three experts of very different size."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "bert").mkdir()
    base, paths = save_family("bert", folder / "bert", experts=3)
    result = api.merge(base, paths, "ace", folder / "bert-merge")
    found = {"bert": api.report(folder / "bert-merge", merged=result)}
    (folder / "plain").mkdir()
    merge(
        folder / "plain", {"code": 0.02, "maths": [0.05, 0.9, 0.05, 0.05], "prose": 0.1}, blocks=4
    )
    found["plain"] = api.report(folder / "plain" / "out", spectra="all")
    for name, report in found.items():
        write_html(report, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in found}


@pytest.fixture(params=["bert", "plain"])
def page(request, pages):
    return pages[request.param]


def test_nothing_is_logged_and_nothing_loaded(browser, page):
    show(browser, page.as_uri())
    assert asked_for(browser) == {page.as_uri()}
    assert logged(browser) == []
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script("return document.compatMode") == "CSS1Compat"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_read_on_its_paper(browser, page, scheme):
    show(browser, page.as_uri(), scheme=scheme)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(254, 254, 254)", "dark": "rgb(21, 24, 28)"}[scheme]
    open_all(browser)
    assert hard_to_read(browser) == []


def test_nothing_in_a_picture_is_cut_or_covered(browser, page):
    show(browser, page.as_uri())
    assert browser.execute_script(BAD_TEXT) == []


@at_every_width
def test_a_page_scrolls_one_way(browser, page, size):
    show(browser, page.as_uri(), size)
    for step in (lambda: None, lambda: open_all(browser)):
        step()
        check_width(browser, size)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())"
        ".map(t => t.getBoundingClientRect()).map(b => Math.min(b.height, b.width))"
    )
    assert min(heights) > 4  # a picture scrolls in its own box and is not made small


def test_the_tables_open(browser, page):
    show(browser, page.as_uri(), PHONE)
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('details table')].map(t => t.checkVisibility())"
    )
    assert hidden
    assert not any(hidden)
    for summary in browser.find_elements("css selector", "summary"):
        browser.execute_script("arguments[0].scrollIntoView()", summary)
        summary.click()
    assert browser.execute_script(
        "return [...document.querySelectorAll('details table')].every(t => t.checkVisibility())"
    )


def test_it_prints(browser, page, tmp_path):
    show(browser, page.as_uri())
    sheet = {"paperWidth": 8.27, "paperHeight": 11.69}  # A4
    closed = browser.execute_cdp_cmd("Page.printToPDF", sheet)
    open_all(browser)
    opened = browser.execute_cdp_cmd("Page.printToPDF", sheet)
    sizes = []
    for name, printed in (("closed", closed), ("opened", opened)):
        content = base64.b64decode(printed["data"])
        (tmp_path / f"{name}.pdf").write_bytes(content)
        assert content.startswith(b"%PDF")
        sizes.append(content.count(b"/Type /Page\n") or content.count(b"/Type /Page "))
    assert 2 <= sizes[0] < sizes[1]
    # On a page of A4, less its margins, nothing is wider than the paper.
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    metrics = {"width": 688, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => "
        "e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => [e.tagName, e.textContent.slice(0, 40)])"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert wide == []


@pytest.mark.nightly
def test_screenshots(browser, page, tmp_path):
    for label, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in SCHEMES:
            show(browser, page.as_uri(), size, scheme)
            path = tmp_path / f"{page.stem}-{label}-{scheme}.png"
            path.write_bytes(picture(browser, size[0]))
            assert path.stat().st_size > 50_000


def open_all(browser):
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")


def test_the_browser_is_there_where_it_must_be():
    """What .ci/run installs is what this file asks for."""
    script = Path(__file__).parents[2] / ".ci" / "run"
    assert "chromium chromium-driver" in script.read_text()
