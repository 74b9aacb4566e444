"""The page of `covmerge view` in a real browser: moved, read, exported, and the export merged."""

import base64
import json
import re
import time
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.resources import files

import pytest
import torch
import yaml
from safetensors.torch import save_file

import covmerge
from covmerge.front import api
from covmerge.front.viewer import ViewJob, write_html
from covmerge.front.viewer.scene import Choice, Group, choice_of
from covmerge.plan.recipe import load_recipe
from tests.report.browsing import (
    SCHEMES,
    asked_for,
    at_every_width,
    check_width,
    hard_to_read,
    logged,
    show,
)
from tests.report.merges import checkpoints

pytestmark = pytest.mark.slow

SCALES = {"code": 0.02, "maths": [0.05, 0.3, 0.05], "prose": 0.1}
HOSTILE = "layers.0.</script><img src=x onerror='document.title=1'>\u202e&amp;.weight"
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


def written(path, folder):
    """Write the page of an output or a recipe; return its address."""
    page = folder / "view.html"
    write_html(ViewJob(path).run(), page)
    return page.as_uri()


def calls(browser, script, function, given):
    """Call a function of one of the page's scripts, on no page, with each list of arguments."""
    source = (files("covmerge.front.viewer") / "page" / script).read_bytes()
    address = f"data:text/javascript;base64,{base64.b64encode(source).decode()}"
    show(browser, "data:text/html,<p>")
    return browser.execute_async_script(
        "const [address, name, given, done] = arguments;"
        "import(address).then(m => done(JSON.parse(given).map(own => m[name](...own))))",
        *(address, function, json.dumps(given)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("viewed")
    base, experts = checkpoints(folder, SCALES, blocks=3)
    covmerge.merge(base, experts, "ties", folder / "out")
    return folder


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    return written(folder / "out", tmp_path_factory.mktemp("page"))


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
    opened(page, written(recipe, tmp_path))
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


def test_patterns_are_those_of_a_recipe(browser):
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
    pairs = [(name, pattern) for name in names for pattern in patterns]
    found = calls(browser, "prediction.js", "matches", pairs)
    assert found == [fnmatchcase(*pair) for pair in pairs]
    literal = calls(browser, "prediction.js", "literally", [[name] for name in names])
    assert all(fnmatchcase(name, p) for name, p in zip(names, literal, strict=True))


SOURCES = [["b", "/m/b"], ["a", "/m/a"], ["2", "/m/2"]]


def chosen(method="task_arithmetic", a=1.0, b=1.0, **given):
    return Choice(method=method, weights={"b": b, "a": a, "2": 1.0}, **given)


def group(*patterns, a=1.0, b=1.0, scale=1.0):
    return Group(patterns=patterns, weights={"b": b, "a": a, "2": 1.0}, scale=scale)


def recipe_of(browser, choice, folder, sources=SOURCES, **fixed):
    """The recipe that the page writes of a choice, as it is read."""
    scene = {"sources": sources, "recipe": {"base": "/m/base", **fixed}}
    (text,) = calls(browser, "recipe.js", "recipeText", [[scene, asdict(choice)]])
    (folder / "recipe.yml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "recipe.yml")


@pytest.mark.parametrize(
    "choice",
    [
        chosen("average"),
        chosen("average", a=0.25, b=3.0),
        chosen(scale=0.3),
        chosen(scale=0.0),
        chosen(a=1e-7, b=1e6, scale=1.25e-9),
        chosen(groups=(group("*.mlp.*", a=0.0, b=0.0),)),
        chosen(scale=0.5, groups=(group("*.mlp.*", "h.0.*", a=2.0), group("x", scale=0.1))),
        chosen(groups=(group("*.mlp.*", a=2.0, b=1.5), group("[[]a: #'\"", scale=2.0))),
    ],
)
def test_a_choice_is_a_recipe_and_that_recipe_is_the_choice(browser, choice, tmp_path):
    found = recipe_of(browser, choice, tmp_path)
    assert found.base == "/m/base"
    assert {name: own.source for name, own in found.experts.items()} == dict(SOURCES)
    assert list(found.experts) == ["b", "a", "2"]
    assert choice_of(found) == choice


def test_what_every_name_matches_is_said_of_all(browser, tmp_path):
    choice = chosen(scale=0.5, groups=(group("*.mlp.*", "h.0.*", a=2.0), group("*", scale=0.1)))
    again = choice_of(recipe_of(browser, choice, tmp_path))
    assert (again.scale, len(again.groups)) == (0.1, 1)


@pytest.mark.parametrize("name", ["a", "yes", "Null", "1e3", "0x1", "1.5", "2026-01-01", "a-b.c"])
def test_names_are_read_as_they_are(browser, name, tmp_path):
    choice = Choice(method="task_arithmetic", weights={name: 0.5}, scale=1.0)
    found = recipe_of(browser, choice, tmp_path, [[name, "/m/a"]], output={"dtype": "bfloat16"})
    assert {n: e.source for n, e in found.experts.items()} == {name: "/m/a"}
    assert found.output.dtype == "bfloat16"


# fmt: off
TEXTS = [
    "yes", "1e3", "- a", "a: b", "a #b", "*a", "&a", "!a", "%a", "{a", "'", '"', "\\", "~", "a ",
    "", "C:\\a", "é", "\U0001d54f", "a\nb", "a\u2028b", "a\u0085b", "a\u202eb", "\ufeffa", "\x7f", "./.a",
]
# fmt: on


def test_texts_are_read_as_they_are(browser):
    rules = [{"match": text, text: {"deep": [text, [], {}, None, True]}} for text in TEXTS]
    scene = {"sources": [["a", "/m/a"]], "recipe": {"base": "/m/base", "rules": rules}}
    choice = {"method": "average", "weights": {"a": 1.0}, "groups": []}
    (text,) = calls(browser, "recipe.js", "recipeText", [[scene, choice]])
    assert yaml.safe_load(text)["rules"] == rules


def test_experts_without_a_weight_are_left_out_and_rules_stay(browser, tmp_path):
    rules = [{"match": "*.up.*", "use": "base"}, {"role": "norm", "use": "base"}]
    found = recipe_of(browser, chosen(a=0.0), tmp_path, rules=rules, tensors={"missing": "base"})
    assert list(found.experts) == ["b", "2"]
    assert [(rule.match, rule.use) for rule in found.rules] == [("*.up.*", "base"), (None, "base")]
    assert found.tensors.missing == "base"


def test_the_mean_of_one_is_itself(browser, tmp_path):
    choice = Choice(method="average", weights={"a": 0.5, "b": 0.0})
    (only,) = recipe_of(browser, choice, tmp_path).experts.values()
    assert only.weight == 1.0


def test_nothing_is_logged_and_nothing_loaded_from_elsewhere(browser, url):
    opened(browser, url)
    assert asked_for(browser) == {url}
    assert logged(browser) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@at_every_width
def test_it_is_read_at_every_width(browser, url, size, scheme):
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
    opened(browser, written(recipe, tmp_path))
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
