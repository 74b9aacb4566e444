"""The example package, installed by pip: everywhere that ours are."""

import json
import shutil

import pytest

from tests.cli.runs import flags, save_plain, write_recipe

pytestmark = pytest.mark.slow

RECIPE = """
method: example_median
parameters: {scale: 0.5}
before: [{example_clip: {at: 0.9}}]
after: [rescale]
"""
BY_RECIPE = """
method: example_median
parameters: {scale: 0.5}
before: [example_clip]
after: [rescale]
"""


@pytest.fixture
def models(tmp_path):
    return save_plain(tmp_path, experts=("a", "b", "c"))


def test_it_is_listed_and_has_a_page(installed, run):
    listed, page, step = run(
        [installed],
        ["methods"],
        ["methods", "example_median"],
        ["methods", "example_clip", "--json"],
    )
    words = " ".join(listed.stdout.split())
    for text in ("example_median", "Take the middle of", "example_clip", "Cut off each update's"):
        assert text in words
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert "W̄ = W₀ + scale · median_t Δ_t" in page.stdout
    assert "factor of the median" in page.stdout
    assert "covmerge-example-method 0.1.0" in page.stdout
    assert step.json["when"] == "before"
    assert step.json["from"] == "covmerge-example-method 0.1.0"
    assert step.json["parameters"][0]["allowed"] == "number > 0 ≤ 1"


def test_it_is_merged_by_and_recorded(installed, run, models):
    recipe, out = write_recipe(models, RECIPE, experts=("a", "b", "c")), models / "out"
    own = flags(models, experts=("a", "b", "c"))
    steps = ["--method=example_median", "--set=scale=0.5", "--after=rescale"]
    dry, _, verified, _, _, _ = run(
        [installed],
        ["merge", recipe, "--dry-run"],
        ["merge", recipe, out, "--report"],
        ["verify", out, "--deep"],
        ["report", out, "--html", models / "again.html"],
        ["merge", *own, *steps, "--before=example_clip", models / "by_flags"],
        ["merge", write_recipe(models, BY_RECIPE, ("a", "b", "c")), models / "by_recipe"],
    )
    assert "example_clip + example_median + rescale" in " ".join(dry.stdout.split())
    manifest = json.loads((out / "covmerge.json").read_text())
    assert [own["name"] for own in manifest["extensions"]] == ["example_median", "example_clip"]
    for own in manifest["extensions"]:
        assert (own["distribution"], own["version"]) == ("covmerge-example-method", "0.1.0")
        assert len(own["code"]) == 64
    card = (out / "README.md").read_text()
    assert "is not covmerge's own method: covmerge-example-method 0.1.0" in card
    assert "is not covmerge's own step: covmerge-example-method 0.1.0" in card
    assert "before the method: Cut off each update's largest entries." in card
    for page in (out / "report.html", models / "again.html"):
        assert "example_median" in page.read_text()
        assert "Cut off each update" in page.read_text()
    assert "recomputed" in verified.stdout
    one, other = (
        (models / n / "model.safetensors").read_bytes() for n in ("by_flags", "by_recipe")
    )
    assert one == other


def test_it_is_compared(installed, run, models):
    given = ["compare", *flags(models, experts=("a", "b", "c")), "--json", "--after=rescale"]
    two, everything = run([installed], [*given, "--methods=average,example_median"], given)
    norms = {row["method"]: row["norm"] for row in two.json["methods"]}
    assert list(norms) == ["average", "example_median"]
    mean = sum(two.json["update_norms"].values()) / 3
    assert norms["average"] == pytest.approx(mean, rel=0.1)
    assert "steps after the method: rescale" in two.json["notes"]
    assert "example_median" in [row["method"] for row in everything.json["methods"]]


def test_it_passes_the_checks(installed, script):
    script(
        [installed],
        "from covmerge.testing import *; check_method('example_median'); check_step('example_clip')",
    )


def test_it_is_missing_where_it_is_not_installed(run, models):
    recipe = write_recipe(models, RECIPE, experts=("a", "b", "c"))
    ran = run([], ["merge", recipe, "--dry-run"], code=2)
    assert "there is no method 'example_median'" in ran.stderr


def test_a_resume_after_an_upgrade_is_refused(installed, script, models, tmp_path):
    """The version, and the code, of an outside method are part of the plan's digest."""
    recipe = write_recipe(models, RECIPE, experts=("a", "b", "c"))
    digest = (
        "from covmerge.front.api import plan_recipe; from covmerge.plan.recipe import load_recipe; "
        f"print(plan_recipe(load_recipe({str(recipe)!r}))[0].digest({{}}))"
    )
    before = script([installed], digest)
    upgraded = tmp_path / "upgraded"
    shutil.copytree(installed, upgraded)
    assert script([upgraded], digest) == before
    (info,) = upgraded.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.1.0", "Version: 0.2.0"))
    newer = script([upgraded], digest)
    assert newer != before
    code = upgraded / "covmerge_example_method" / "__init__.py"
    code.write_text(code.read_text() + "\n# changed\n")
    assert script([upgraded], digest) not in (before, newer)
