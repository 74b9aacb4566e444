"""What installed packages announce: found when names are asked for, and named when it is broken."""

import re
import shutil

import pytest

from tests.advised import advice
from tests.cli.runs import flags, save_plain

pytestmark = pytest.mark.slow

GOOD = """
import covmerge
@covmerge.register("good")
def good(group):
    "Take the first."
    return group.updates[0].clone()
"""


def words(text):
    return " ".join(text.split())


def test_a_package_that_cannot_be_imported_is_named_and_spoils_nothing(package, run, tmp_path):
    package("broken", "import not_there_at_all", methods=["bad"])
    folder = package("working", GOOD, methods=["good"])
    own = flags(save_plain(tmp_path))
    asked, merged = run(
        [folder], ["methods", "bad"], ["merge", *own, "--method=bad", tmp_path / "no"], code=2
    )
    why = "method 'bad' is announced by the package broken 1.0, and importing broken fails: "
    assert asked.stderr.startswith(f"error: {why}ModuleNotFoundError: No module named 'not_there")
    said = advice("and importing {} fails: {}: {}. Repair it, or: pip uninstall {}")
    assert re.search(said, words(asked.stderr)) and "pip uninstall broken" in asked.stderr
    assert why in merged.stderr
    assert not (tmp_path / "no").exists()
    listed, as_json, merged, compared = run(
        [folder],
        ["methods"],
        ["methods", "--json"],
        ["merge", *own, "--method=good", tmp_path / "out", "--json"],
        ["compare", *own, "--json"],
    )
    said = words(listed.stdout)
    assert "announced by the package broken 1.0" in said
    assert "good Take the first." in said
    assert "working 1.0" in said
    assert "good" in [page["name"] for page in as_json.json]
    assert f"warning: {why}" in as_json.stderr
    assert merged.json["method"] == "good"
    assert "good" in [row["method"] for row in compared.json["methods"]]
    assert why in compared.json["left_out"]["bad"]
    shutil.rmtree(folder / "broken-1.0.dist-info")  # as it is uninstalled
    assert run([folder], ["methods"]).stderr == ""


@pytest.mark.parametrize("exits", ["raise SystemExit(3)", "1/0"])
def test_whatever_a_package_raises(exits, package, run):
    folder = package("odd", GOOD + exits, methods=["good"])
    asked = run([folder], ["methods", "good"], code=2)
    assert (
        "method 'good' is announced by the package odd 1.0, and importing odd fails" in asked.stderr
    )
    listed = run([folder], ["methods"]).stdout
    assert "ace" in listed
    assert "Take the first." not in listed  # what it registered before it failed


def test_names_of_two_packages(package, run):
    package("one", GOOD, methods=["good"])
    package("rival", GOOD, methods=["ace"])
    package("empty", "", methods=["nothing"])
    folder = package("two", GOOD, methods=["good"], version="2.0")
    names = ("good", "ace", "nothing")
    good, ace, nothing = run([folder], *(["methods", name] for name in names), code=2)
    said = advice("so it is not clear which is meant: uninstall one of them")
    assert re.search(said, words(good.stderr))
    assert "method 'good' is of two packages, one 1.0 and two 2.0" in good.stderr
    assert "method 'ace' is of two packages, covmerge itself and rival 1.0" in ace.stderr
    said = advice("and importing {} registers no such name: tell its authors")
    assert re.search(said, words(nothing.stderr))
    assert "package empty 1.0, and importing empty registers no such name" in nothing.stderr
    listed, other = run([folder], ["methods"], ["methods", "wudi"])
    assert "one 1.0 and two 2.0" in words(listed.stdout)
    assert "wudi" in other.stdout
    for one in ("two-2.0", "rival-1.0"):
        shutil.rmtree(folder / f"{one}.dist-info")
    (folder / "empty.py").write_text(GOOD.replace('"good"', '"nothing"'))  # its authors' next one
    for ran in run([folder], *(["methods", name] for name in names)):
        assert ran.stderr == ""


def test_nothing_is_imported_before_it_is_asked_for(package, script, run):
    folder = package("loud", "print('LOUD')\n" + GOOD, methods=["good"])
    assert "LOUD" not in run([folder], ["--help"]).stdout
    code = """
import covmerge
print(covmerge.merge.__name__, covmerge.methods.get('ace').name)
print(covmerge.methods.names()[0], covmerge.methods.names()[0])
"""
    assert script([folder], code) == "merge ace\nLOUD\nace ace\n"


def test_a_name_that_the_literature_has_and_we_have_not(package, run):
    folder = package("theirs", GOOD.replace('"good"', '"adamerging"'), methods=["adamerging"])
    assert "Take the first." in run([folder], ["methods", "adamerging"]).stdout


ENDS = """
import covmerge
@covmerge.register("ends")
def ends(group):
    "End the program."
    raise {0}
"""


COST_ENDS = """
import covmerge
def cost(d_out, d_in, count, itemsize):
    raise {0}
@covmerge.register("ends", cost=cost)
def ends(group):
    "Take the first."
    return group.updates[0].clone()
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "SystemExit(0)",
            "method 'ends' tried to end the program (SystemExit: 0) and gave nothing",
        ),
        ("MemoryError", "method 'ends' had no memory for its cost of a"),
    ],
)
def test_a_cost_that_ends_the_program_ends_the_merge_in_words(raised, said, package, run, tmp_path):
    folder = package("odd", COST_ENDS.format(raised), methods=["ends"])
    own = flags(save_plain(tmp_path))
    ran = run([folder], ["merge", *own, "--method=ends", tmp_path / "out"], code=2)
    assert f"error: {said}" in words(ran.stderr) and "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


EXIT = "SystemExit(0)", "method 'ends' tried to end the program (SystemExit: 0)"
FULL = "MemoryError", "method 'ends' had no memory for updates of"


# An exit is what could end a worker; an error comes out of it like any other.
@pytest.mark.parametrize(
    ("raised", "said", "workers"),
    [(*EXIT, 1), (*EXIT, 2), (*FULL, 1), pytest.param(*FULL, 2, marks=pytest.mark.nightly)],
)
def test_a_method_that_ends_the_program_ends_the_merge_in_words(
    raised, said, workers, package, run, tmp_path
):
    folder = package("odd", ENDS.format(raised), methods=["ends"])
    own = flags(save_plain(tmp_path))
    out = tmp_path / "out"
    ran = run([folder], ["merge", *own, "--method=ends", f"--workers={workers}", out], code=2)
    assert said in words(ran.stderr) and "Traceback" not in ran.stderr
    assert "error: 'layers." in ran.stderr
    assert not out.exists() and not (tmp_path / ".out.covmerge-partial").exists()
