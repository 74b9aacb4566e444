"""The commands of the lab, as covmerge finds them."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from covmerge.cli.extensions import GROUP, LAB
from tests.cli.runs import covmerge, words
from tests.cli.test_light import WITHOUT_TORCH


def test_they_are_those_that_covmerge_knows_by_name():
    found = {entry.name for entry in entry_points(group=GROUP) if entry.dist.name == "covmerge-lab"}
    assert found == LAB
    assert "Commands of covmerge-lab" in words(covmerge("--help").stdout)


@pytest.mark.parametrize("name", sorted(LAB))
def test_help_does_not_wait_for_torch(name):
    code = WITHOUT_TORCH.format(arguments=[name, "--help"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert f"covmerge {name}" in done.stdout
