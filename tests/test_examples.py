"""The Python of README.md and docs/ is what a type checker accepts, and its names are there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import covmerge
from tests.forked import printed

ROOT = Path(covmerge.__file__).parents[2]
SOURCES = Path(covmerge.__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

# What the examples take from around them.
PREAMBLE = """\
import torch

base_model = model1 = model2 = torch.nn.Linear(2, 2)
w0 = w1 = w2 = A1 = A2 = B1 = B2 = torch.zeros(2, 2)
"""

# What is public is called by its short name, whatever was imported before.
CALLS = """\
import covmerge
import covmerge.run.verification
import covmerge.plan.statistics

covmerge.verify("./merged").raise_if_failed()
covmerge.collect("./code", "texts.jsonl", "code.covstats.safetensors")
covmerge.push("./merged", "org/name")
covmerge.inspect("./base", {"code": "./code"}).faults
covmerge.extract("./base", "./code", "./lora", rank=8, allow=["unchanged-expert"])
covmerge.merge("./base", ["./code", "./math"]).stats["totals"]["merged_norm"]
covmerge.merge("./base", ["./code"]).tensors["fc.weight"].shape
nothing: None = covmerge.merge("./base", ["./code"], "ace", "./merged", eps=1e-4).tensors
seconds: float = covmerge.merge("./base", ["./code"]).run["compute_seconds"]
"""

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
    (folder / "calls.py").write_text(CALLS)
    count = 0
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
            count += 1
            name = f"{page.stem.lower()}_{count}.py"
            (folder / name).write_text(f"{PREAMBLE}\n{code}", encoding="utf-8")
    assert count >= 2, "no examples were found"
    return folder


def accepted(command, **given):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_mypy_accepts_every_example(examples):
    config = examples / "mypy.ini"
    skipped = [*BEHIND, *(f"torch.{name}.*" for name in COMPILERS)]
    config.write_text(f"[mypy]\n[mypy-{','.join(skipped)}]\nfollow_imports = skip\n")
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command = [*mypy, "--cache-dir", str(examples / "cache"), str(examples)]
    accepted(command, env={**os.environ, "MYPYPATH": str(SOURCES)}, cwd=examples)


@pytest.mark.slow
def test_pyright_accepts_every_example(examples):
    project = {"include": ["."], "extraPaths": [str(SOURCES)]}
    (examples / "pyrightconfig.json").write_text(json.dumps(project))
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    accepted([*pyright, "--project", str(examples)])


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
