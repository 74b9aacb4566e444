"""Recipes that are drawn: beside what mergekit made of some, and what must hold of all."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.errors import CovmergeError
from covmerge.plan.recipe import load_recipe
from covmerge.plan.recipe.load import import_recipe
from covmerge.plan.recipe.mergekit.reading import ImportLog
from covmerge.run.engine.options import RunOptions
from tests.forked import fork_workers
from tests.mergekit import differences, module_generator, token_generator
from tests.mergekit.agreement import assert_agrees, is_elementwise
from tests.mergekit.generator import drawn
from tests.mergekit.kept import FILES, digest, goldens, sampled
from tests.mergekit.models import save_models
from tests.mergekit.ours import merge, merge_in_memory

GOLDENS = [(kind, *golden) for kind in FILES for golden in goldens(kind)]
DOCS = Path(__file__).parents[2] / "docs" / "mergekit.md"
randoms = st.randoms(use_true_random=False)
plain = randoms.map(drawn) | randoms.map(module_generator.drawn)
with_tokens = randoms.map(token_generator.drawn)


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """In a folder of the models, where mergekit looks for them."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("models")
        save_models(folder)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def of_tokens(tmp_path_factory):
    """A folder of models of different vocabularies."""
    folder = tmp_path_factory.mktemp("tokens")
    token_generator.save_models(folder)
    return folder


@pytest.mark.parametrize(
    "golden",
    GOLDENS,
    ids=[f"{kind}-{seed}-{recipe['merge_method']}" for kind, seed, recipe, *_ in GOLDENS],
)
def test_equals_mergekit(golden, here, of_tokens, monkeypatch):
    """Bit for bit by methods whose bits are the same on every machine; else to rounding."""
    kind, seed, recipe, sha256, wanted = golden
    if kind == "tokens":  # rows are compared by token, and so with the files
        monkeypatch.chdir(of_tokens)
        tensors = merge(recipe, of_tokens, seed).tensors
    else:
        tensors = merge_in_memory(recipe, here, seed)
    if is_elementwise(recipe):
        assert digest(tensors) == sha256
    assert_agrees(sampled(tensors), wanted, recipe)


def test_all_methods_are_among_them():
    plain = [recipe for kind, _, recipe, *_ in GOLDENS if kind == "models"]
    kinds = {(recipe["merge_method"], "slices" in recipe) for recipe in plain}
    assert kinds == {(method, sliced) for method, _ in kinds for sliced in (False, True)}
    assert len(kinds) == 2 * 20
    for kind in FILES:
        assert len({recipe["merge_method"] for own, _, recipe, *_ in GOLDENS if own == kind}) == 20


@settings(max_examples=40)
@given(recipe=plain | with_tokens)
def test_what_import_prints_is_the_same_recipe(recipe):
    theirs = Path("their.yml")
    theirs.write_text(yaml.safe_dump(recipe, sort_keys=False))
    try:
        ours = import_recipe(theirs, ImportLog())
    except CovmergeError as error:
        assert str(error).startswith("their.yml")
        return
    printed = Path("ours.yml")
    printed.write_text(yaml.safe_dump(ours, sort_keys=False, allow_unicode=True))
    assert load_recipe(printed) == load_recipe(theirs)


@settings(max_examples=15)
@given(recipe=plain, seed=st.integers(0, 1000))
def test_a_recipe_is_merged_or_refused_by_name(recipe, seed, here):
    try:
        tensors = merge_in_memory(recipe, here, seed)
    except CovmergeError as error:
        assert len(str(error).split()) > 5
        return
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_processes_make_the_same_bytes(here, monkeypatch):
    """Of a stack and of random numbers."""
    fork_workers(monkeypatch)
    seed, recipe = next(
        (seed, recipe)
        for _, seed, recipe, *_ in GOLDENS
        if recipe["merge_method"] == "dare_ties" and "slices" in recipe
    )
    alone = merge(recipe, here, seed, RunOptions(threads=1))
    among = merge(recipe, here, seed, RunOptions(threads=1, workers=2))
    assert among.error is None
    assert digest(alone.tensors) == digest(among.tensors)


def test_rows_of_the_campaign_are_rows_of_the_documentation():
    cells = {line.split(" | ")[0].removeprefix("| ") for line in DOCS.read_text().splitlines()}
    assert set(differences.ROWS) <= cells
