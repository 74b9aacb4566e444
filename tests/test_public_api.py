"""What `import covmerge` offers, in whatever order it is touched."""

import subprocess
import sys

import pytest

import covmerge
from tests.forked import printed


@pytest.mark.parametrize("name", covmerge.__all__)
def test_everything_public_is_there(name):
    assert getattr(covmerge, name) is not None


def test_methods_whatever_came_before():
    names = "print(covmerge.methods.names()[0], covmerge.methods.get('ace').name)"
    before = ("", "covmerge.merge", "import covmerge.methods")
    for first in before:
        assert printed(f"import covmerge; {first}\n{names}") == "ace ace\n"


def test_importing_covmerge_does_not_import_torch():
    code = "import sys, covmerge; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'mergee'"):
        covmerge.mergee  # noqa: B018
