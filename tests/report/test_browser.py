"""A report of a real merge in a real browser: nothing is logged, loaded, cut off or hard to read."""

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from covmerge import api
from covmerge.reporting import write_html
from tests.e2e.models import save_family
from tests.report.merges import merge

pytestmark = pytest.mark.slow

BROWSER, DRIVER = "chromium", "chromedriver"
DESKTOP, PHONE, NARROW = (1280, 900, False), (390, 844, True), (360, 740, True)
SCHEMES = ("light", "dark")
# WCAG 2: at least 4.5 for text, 3 for large text.
CONTRAST, CONTRAST_LARGE = 4.5, 3.0

LOW_CONTRAST = """
const [normal, big] = arguments;
const number = text => text.match(/[\\d.]+/g).map(Number);
const luminance = color => {
  const part = number(color).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
};
const paper = luminance(getComputedStyle(document.body).backgroundColor);
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  // Numbers in the cells of a heat map stand on its colours.
  if (element.tagName === "text" && !element.style.fill.startsWith("var(")) continue;
  const ink = luminance(element.tagName === "text" ? style.fill : style.color);
  const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  const large = parseFloat(style.fontSize) >= 24;
  if (ratio < (large ? big : normal)) found.push([element.tagName, element.textContent, ratio]);
}
return found;
"""

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
def browser():
    if not (shutil.which(BROWSER) and shutil.which(DRIVER)):
        unavailable("apt-get install chromium chromium-driver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        unavailable("pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(BROWSER)
    # A container has neither a sandbox for root nor room in /dev/shm.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
    yield driver
    driver.quit()


def unavailable(remedy):
    """Reports are opened in a browser by CI, and by others who have one."""
    reason = f"there is no browser to open reports in: {remedy}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


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


def show(browser, path, size=DESKTOP, scheme="light"):
    width, height, mobile = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before is not ours
    browser.get(path.as_uri())


def test_nothing_is_logged_and_nothing_loaded(browser, page):
    show(browser, page)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    addresses = {event["request"]["url"] for event in sent}
    assert {a for a in addresses if not a.startswith("data:")} == {page.as_uri()}
    logged = [e for e in browser.get_log("browser") if e["level"] not in ("INFO", "DEBUG")]
    assert logged == []
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script("return document.compatMode") == "CSS1Compat"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_read_on_its_paper(browser, page, scheme):
    show(browser, page, scheme=scheme)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(254, 254, 254)", "dark": "rgb(21, 24, 28)"}[scheme]
    open_all(browser)
    assert browser.execute_script(LOW_CONTRAST, CONTRAST, CONTRAST_LARGE) == []


def test_nothing_in_a_picture_is_cut_or_covered(browser, page):
    show(browser, page)
    assert browser.execute_script(BAD_TEXT) == []


@pytest.mark.parametrize("size", [NARROW, PHONE, DESKTOP], ids=["360", "390", "1280"])
def test_a_page_scrolls_one_way(browser, page, size):
    show(browser, page, size)
    for step in (lambda: None, lambda: open_all(browser)):
        step()
        widths = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] == widths[1] <= size[0]
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())"
        ".map(t => t.getBoundingClientRect()).map(b => Math.min(b.height, b.width))"
    )
    assert min(heights) > 4  # a picture scrolls in its own box and is not made small


def test_the_tables_open(browser, page):
    show(browser, page, PHONE)
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
    show(browser, page)
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


def test_screenshots(browser, page, tmp_path):
    for label, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in SCHEMES:
            show(browser, page, size, scheme)
            path = tmp_path / f"{page.stem}-{label}-{scheme}.png"
            path.write_bytes(picture(browser, size[0]))
            assert path.stat().st_size > 50_000


def picture(browser, width):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    taken = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    return base64.b64decode(taken["data"])


def open_all(browser):
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")


def test_the_browser_is_there_where_it_must_be():
    """What .ci/run installs is what this file asks for."""
    script = Path(__file__).parents[2] / ".ci" / "run"
    assert "chromium chromium-driver" in script.read_text()
