"""What tests of pages ask of a browser."""

import base64

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
