"""The page of `covmerge view` in a real browser: moved, read, exported, and the export merged."""

import re
import threading
import time
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.front import api
from covmerge.front.viewer import Server, ViewJob
from covmerge.plan.recipe import load_recipe
from tests.report.browsing import (
    SCHEMES,
    asked_for,
    at_every_width,
    check_width,
    hard_to_read,
    logged,
    picture,
    show,
)
from tests.report.merges import checkpoints

pytestmark = pytest.mark.slow

SCALES = {"code": 0.02, "maths": [0.05, 0.3, 0.05], "prose": 0.1}
HOSTILE = "layers.0.<img src=x onerror='document.title=1'>\u202e&amp;.weight"
# Moves a slider, or types a number, as a user does.
MOVE = """
const [label, value] = arguments;
const input = document.querySelector(`input[aria-label="${label}"]`);
input.value = value;
input.dispatchEvent(new Event("input", {bubbles: true}));
return input.value;
"""
SHOWN = """
return Object.fromEntries([...document.querySelectorAll("#results tbody tr")].map(row =>
  [row.cells[0].textContent, [...row.cells].slice(2).map(cell => cell.textContent)]));
"""


@contextmanager
def served(path):
    with closing(Server(ViewJob(path).run())) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("viewed")
    base, experts = checkpoints(folder, SCALES, blocks=3)
    covmerge.merge(base, experts, "ties", folder / "out")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with served(folder / "out") as url:
        yield url


@pytest.fixture
def page(browser, url):
    return opened(browser, url)


def opened(browser, url, *how):
    show(browser, url, *how)
    wait(browser, "return !document.getElementById('main').hidden")
    return browser


def wait(browser, script, seconds=10):
    until = time.monotonic() + seconds
    while not (found := browser.execute_script(script)):
        assert time.monotonic() < until, script
        time.sleep(0.02)
    return found


def now(browser):
    """What the page says is kept, in shares, as it is drawn next."""
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")
    found = browser.execute_script(SHOWN)
    return {
        name: [float(text.rstrip("%").replace("−", "-")) / 100 for text in texts]
        for name, texts in found.items()
    }


def press(browser, text):
    for button in browser.find_elements("css selector", "button"):
        if button.text == text:
            button.click()
            return
    raise AssertionError(text)


def exported(browser, folder):
    """The file that the page gives to download."""
    where = {"behavior": "allow", "downloadPath": str(folder)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    browser.find_element("id", "download").click()
    until = time.monotonic() + 20
    while not (folder / "recipe.yml").exists():
        assert time.monotonic() < until, browser.find_element("id", "problem").text
        time.sleep(0.05)
    return folder / "recipe.yml"


def test_what_is_shown_is_what_the_exported_recipe_keeps(page, folder, tmp_path):
    as_merged = covmerge.report(folder / "out").inspection.retention()
    shown = now(page)
    assert {name: values[1] for name, values in shown.items()} == pytest.approx(as_merged, abs=6e-4)
    page.find_element("css selector", "input[value=task_arithmetic]").click()
    page.execute_script(MOVE, "code, all layers", 0.4)
    page.execute_script(MOVE, "maths, all layers, as a number", 0.25)
    page.execute_script(MOVE, "scale λ, all layers", 0.9)
    before = now(page)
    assert before != shown
    press(page, "Other weights for some layers")
    box = "document.querySelector('#groups .group')"
    page.execute_script(f"""
        const select = {box}.querySelector("select");
        select.value = [...select.options].find(o => o.textContent === "mlp.up_proj.weight").value;
        [...{box}.querySelectorAll(".chooser input")][1].value = 1;""")
    press(page, "Choose")
    page.execute_script(MOVE, "prose, group 1", 1.5)
    page.execute_script(MOVE, "the merged model (merged), group 1", 0.5)
    page.execute_script(MOVE, "scale λ, group 1", 0.5)
    after = now(page)
    assert after != before
    found = wait(page, f"return {box}.querySelector('.found').textContent")
    assert found == "2 of 7 matrices, 0 of 0 other tensors"
    recipe = load_recipe(exported(page, tmp_path))
    assert set(recipe.experts) == {"code", "maths", "prose", "merged"}
    api.run_recipe(recipe, tmp_path / "made")
    kept = covmerge.report(tmp_path / "made").inspection.retention()
    expected = {name: kept[name] for name in SCALES}
    # Shown to a tenth of a percent.
    assert {name: own[0] for name, own in after.items()} == pytest.approx(expected, abs=6e-4)


def test_an_expert_is_left_out_and_the_recipe_goes_on(page, tmp_path):
    page.find_element("css selector", "input[aria-label='merge maths']").click()
    shown = now(page)
    recipe = exported(page, tmp_path)
    assert set(load_recipe(recipe).experts) == {"code", "prose"}
    with served(recipe) as url:
        opened(page, url)
        assert {name: own[0] for name, own in now(page).items()} == {
            name: own[0] for name, own in shown.items() if name != "maths"
        }


def test_presets(page):
    press(page, "As merged")
    for kept, as_merged in now(page).values():
        assert kept == as_merged
    press(page, "Mean")
    mean = now(page)
    press(page, "Sum")
    assert now(page) != mean


def test_all_weights_0_is_told(page):
    for name in SCALES:
        page.execute_script(MOVE, f"{name}, all layers", 0)
    press(page, "Show it")
    told = wait(page, "return document.getElementById('problem').textContent")
    assert "all weights are 0" in told
    assert not page.find_element("id", "text").is_displayed()


def test_patterns_are_those_of_a_recipe(page):
    names = ["h.0.mlp", "h.10.mlp", "h.[0].mlp", "a]b", "x-y", "", "é.\U0001d54f", "h\n"]
    patterns = [
        *("*", "", "h.?.mlp", "h.*.mlp", "h.[0-9].mlp", "h.[!0].mlp", "h.[[]0].mlp", "[", "a[]]b"),
        *(
            "[a-z]*",
            "[!]a]*",
            "x[-]y",
            "x[a-]y",
            "*.?",
            "**p",
            "h.[0",
            "é*",
            "[!a-w]-y",
            "h?",
            "*0*m*p",
        ),
    ]
    found = page.execute_async_script(
        "const [names, patterns, done] = arguments; import('./prediction.js').then(m =>"
        "done(names.map(n => patterns.map(p => m.matches(n, p)))))", names, patterns
    )  # fmt: skip
    assert found == [[fnmatchcase(name, p) for p in patterns] for name in names]
    literal = page.execute_async_script(
        "const [names, done] = arguments; import('./prediction.js').then(m =>"
        "done(names.map(n => m.literally(n))))", names
    )  # fmt: skip
    assert all(fnmatchcase(name, p) for name, p in zip(names, literal, strict=True))


def test_nothing_is_logged_and_nothing_loaded_from_elsewhere(browser, url):
    opened(browser, url)
    assert all(address.startswith(url) for address in asked_for(browser))
    assert logged(browser) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@at_every_width
def test_it_is_read_at_every_width(browser, url, size, scheme, tmp_path):
    opened(browser, url, size, scheme)
    press(browser, "Other weights for some layers")
    press(browser, "Show it")
    wait(browser, "return !document.getElementById('text').hidden")
    assert hard_to_read(browser) == []
    check_width(browser, size)
    small = browser.execute_script(
        "return [...document.querySelectorAll('button, input, select')].filter(e => e.checkVisibility())"
        ".filter(e => e.getBoundingClientRect().height < 16).map(e => e.outerHTML)"
    )
    assert small == []
    (tmp_path / "page.png").write_bytes(picture(browser, size[0]))


def test_everything_has_a_name_and_is_reached_by_the_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    press(page, "Other weights for some layers")
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"slider", "spinbutton", "checkbox", "radio", "button", "combobox", "textbox", "table"}
    unnamed = [
        node
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in roles
        and not node.get("name", {}).get("value")
    ]
    assert [n for n in unnamed if n["role"]["value"] != "table"] == []
    slider = page.find_element("css selector", "input[aria-label='code, all layers']")
    shown = now(page)
    slider.send_keys(Keys.HOME)
    assert now(page) != shown
    # From the top, Tab comes to every control, and on.
    page.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    seen = set()
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        seen.add(page.execute_script("return document.activeElement.id"))
    assert {"add", "download", "show"} <= seen


def test_names_are_text(browser, tmp_path):
    torch.manual_seed(0)
    base = {HOSTILE: torch.randn(4, 4), "norm.weight": torch.ones(4)}
    save_file(base, tmp_path / "base.safetensors")
    for name in ("a", "b"):
        moved = {n: w + 0.1 * torch.randn(w.shape) for n, w in base.items()}
        save_file(moved, tmp_path / f"{name}.safetensors")
    recipe = tmp_path / "<b>recipe.yml"
    recipe.write_text(
        "base: ./base.safetensors\nexperts: {a: ./a.safetensors, b: ./b.safetensors}\n"
    )
    with served(recipe) as url:
        opened(browser, url)
        press(browser, "Other weights for some layers")
        browser.execute_script(
            "const select = document.querySelector('.chooser select'); select.selectedIndex = 1 +"
            "[...new Set([...select.options].map(o => o.value))].filter(v => v.startsWith('role')).length"
        )
        press(browser, "Choose")
        count = wait(browser, "return document.querySelector('.found').textContent")
        assert re.match(r"1 of 1 matrices, 0 of 1 other|0 of 1 matrices, 1 of 1 other", count)
        assert browser.execute_script("return document.querySelectorAll('img, main b').length") == 0
        assert browser.title == "<b>recipe.yml: covmerge view"
        assert "onerror" in browser.page_source
        assert logged(browser) == []
