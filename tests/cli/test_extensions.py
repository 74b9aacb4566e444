"""Commands of other packages: found by entry point, and never a traceback."""

import re
import shutil
import sys
from importlib import invalidate_caches
from importlib.metadata import entry_points

import pytest

from covmerge.front.cli.commands import GROUP, LAB
from tests.advised import advice
from tests.cli.runs import covmerge, words
from tests.forked import printed

COMMANDS = '''
from typing import Annotated
import typer
from covmerge.errors import InputError

def greet(name: str, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Say good day."""
    if name == "nobody":
        raise InputError("nobody is there: name somebody")
    print(f"good day {name}" + "!" * loud)
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay a package on the path, as an installer would; the lab, if it is installed, is not seen."""

    def installed(package, module, code, **commands):
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{function}" for name, function in commands.items()]
        (about / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        monkeypatch.delitem(sys.modules, module, raising=False)
        invalidate_caches()

    def seen(**chosen):
        return [e for e in entry_points(**chosen) if (tmp_path / f"{e.module}.py").exists()]

    monkeypatch.setattr("covmerge.front.cli.commands.entry_points", seen)
    monkeypatch.syspath_prepend(tmp_path)
    return installed


def test_a_command_of_another_package(install):
    install("covmerge-greeter", "greeter", COMMANDS, greet="greet")
    shown = words(covmerge("--help").stdout)
    assert "Commands of covmerge-greeter" in shown
    assert "greet Say good day." in shown
    assert covmerge("greet", "Ada", "--loud").stdout == "good day Ada!\n"
    assert "Usage: covmerge greet" in covmerge("greet", "--help").stdout
    ran = covmerge("greet", "nobody", code=2)
    assert (ran.stdout, ran.stderr) == ("", "error: nobody is there: name somebody\n")


def test_a_name_of_covmerge_is_not_given_away(install):
    install("covmerge-greeter", "greeter", COMMANDS, methods="greet")
    ran = covmerge("--help")
    said = "warning: the command 'methods' of covmerge-greeter is left out: covmerge has one"
    assert said in words(ran.stderr)
    assert "ace" in covmerge("methods").stdout


def test_two_packages_with_one_name(install, tmp_path):
    install("covmerge-one", "one", COMMANDS, greet="greet")
    install("covmerge-two", "two", COMMANDS, greet="greet")
    said = words(covmerge("greet", "Ada", code=2).stderr)
    assert said.startswith("error: covmerge-")
    assert re.search(advice("{} both have a command '{}': uninstall one of them"), said)
    assert "both have a command 'greet'" in words(covmerge("--help").stderr)
    shutil.rmtree(tmp_path / "covmerge_two-1.0.dist-info")
    assert covmerge("greet", "Ada").stdout == "good day Ada\n"


@pytest.mark.parametrize(
    ("code", "function", "reason"),
    [
        ("import nothing_of_this_name", "greet", "ModuleNotFoundError: No module named"),
        ("raise SystemError('no luck')", "greet", "SystemError: no luck"),
        (COMMANDS, "gret", "AttributeError: module 'greeter' has no attribute 'gret'"),
        ("greet = 1", "greet", "TypeError: "),
    ],
)
def test_a_package_that_is_broken_is_named_and_hinders_nothing(
    install, code, function, reason, tmp_path
):
    install("covmerge-greeter", "greeter", code, greet=function)
    said = f"the command 'greet' of covmerge-greeter cannot be used ({reason}"
    assert words(covmerge("greet", "Ada", "--loud", code=2).stderr).startswith(f"error: {said}")
    ran = covmerge("--help")
    assert words(ran.stderr).startswith(f"warning: {said}")
    again = advice("cannot be used ({}: {}): install that package again, or uninstall it")
    assert re.search(again, words(ran.stderr))
    assert "verify" in ran.stdout
    assert covmerge("schema").stderr == ""
    for info in tmp_path.glob("*.dist-info"):
        shutil.rmtree(info)
    assert covmerge("--help").stderr == ""
    install("covmerge-greeter", "greeter", COMMANDS, greet="greet")
    assert covmerge("greet", "Ada").stdout == "good day Ada\n"


def test_a_package_that_ends_the_program(install, tmp_path):
    install("covmerge-greeter", "greeter", "def greet():\n    raise SystemExit(4)", greet="greet")
    said = advice(
        "nothing was finished: leave out what uses it (`covmerge methods` names the packages)"
    )
    assert re.search(said, words(covmerge("greet", code=2).stderr))
    assert covmerge("methods").stderr == ""
    for info in tmp_path.glob("*.dist-info"):
        shutil.rmtree(info)
    install("covmerge-greeter", "greeter", COMMANDS, greet="greet")
    assert covmerge("greet", "Ada").stdout == "good day Ada\n"


def test_a_command_that_nobody_has(install):
    install("covmerge-greeter", "greeter", COMMANDS, greet="greet")
    assert "No such command 'meet'" in covmerge("meet", code=2).stderr


@pytest.mark.parametrize("name", sorted(LAB))
def test_without_the_lab_its_commands_say_where_they_are(install, name):
    said = words(covmerge(name, "--any", "thing", code=2).stderr)
    told = advice(
        "`covmerge {}` is in a package of its own, which is not installed: pip install cov"
    )
    assert said.startswith(f"error: `covmerge {name}`") and re.search(told, said)
    install("covmerge-lab", "lab", COMMANDS, **{name: "greet"})
    assert covmerge(name, "Ada").stdout == "good day Ada\n"


def test_other_packages_are_not_asked_for_a_command_of_covmerge():
    code = (
        "import sys, covmerge.front.cli.commands as e; e.entry_points = None\n"
        "from covmerge.front.cli import app; app(['schema'])"
    )
    printed(code)
