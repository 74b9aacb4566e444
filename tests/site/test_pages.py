"""Every command and every Python example of README.md and the pages, as it stands there.

They run in this process, in a folder with the models that the pages speak of, tiny ones. What is not run
is in `NOT_RUN`, with the reason, and a line there that no page has any more is an error.
"""

from __future__ import annotations

import copy
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from covmerge.methods import registry as methods
from covmerge.plan.recipe import load_recipe
from covmerge.steps import registry as steps
from tests.cli.runs import covmerge, save_plain, statistics_for
from tests.examples import PREAMBLE
from tests.site.pages import PAGES, Block, arguments, blocks, furnish

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")

NETWORK = "fetches from a package registry"
REPOSITORY = "is of a clone: CI runs it"
MINUTES = "trains models, for minutes to hours; lab/tests runs the same code on small ones"
DIFFUSION = "needs a model of diffusers: tests/e2e/test_diffusion.py runs the same"
QUANTISED = "needs a quantised base: tests/quantised runs the same"
SERVER = "needs a server: tests/remote and tests/cli/test_push.py run the same against one"
# How a command begins, or what stands in one.
NOT_RUN = {
    "pip install": NETWORK,
    "python -m venv": NETWORK,
    ". .venv": NETWORK,
    "make ": REPOSITORY,
    "cd lab": REPOSITORY,
    "python -m tests.": REPOSITORY,
    "covmerge bank": MINUTES,
    "covmerge bench": MINUTES,
    "covmerge study ": MINUTES,
    "covmerge reproduce ace": MINUTES,
    "covmerge evaluate": "runs lm-eval: lab/tests/test_evaluate.py does",
    "covmerge convert": "needs a pickled module: lab/tests/test_convert.py has some",
    "covmerge push": SERVER,
    "covmerge view": "opens a browser: tests/cli/test_view.py runs it",
}
NOT_HERE = {
    "demo-output/": MINUTES,
    "s3://": SERVER,
    "sd15/": DIFFUSION,
    "sdxl.": DIFFUSION,
    "fp8": QUANTISED,
    ".gguf": QUANTISED,
}
# Kinds of blocks that another test runs: the commands of clusters, and of every method.
ELSEWHERE = {
    ("docs/scale.md", "bash"): "tests/test_scale.py",
    ("docs/methods.md", "sh"): "test_the_methods",
}
# What a page takes for done.
BEFORE = {
    "docs/publishing.md": "covmerge merge --base ./base --expert code=./code --method average ./merged"
}
SHELL = ("sh", "bash")


# What makes the scripts of docs/start.md quick: a step of training, ten texts of the test.
SHORTER = {"range(60)": "range(1)", "[:500]": "[:10]"}


def reason(command: str) -> str | None:
    """Why a command is not run; None: it is."""
    bare = re.sub(r"\s#.*", "", command)
    found = [why for start, why in NOT_RUN.items() if bare.startswith(start)]
    found += [why for part, why in NOT_HERE.items() if part in bare]
    return found[0] if found else None


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("furnished")
    furnish(folder)
    return folder


@pytest.fixture
def place(furnished, tmp_path, monkeypatch):
    """A copy of the furnished folder, in which a page is read from its beginning."""
    shutil.copytree(furnished, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def run(command: str, place: Path) -> str:
    """Run one command in this process; its output stays away from where an earlier one lies."""
    words, to = arguments(command, place)
    assert words, f"not run, and not in NOT_RUN: {command}"
    if words[0] == "python":
        run_python(words[1:])
        return ""
    if words[1] in ("merge", "extract", "compare"):
        for word in words[2:]:
            if re.fullmatch(r"[\w./-]+", word) and (place / word / "covmerge.json").exists():
                shutil.rmtree(place / word)
    if "--out" in words:
        shutil.rmtree(place / words[words.index("--out") + 1], ignore_errors=True)
    printed = covmerge(*words[1:]).stdout
    if to is not None:
        to.write_text(printed)
    return printed


def run_python(words: list[str]) -> None:
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
        return
    kept, sys.argv[:] = sys.argv[:], words
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv[:] = kept
        sys.path.remove(here)


def do(block: Block, place: Path, scope: dict[str, object]) -> None:
    """Do what a block says."""
    if block.title is not None:
        text = block.text
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (place / block.title).write_text(text, "utf-8")
    elif block.kind == "python":
        exec(compile(block.text, "example", "exec"), scope)
    elif block.kind in SHELL:
        for command in block.commands():
            if reason(command) is None:
                run(command, place)
    elif block.kind == "yaml" and re.search("^(experts|run):", block.text, re.MULTILINE):
        (place / "example.yml").write_text(block.text, "utf-8")
        load_recipe(place / "example.yml")


@pytest.fixture
def own_methods_end():
    """What a page registers is there for the page alone."""
    before = [(registry, registry.names()) for registry in (methods, steps)]
    yield
    for registry, known in before:
        for name in set(registry.names()) - set(known):
            registry.unregister(name)


@pytest.mark.slow
@pytest.mark.usefixtures("own_methods_end", "no_pictures")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page, place):
    scope: dict[str, object] = {"__name__": __name__}
    exec(PREAMBLE, scope)
    scope |= {name: torch.randn(2, 2) for name in ("w0", "w1", "w2", "A1", "A2", "B1", "B2")}
    for name in ("model1", "model2"):
        scope[name] = model = copy.deepcopy(scope["base_model"])
        model.weight.data += 0.01 * torch.randn(2, 2)
    if page in BEFORE:
        run(BEFORE[page], place)
    for block in blocks(page):
        if (page, block.kind) not in ELSEWHERE:
            do(block, place, scope)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["steps", pytest.param("methods", marks=pytest.mark.nightly)])
def test_the_methods(of, tmp_path, monkeypatch):
    """Those of methods are the examples that tests/cli/test_methods.py runs every day."""
    save_plain(tmp_path)
    commands = [c for b in blocks("docs/methods.md") if b.kind == "sh" for c in b.commands()]
    commands = [c for c in commands if ("--method" in c) == (of == "methods")]
    assert commands
    for name in ("base", "a", "b"):
        (tmp_path / name.upper()).mkdir()
        target = tmp_path / name.upper() / "model.safetensors"
        shutil.copy(tmp_path / f"{name}.safetensors", target)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        method = re.search(r"--method (\S+)", command)
        for name, path in (statistics_for(method[1], tmp_path) if method else {}).items():
            path.rename(tmp_path / f"{name.upper()}.covstats.safetensors")
        run(command, tmp_path)


def test_what_is_not_run_is_there():
    commands = [c for page in PAGES for b in blocks(page) if b.kind in SHELL for c in b.commands()]
    assert [part for part in NOT_RUN if not any(c.startswith(part) for c in commands)] == []
    assert [part for part in NOT_HERE if not any(part in c for c in commands)] == []


def test_pages_with_tests_of_their_own_are_there():
    assert {page for page, _ in ELSEWHERE} | set(BEFORE) <= set(PAGES)
