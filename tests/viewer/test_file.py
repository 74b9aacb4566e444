"""The page as a file: whole, of its own kind, and with nothing of a stranger's in its markup."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from covmerge.errors import InputError
from covmerge.front.viewer import ViewJob, check_page, write_html

HOSTILE = "layers.0.</script><script>alert(1)</script>.weight"


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    for size, name in enumerate(("base", "a"), start=1):
        save_file({HOSTILE: size * torch.eye(4)}, folder / f"{name}.safetensors")
    recipe = folder / "<b>recipe.yml"
    recipe.write_text("base: ./base.safetensors\nexperts: {a: ./a.safetensors}\n")
    return ViewJob(recipe).run()


def test_names_of_strangers_are_in_the_data_alone(scene, tmp_path):
    write_html(scene, tmp_path / "view.html")
    text = (tmp_path / "view.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "<b>" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    told = json.loads(data[1])
    assert told["title"] == "<b>recipe.yml"
    assert [layer["tensor"] for layer in told["layers"]] == [HOSTILE]


def test_it_loads_nothing(scene, tmp_path):
    write_html(scene, tmp_path / "view.html")
    text = (tmp_path / "view.html").read_text()
    assert "default-src 'none'; script-src 'sha256-" in text
    assert not re.search(r"\b(src|href)=\"(?!data:)", text)
    assert not re.search(r"(?m)^(import|export) ", text)


def test_only_such_a_page_is_replaced(scene, tmp_path):
    page = tmp_path / "view.html"
    write_html(scene, page)
    first = page.read_bytes()
    write_html(scene, page)
    assert page.read_bytes() == first
    page.write_text("<p>mine")
    with pytest.raises(InputError, match="is no page of weights of covmerge: pass overwrite=True"):
        check_page(page)
    assert page.read_text() == "<p>mine"
    write_html(scene, page, overwrite=True)
    assert page.read_bytes() == first
