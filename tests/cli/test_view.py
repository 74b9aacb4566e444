"""`covmerge view`: writes its page, opens it, and refuses what cannot be weighed."""

import pytest

import covmerge as library
from tests.cli.runs import covmerge as command
from tests.cli.runs import save_plain, write_recipe
from tests.cli.runs import words as flowing


@pytest.fixture
def opened(monkeypatch):
    found = []
    monkeypatch.setattr("webbrowser.open", found.append)
    return found


def test_the_page_is_beside_the_recipe_and_opened(tmp_path, opened):
    recipe = write_recipe(save_plain(tmp_path), "method: average")
    said = command("view", recipe).stdout
    assert said == f"Page: {tmp_path / 'view.html'}\n"
    assert opened == [(tmp_path / "view.html").as_uri()]
    assert command("view", recipe, "--no-browser").stdout == said  # over its own page
    assert len(opened) == 1


def test_the_page_in_an_output_is_covmerges_own(tmp_path, opened):
    save_plain(tmp_path)
    experts = {name: tmp_path / f"{name}.safetensors" for name in ("a", "b")}
    out = tmp_path / "out"
    library.merge(tmp_path / "base.safetensors", experts, "average", out)
    command("view", out, "--no-browser")
    assert (out / "view.html").exists()
    assert command("verify", out).stdout.endswith("every check passed\n")
    assert opened == []


def test_another_file_is_replaced_with_leave_only(tmp_path, opened):
    recipe = write_recipe(save_plain(tmp_path), "method: average")
    page = tmp_path / "page.html"
    page.write_text("mine")
    said = flowing(command("view", recipe, "--html", page, code=2).stderr)
    assert "is no page of weights of covmerge: pass --overwrite to replace it" in said
    assert page.read_text() == "mine"
    command("view", recipe, "--html", page, "--overwrite")
    assert opened == [page.as_uri()]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing", "nothing is not there: name a folder that `covmerge merge` wrote, or a recipe"),
        ("", "covmerge.json"),
        ("s3://bucket/out", "s3"),
    ],
)
def test_what_cannot_be_looked_at_is_bad_input(tmp_path, path, words):
    place = path if "://" in path else tmp_path / path
    assert words in flowing(command("view", place, "--no-browser", code=2).stderr)
    assert not list(tmp_path.glob("*.html"))
