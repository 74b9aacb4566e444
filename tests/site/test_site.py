"""What the site and the package's metadata may show: nothing fetched from elsewhere, no dead link."""

import importlib.util
import re
from types import ModuleType

import pytest

from tests.site.pages import ROOT


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"website_{name}", ROOT / "website" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs", reason="pip install 'covmerge[docs]'")
    return module("hooks")


@pytest.mark.parametrize(
    ("suffix", "text", "foreign"),
    [
        (".html", '<script defer src="https://cdn.example/x.js"></script>', True),
        (".html", "<script src=//cdn.example/x.js></script>", True),
        (".html", '<link rel="stylesheet" href="https://fonts.example/css">', True),
        (".html", '<link rel="canonical" href="https://covmerge.example/">', False),
        (".html", '<a href="https://arxiv.org/abs/2603.02945">', False),
        (".html", '<script src="../assets/x.js"></script>', False),
        (".css", "@import url(https://fonts.example/css)", True),
        (".css", "a{background:url(//host/x.png)}", True),
        (".css", "a{background:url(data:image/svg+xml,x)}", False),
        (".svg", '@font-face{src: url("https://host/f.woff2")}', True),
        (".svg", '<svg xmlns="http://www.w3.org/2000/svg">', False),
    ],
)
def test_what_a_browser_would_fetch_is_seen(hooks, suffix, text, foreign):
    assert (hooks.FOREIGN[suffix].search(text) is not None) == foreign


def test_the_build_refuses_it(hooks, tmp_path):
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.exceptions import PluginError

    config = MkDocsConfig()
    config.site_dir = str(tmp_path)
    (tmp_path / "a.html").write_text("<p>")
    hooks.on_post_build(config)
    (tmp_path / "b.html").write_text('<img alt="" src="http://host/x.png">')
    with pytest.raises(PluginError, match=r"b\.html would load .*host/x\.png"):
        hooks.on_post_build(config)


def test_flags_stay_on_one_line(hooks):
    html = hooks.on_page_content("<p><code>verify --deep OUT</code> -- <pre><code><span>--x</span>")
    assert 'verify <span class="flag">--deep</span> OUT' in html and html.count("flag") == 1


def test_every_option_has_a_line(hooks):
    text = hooks.command_line()
    for option in ("--max-memory", "--quantise", "--methods", "--deep"):
        assert f"`{option}" in text
    assert "```sh\ncovmerge merge recipe.yml OUT\n```" in text


def test_every_key_of_a_recipe_has_a_line(hooks):
    page = (ROOT / "docs" / hooks.RECIPE).read_text("utf-8")
    assert hooks._KEYS in page  # in its place
    text = hooks.recipe()
    for key in ("base", "experts", "rules", "tokenizer", "shard_size", "by_name"):
        assert key in text
    for target in re.findall(r"\]\(#(\w+)\)", text):
        assert f"## {target}" in text.lower()


def test_a_notebook_is_a_page_of_its_cells_and_what_they_showed():
    pytest.importorskip("mkdocs", reason="pip install 'covmerge[docs]'")
    outputs = [
        {"output_type": "stream", "text": ["1\n", "2\n"]},
        {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>"], "text/plain": ["x"]}},
        {"output_type": "display_data", "data": {"image/png": "iVBORw=="}},
        {"output_type": "execute_result", "data": {"text/plain": ["(3,)"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Words."]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
        {"cell_type": "code", "source": ["pass"], "outputs": []},
    ]
    pictures: dict[str, bytes] = {}
    text = module("notebooks").page({"cells": cells}, "first", pictures)
    assert text.startswith("# Title\n\nWords.\n\n```python\nprint(1)\n```\n\n```text\n1\n2\n```")
    assert '<div class="output">\n<b>x</b>\n</div>' in text and "```text\n(3,)\n```" in text
    assert pictures == {"first-0.png": b"\x89PNG"} and "(first-0.png)" in text
    assert text.endswith("[The notebook itself](first.ipynb)\n")


@pytest.fixture
def built(monkeypatch):
    """The metadata that a build makes, on GitHub or elsewhere."""
    plugins = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    core = pytest.importorskip("hatchling.metadata.core")

    def build(**address: str):
        for name in ("SERVER_URL", "REPOSITORY", "SHA"):
            monkeypatch.delenv(f"GITHUB_{name}", raising=False)
        for name, value in address.items():
            monkeypatch.setenv(f"GITHUB_{name}", value)
        return core.ProjectMetadata(str(ROOT), plugins).core

    return build


RELATIVE = re.compile(r"\]\((?!https?://|#)")


def test_a_release_has_no_relative_link(built):
    metadata = built(SERVER_URL="https://host", REPOSITORY="org/covmerge", SHA="abc")
    assert "](https://host/org/covmerge/blob/abc/docs/start.md)" in metadata.readme
    assert "](https://host/org/covmerge/raw/abc/docs/images/terminal.svg)" in metadata.readme
    assert not RELATIVE.search(metadata.readme)
    assert metadata.urls["Repository"] == "https://host/org/covmerge"


def test_the_lab_says_where_its_pages_are_without_links():
    assert not RELATIVE.search((ROOT / "lab" / "README.md").read_text("utf-8"))


def test_built_elsewhere_it_has_text_and_claims_no_address(built):
    metadata = built()
    assert not RELATIVE.search(metadata.readme) and not metadata.urls
    assert "Start" in metadata.readme and "terminal.svg" not in metadata.readme
