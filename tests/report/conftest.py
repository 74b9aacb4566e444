"""A browser that pages are opened in."""

import os
import shutil

import pytest

BROWSER, DRIVER = "chromium", "chromedriver"


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
