"""`make test` and CI run every part, and fail if one of them did."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = [
    "ruff check",
    "ruff format --check",
    "pyright --pythonpath",
    "lint-imports",
    "mkdocs build --strict",
    "python -m pytest",
]
BY_DAY = ("nothing", "lint-imports", "python -m pytest")
# So that an image is small, or that a sandbox is left as it was: our own files are compiled all the same.
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
STUB = """#!/bin/sh
[ -z "$PYTHONDONTWRITEBYTECODE" ] || exit 1
echo "$(basename "$0") $*" >> "$RAN"
case "$(basename "$0") $*" in "$FAILS"*) exit 1;; esac
"""


@pytest.fixture
def clone(tmp_path):
    """Makefile and CI script, with a .venv whose programs only say that they ran."""
    if not (ROOT / "Makefile").exists() or shutil.which("make") is None:
        pytest.skip("needs make and a clone")
    locked = [f"requirements/{name}.txt" for name in ("torch", "uv", "dev")]
    others = ("README.md", "tests/examples.py", ".ci/run")
    for name in ("Makefile", "pyproject.toml", "lab/pyproject.toml", *locked, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("ruff", "pyright", "lint-imports", "mkdocs", "python"):
        (binaries / name).write_text(STUB)
        (binaries / name).chmod(0o755)
    for stamp in (".ready", ".compiled"):
        (tmp_path / ".venv" / stamp).touch()
    # CI looks for a browser before.
    for name in ("chromium", "chromedriver"):
        (tmp_path / name).symlink_to("/bin/true")
    return tmp_path


# The others start `make test`, or the same parts.
@pytest.mark.parametrize(
    ("command", "fails"),
    [
        *((["make", "test"], fails) for fails in ("nothing", *PARTS)),
        *(
            pytest.param(command, fails, marks=() if fails in BY_DAY else pytest.mark.nightly)
            for command in (["make", "nightly"], [".ci/run"])
            for fails in ("nothing", *PARTS)
        ),
    ],
    ids=str,
)
def test_one_part_that_fails_hides_no_other(clone, command, fails):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ran = clone / "ran"
    paths = f"{clone}:{kept['PATH']}"
    done = subprocess.run(
        command,
        cwd=clone,
        env={**kept, "PATH": paths, "RAN": str(ran), "FAILS": fails, **NO_BYTECODE},
    )
    said = ran.read_text().splitlines()
    assert [part for part in PARTS if not any(line.startswith(part) for line in said)] == []
    assert len(said) == len(PARTS)
    assert (done.returncode != 0) == (fails != "nothing")
    assert any("--nightly" in line for line in said) == ("nightly" in command)
