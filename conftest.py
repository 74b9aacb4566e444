"""What all tests share, those in docstrings too: nothing of the machine or its user decides them."""

import gc
import os
import re
from collections import defaultdict
from collections.abc import Generator, Iterator
from copy import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jinja2 import Environment
from typer.main import get_command

from tests.covering import EVERYTHING, covering

# covmerge, which takes seconds, is imported in fixtures: the process that hands out the tests needs none.

# The same examples everywhere and every time, however slow the machine is meanwhile. To search on:
# `pytest --hypothesis-profile=default`.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# What the machine says of its terminal, and the user's place on the Hugging Face Hub. Here and not in
# a fixture: much of it is read on import.
_OF_THE_USER = re.compile(
    "COLUMNS|LINES|TERMINAL_WIDTH|FORCE_COLOR|NO_COLOR|PY_COLORS|GITHUB_ACTIONS|TTY_.*|HF_.*"
)
for name in filter(_OF_THE_USER.fullmatch, list(os.environ)):
    del os.environ[name]
os.environ["TERM"] = "xterm"
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"  # our servers are here

# Campaigns of packages that are extras of their own: their docstrings are not read without them.
_CAMPAIGNS = {"atheris": "guided.py", "mutmut": "mutation.py"}
collect_ignore = [
    f"tests/campaigns/{c}" for name, c in _CAMPAIGNS.items() if find_spec(name) is None
]


@pytest.fixture(scope="session", autouse=True)
def cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither find nor leave anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """What outlives a loss of power is no test's subject, and every merge waits for it.

    Processes that tests start, to kill them for example, wait as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """The command line is built once, and not for every command that a test runs in this process."""
    built = cache(get_command)
    with pytest.MonkeyPatch.context() as patch:
        # A copy each, as it keeps the commands that other packages have at the time.
        patch.setattr("typer.testing._get_command", lambda app: copy(built(app)))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_template() -> Iterator[None]:
    """PEFT writes a model card beside each adapter: its template is compiled once, and not every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Environment, "compile", cache(Environment.compile))
        yield


@pytest.fixture(scope="session", autouse=True)
def little_is_measured() -> Iterator[None]:
    """A dry run measures the machine by small products; tests/cli/test_dry_run.py has it as it is."""
    from covmerge.front.cli import machine

    small = {"_PRODUCT_SIDE": 64, "_EIGEN_SIDE": 32, "_SECONDS": 0.0, "_HASHED_BYTES": 2**16}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(machine, name, value)
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no pictures, which take nearly all the time of one; tests/report looks at them."""
    monkeypatch.setattr("covmerge.front.reporting.pictures._drawn", lambda report, kinds: iter(()))


@pytest.fixture
def forget() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    from covmerge.methods import registry
    from covmerge.steps import registry as steps

    before = {table: set(table.names()) for table in (registry, steps)}
    yield
    for table, names in before.items():
        for name in set(table.names()) - names:
            table.unregister(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one switch between the tests of `make test` and all of them."""
    parser.addoption("--nightly", action="store_true", help="run every test (make nightly)")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported, which ask how many examples to run."""
    if _everything(config):
        os.environ[EVERYTHING] = "1"
    else:
        os.environ.pop(EVERYTHING, None)


def _everything(config: pytest.Config) -> bool:
    return config.getoption("--nightly") or any("::" in own for own in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: what is imported is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list, list]:
    """A file of tests without examples in docstrings is not looked through for these, too."""
    found = yield
    if file_path.name.startswith("test_") and b">>>" not in file_path.read_bytes():
        return [own for own in found if type(own) is pytest.Module]
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs at night alone, and put files with slow tests first.

    So that of several workers none waits for the slow ones at the end. A test that is named (`FILE::TEST`)
    runs with all its parameters.
    """
    if not _everything(config):
        left_out = _nightly(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _nightly(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests that are marked `nightly`, and of those marked `covering` the rows that are not chosen."""
    left_out = {item for item in items if item.get_closest_marker("nightly")}
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        (strength,) = product[0].get_closest_marker("covering").args
        chosen = covering([_axes(item) for item in product], strength)
        left_out |= set(product) - {product[place] for place in chosen}
    return left_out


def _axes(item: pytest.Function) -> dict[str, tuple[int, ...]]:
    """What it is given, by decorator or fixture; the names of one decorator are one axis."""
    given = item.callspec.params
    names = [
        mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for mark in item.iter_markers("parametrize")
    ]
    together = {name for own in names for name in own}
    names += [[name] for name in given if name not in together]
    # By identity: parameters need not be hashable.
    return {",".join(own): tuple(id(given[name]) for name in own) for own in names}


def pytest_collection_finish() -> None:
    """What was imported lives to the end: nobody need look through it for garbage time and again."""
    gc.collect()
    gc.freeze()
