"""A short run of the campaign of hostile inputs, the same every time."""

import json
from pathlib import Path

import pytest

from tests.campaigns.readers import READERS
from tests.forked import printed, run

HOME = Path(__file__).parent.parent.parent
PROGRAM = "import sys; from tests.campaigns.hostile import main; sys.exit(main(sys.argv[1:]))"
# These load transformers, which takes longer than all inputs of the others, or wait for a server.
SLOW = (
    *("config.json", "GGUF", "quantised", "tokenizer", "whole merge", "bucket", "Hub"),
    *("large tensors", "remote"),
)


def campaign(readers, count):
    named = [word for reader in readers for word in ("--reader", reader)]
    given = (*named, "--seed", 7, "--count", count, "--minutes", 60)
    done = run(PROGRAM, *given, path=[HOME, HOME / "src"], cwd=HOME)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {count * len(readers)} |" in done.stdout


@pytest.mark.parametrize("count", [10, pytest.param(25, marks=pytest.mark.nightly)])
def test_readers_keep_their_promise(count):
    campaign([name for name in READERS if name not in SLOW], count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_readers_that_take_longer_keep_it_too(count):
    campaign(SLOW, count)


@pytest.mark.slow
def test_what_is_guided_by_coverage():
    pytest.importorskip("atheris")
    given = ("--reader", "journal", "--minutes", 0.1)
    program = PROGRAM.replace("hostile", "guided")
    done = run(program, *given, path=[HOME, HOME / "src"], cwd=HOME)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, row = done.stdout.splitlines()
    name, inputs, first, last = (own.strip() for own in row.strip("|").split("|")[:4])
    assert name == "journal" and int(inputs) > 10 and int(last) >= int(first) > 50


_IMPORTS = """
import json, os, sys
from pathlib import Path
sys.dont_write_bytecode = False
from tests.campaigns.readers import IN, Reader
from tests.campaigns.sandbox import Sandbox
home, packages = Path.cwd(), sys.argv[1]
for name in (IN, "out", "tmp", "cache", "outside"):
    Path(name).mkdir()
sys.path.insert(0, packages)
spoken = os.dup(1)
def read(path):
    import first_imported_here
found = Sandbox(Reader(lambda: None, read), home).read({"file": b""})
os.write(spoken, json.dumps(found).encode())
"""


def test_what_python_writes_of_an_import_is_no_fault(tmp_path):
    """As of protobuf, where its bytecode does not lie there yet."""
    home, packages = tmp_path / "home", tmp_path / "packages"
    home.mkdir()
    packages.mkdir()
    (packages / "first_imported_here.py").write_text("")
    told = json.loads(printed(_IMPORTS, packages, path=[HOME, HOME / "src"], cwd=home))
    assert (told["outcome"], told["kind"]) == ("read", None), told
    assert not (packages / "__pycache__").exists()
