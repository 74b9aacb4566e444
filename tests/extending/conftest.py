"""The example package, really installed, and packages that are not as they should be."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import Ran
from tests.forked import printed

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "covmerge-example-method"


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder that pip installed the example into, without a network."""
    source = tmp_path_factory.mktemp("source") / EXAMPLE.name  # building leaves files beside it
    shutil.copytree(EXAMPLE, source)
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", target, source], check=True)
    return target


@pytest.fixture
def package(tmp_path):
    """Makes packages that announce names: `package("broken", "import nothing", methods=["m"])`."""

    def make(name, code, methods=(), version="1.0"):
        (tmp_path / f"{name}.py").write_text(code, "utf-8")
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{method} = {name}" for method in methods]
        (info / "entry_points.txt").write_text("\n".join(["[covmerge.methods]", *lines, ""]))
        return tmp_path

    return make


# Commands one after another in one process.
SERVE = """
import json, sys
from typer.testing import CliRunner
from covmerge.front.cli import app
results = [CliRunner().invoke(app, command, prog_name="covmerge") for command in json.loads(sys.argv[1])]
print(json.dumps([[ran.exit_code, ran.stdout, ran.stderr] for ran in results]))
"""


@pytest.fixture
def script():
    """Runs Python in a process that has some folders on its path; returns what it prints."""

    def script(folders, code, given=""):
        return printed(code, given, path=folders, environment={**os.environ, "COLUMNS": "80"})

    return script


@pytest.fixture
def run(script):
    """Runs `covmerge` commands in a process that has some folders on its path."""

    def run(folders, *commands, code=0):
        given = json.dumps([list(map(str, command)) for command in commands])
        found = [Ran(*one) for one in json.loads(script(folders, SERVE, given).splitlines()[-1])]
        assert [ran.code for ran in found] == [code] * len(found), found
        return found[0] if len(found) == 1 else found

    return run
