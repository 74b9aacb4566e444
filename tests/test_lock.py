"""requirements/dev.txt is what pyproject.toml asks for: of what is asked for directly, offline."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11, as development takes
requirements = pytest.importorskip("packaging.requirements")
Requirement = requirements.Requirement
canonicalize_name = pytest.importorskip("packaging.utils").canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK, TORCH = ROOT / "requirements" / "dev.txt", ROOT / "requirements" / "torch.txt"
OWN = {"covmerge": ROOT / "pyproject.toml", "covmerge-lab": ROOT / "lab" / "pyproject.toml"}
DUE = "requirements/dev.txt is out of date: `make lock`"

if not LOCK.exists():
    pytest.skip("needs a clone", allow_module_level=True)


def _asked(name: str, extras: tuple[str, ...] = ()) -> Iterator[Requirement]:
    """What one of our packages asks for, and with its extras, those of our own packages resolved."""
    project = tomllib.loads(OWN[name].read_text())["project"]
    optional = project["optional-dependencies"]
    for line in (*project["dependencies"], *(own for extra in extras for own in optional[extra])):
        own = Requirement(line)
        if own.name in OWN:
            yield from _asked(own.name, tuple(sorted(own.extras)))
        else:
            yield own


def _locked() -> dict[str, tuple[list[str], str]]:
    """By package its versions (by Python there may be two), and all that is said of it."""
    found: dict[str, tuple[list[str], str]] = {}
    for block in re.split(r"\n(?=[a-zA-Z0-9])", LOCK.read_text())[1:]:
        name, version = re.match(r"(\S+)==(\S+)", block).groups()
        versions, told = found.get(name, ([], ""))
        found[name] = ([*versions, version], told + block)
    return found


ASKED = [own for name in OWN for own in _asked(name, ("dev",))]


def test_what_is_asked_for_is_locked_and_has_hashes():
    locked = {name: versions for name, (versions, _) in _locked().items()}
    locked["torch"] = [TORCH.read_text().strip().removeprefix("torch==")]
    for own in ASKED:
        versions = locked.get(canonicalize_name(own.name))
        assert versions, f"{own} is not locked; {DUE}"
        assert all(own.specifier.contains(version) for version in versions), f"{own}; {DUE}"
    for name, (_, told) in _locked().items():
        assert "--hash=sha256:" in told, name


def test_what_is_locked_is_asked_for():
    ours = re.compile(r"^    # (via| ) covmerge(-lab)?$", re.MULTILINE)
    direct = {name for name, (_, told) in _locked().items() if ours.search(told)}
    assert direct == {canonicalize_name(own.name) for own in ASKED} - {"torch"}, DUE
