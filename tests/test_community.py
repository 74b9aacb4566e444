"""What stands beside the code says what the code says: versions, papers, links, Pythons."""

import re
from pathlib import Path

import pytest
import yaml

import covmerge
from covmerge.methods import registry

ROOT = Path(covmerge.__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PAGES = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "privacy.md"]


def read(path):
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_citation_is_of_this_version_and_of_the_papers_that_methods_name():
    cited = read(ROOT / "CITATION.cff")
    assert cited["version"] == covmerge.__version__ and cited["license"] == "Apache-2.0"
    papers = {registry.get(name).reference for name in ("ace", "actmat")}
    for paper in papers:
        (own,) = (each for each in cited["references"] if each["url"].endswith(paper.arxiv))
        named = [f"{who['given-names']} {who['family-names']}" for who in own["authors"]]
        assert own["title"] == paper.title and tuple(named) == paper.authors


def test_the_matrix_begins_with_the_oldest_python_that_is_promised():
    matrix = read(WORKFLOW)["jobs"]["installed"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    promised = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert promised is not None and matrix["python"][0] == promised[1]
    assert len(matrix["os"]) == 3


@pytest.mark.parametrize("form", ["bug", "method"])
def test_what_a_form_asks_for_has_a_name_of_its_own(form):
    body = read(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml")["body"]
    names = [field["id"] for field in body if field["type"] != "markdown"]
    assert len(set(names)) == len(names) > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text("utf-8"))
    assert links and not [link for link in links if not (page.parent / link).exists()]


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    kinds = set(re.findall(r"^### (\w+)$", text, re.M))
    assert "## [Unreleased]" in text and covmerge.__version__ in text
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
