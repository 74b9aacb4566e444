"""What `import covmerge` offers, in whatever order it is touched."""

import importlib
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import covmerge
from covmerge.base.settings import KEYS
from covmerge.base.types import Measured
from covmerge.errors import RecipeError
from covmerge.front.api import merge
from covmerge.front.keywords import (
    CompareKeywords,
    MergeKeywords,
    SearchKeywords,
    descriptions,
)
from tests.forked import printed


@pytest.mark.parametrize("name", covmerge.__all__)
def test_everything_public_is_there(name):
    assert getattr(covmerge, name) is not None


def test_methods_whatever_came_before():
    names = "print(covmerge.methods.names()[0], covmerge.methods.get('ace').name)"
    before = ("", "covmerge.merge", "import covmerge.methods")
    for first in before:
        assert printed(f"import covmerge; {first}\n{names}", anew=True) == "ace ace\n"


def test_importing_covmerge_does_not_import_torch():
    code = "import sys, covmerge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'mergee'"):
        covmerge.mergee  # noqa: B018
    with pytest.raises(AttributeError, match=r"from covmerge_lab\.regmean_pp import"):
        covmerge.collect_regmean_pp  # noqa: B018
    with pytest.raises(covmerge.errors.RecipeError, match=r"`regmean` with `off_diagonal: 0\.95`"):
        covmerge.methods.get("regmean++")


def test_help_lists_every_keyword():
    for function, keywords in (
        (merge, MergeKeywords),
        (covmerge.compare, CompareKeywords),
        (covmerge.search, SearchKeywords),
    ):
        for name in keywords.__annotations__:
            assert name in inspect.signature(function).parameters
            assert re.search(rf"^    {name}: \w", function.__doc__, re.MULTILINE)


def test_every_keyword_is_described_and_has_its_setting():
    told = descriptions(MergeKeywords)
    assert set(told) == set(MergeKeywords.__annotations__)
    of_run = {"last", "tokens", "tokens_per_step", "decay"}
    assert set(KEYS) - {"base", "method", "parameters", *of_run} <= set(told)


def test_help_shows_the_defaults_of_what_is_made_of_keywords():
    found = inspect.signature(covmerge.search).parameters
    assert (found["trials"].default, found["sampler"].default) == (60, "tpe")
    assert inspect.signature(covmerge.compare).parameters["scorers"].default == 1


STATE = {"w": torch.zeros(2, 2)}


@pytest.mark.parametrize("experts", ["./a", Path("a"), STATE, torch.nn.Linear(2, 2)])
def test_one_expert_that_is_in_no_list_is_said_to_be(experts):
    with pytest.raises(RecipeError, match=r"experts: .* pass a list"):
        covmerge.merge(STATE, experts, "average")


@pytest.mark.parametrize("name", ["keep", "allow", "before", "after"])
def test_a_text_is_no_list_of_its_letters(name):
    with pytest.raises(RecipeError, match=rf"{name}: 'ab\*' is no list: pass \['ab\*'\]"):
        covmerge.merge(STATE, [STATE], "average", **{name: "ab*"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantize": "nf4"}, "takes no 'quantize'. Did you mean 'quantise'"),
        ({"method": "ties", "thread": 2}, "takes no 'thread'. Did you mean 'threads'"),
        ({"method": "ace", "epss": 1e-4}, "no parameter 'epss'. Did you mean 'eps'"),
    ],
)
def test_arguments_are_found_by_the_nearest_name(given, said):
    with pytest.raises(RecipeError, match=said):
        merge({"w": torch.zeros(2, 2)}, [{"w": torch.eye(2)}, {"w": torch.eye(2)}], **given)


def test_none_is_no_source():
    state = {"w": torch.zeros(2, 2)}
    with pytest.raises(RecipeError, match="the base is None: pass a folder"):
        merge(None, [state])
    with pytest.raises(RecipeError, match="expert 'a' is None"):
        covmerge.inspect(state, {"a": None})


def test_the_old_name_of_the_experts_statistics_warns_and_works():
    group = covmerge.LinearGroup((torch.eye(2),), (1.0,))
    with pytest.warns(DeprecationWarning, match="measured is now LinearGroup.expert_statistics"):
        assert group.measured is group.expert_statistics
    data = (Measured(torch.eye(2), rows=4, total=2.0),)
    with pytest.warns(DeprecationWarning, match="measured is now LinearGroup.expert_statistics"):
        assert (
            covmerge.LinearGroup((torch.eye(2),), (1.0,), measured=data).expert_statistics == data
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("recompute.compute", "run.recompute"),
        ("twins", "maths.reference"),
        ("plan.build", "plan.planning.build"),
        ("methods.ace", "maths.methods.ace"),
        ("checkpoints", "files.checkpoints"),
    ],
)
def test_a_module_is_found_under_its_old_path(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, f"covmerge.{old}", raising=False)
    with warnings.catch_warnings(record=True) as said:  # a package on the way is said too
        warnings.simplefilter("always")
        found = importlib.import_module(f"covmerge.{old}")
    assert f"covmerge.{old} is now covmerge.{new}" in [str(each.message) for each in said]
    assert found is importlib.import_module(f"covmerge.{new}")


def test_what_was_never_there_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'covmerge\.nothing'"):
        importlib.import_module("covmerge.nothing")


@pytest.mark.parametrize("name", ["errors", "methods", "registry", "steps", "testing"])
def test_public_paths_have_what_lies_on_the_floors(name):
    public = importlib.import_module(f"covmerge.{name}")
    home = importlib.import_module(f"covmerge.{'base' if name == 'errors' else 'maths'}.{name}")
    names = getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
    assert names and all(getattr(public, n) is getattr(home, n) for n in names)


def test_the_module_and_the_table_of_one_name():
    """`covmerge.methods.registry` is a module to import from, and the table of methods as an attribute."""
    from covmerge.methods.registry import register

    assert covmerge.methods.registry is covmerge.methods.get.__self__
    assert register is covmerge.register
