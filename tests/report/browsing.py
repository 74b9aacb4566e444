"""What tests of pages ask of a browser."""

import base64
import json

import pytest

DESKTOP, PHONE, NARROW = (1280, 900, False), (390, 844, True), (360, 740, True)
SCHEMES = ("light", "dark")
at_every_width = pytest.mark.parametrize(
    "size", [NARROW, PHONE, DESKTOP], ids=["360", "390", "1280"]
)
# WCAG 2: at least 4.5 for text, 3 for large text.
_CONTRAST, _CONTRAST_LARGE = 4.5, 3.0

_LOW_CONTRAST = """
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


def show(browser, url, size=DESKTOP, scheme="light"):
    width, height, mobile = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before is not ours
    browser.get(url)


def picture(browser, width):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    taken = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    return base64.b64decode(taken["data"])


def asked_for(browser):
    """Addresses that the page has fetched; what it holds itself is none."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    addresses = {event["request"]["url"] for event in sent}
    return {address for address in addresses if not address.startswith("data:")}


def logged(browser):
    """What the browser complains of."""
    return [e for e in browser.get_log("browser") if e["level"] not in ("INFO", "DEBUG")]


def hard_to_read(browser):
    """Text without contrast."""
    return browser.execute_script(_LOW_CONTRAST, _CONTRAST, _CONTRAST_LARGE)


def check_width(browser, size):
    """Check that a page scrolls one way."""
    widths = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert widths[0] == widths[1] <= size[0]
