"""The Python of README.md and docs/ is what type checkers accept, and its names are there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import covmerge
from tests.examples import write
from tests.forked import printed

ROOT = Path(covmerge.__file__).parents[2]
SOURCES = Path(covmerge.__file__).parents[1]

# Libraries of which no public signature has a type: mypy would read all of them.
BEHIND = ("huggingface_hub.*", "matplotlib.*", "numpy.*", "peft.*", "sympy.*", "transformers.*")
# Packages of torch that `import torch` reads and its tensors are not declared in: half of mypy's time.
COMPILERS = (
    "_decomp",
    "_dynamo",
    "_export",
    "_functorch",
    "_higher_order_ops",
    "_inductor",
    "_prims",
)
COMPILERS += (
    "_refs",
    "_subclasses",
    "ao",
    "distributed",
    "export",
    "fx",
    "nested",
    "onnx",
    "testing",
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with a file for each example."""
    folder = tmp_path_factory.mktemp("examples")
    write(folder)
    assert len(list(folder.iterdir())) > 10
    return folder


def test_make_types_checks_them(examples):
    """With all else, as pyright would read torch and covmerge a second time for them alone."""
    _, _, types = (ROOT / "Makefile").read_text().partition("\ntypes: ")
    write_them, check, *_ = types.splitlines()[1:]
    assert write_them.split()[1:] == ["tests/examples.py", "build/examples"]
    assert "/pyright " in check and check.endswith(" src lab/src build/examples")
    assert all(path.read_text().startswith("# pyright: ") for path in examples.glob("*.py"))


@pytest.mark.slow
@pytest.mark.nightly
def test_mypy_accepts_every_example(examples):
    config = examples / "mypy.ini"
    skipped = [*BEHIND, *(f"torch.{name}.*" for name in COMPILERS)]
    config.write_text(f"[mypy]\n[mypy-{','.join(skipped)}]\nfollow_imports = skip\n")
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command = [*mypy, "--cache-dir", str(examples / "cache"), str(examples)]
    environment = {**os.environ, "MYPYPATH": str(SOURCES)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=examples)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_the_functions_whatever_came_before():
    before = (
        "import covmerge.run.verification.verify, covmerge.plan.statistics.collect",
        "covmerge.verify, covmerge.collect",
        "from covmerge import collect, verify",
    )
    names = "callable(covmerge.verify), callable(covmerge.collect), callable(covmerge.inspect)"
    for first in before:
        program = f"import covmerge\n{first}\nprint({names})"
        assert printed(program, anew=True) == "True True True\n"
