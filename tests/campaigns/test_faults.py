"""Short runs of the campaigns of faults, the same every time but for the instants that a clock chooses."""

from pathlib import Path

from tests.forked import run

HOME = Path(__file__).parent.parent.parent
PROGRAM = "import sys; from tests.campaigns.{} import main; sys.exit(main(sys.argv[1:]))"


def campaign(name, *arguments):
    done = run(PROGRAM.format(name), *arguments, path=[HOME, HOME / "src"], cwd=HOME)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_merge_keeps_its_promises_whatever_happens_to_it():
    given = ("--form", "model", "--executor", "threads", "--trials", 1, "--minutes", 60)
    assert "| kill -9 between two steps | threads | 5 |" in campaign("faults", *given, "--seed", 7)


def test_an_output_in_a_bucket_keeps_them_too():
    faults = ("bucket vanishes", "kill -9 at a request to a bucket")
    named = [word for fault in faults for word in ("--fault", fault)]
    given = (*named, "--form", "bucket", "--executor", "threads", "--trials", 1, "--minutes", 60)
    assert "| bucket vanishes | threads | 1 |" in campaign("faults", *given, "--seed", 7)


def test_any_order_of_merges_kills_resumes_reports_and_pushes():
    assert "| kill -9 |" in campaign("stateful", "--examples", 8, "--steps", 20)


def test_a_scored_comparison_and_a_search_are_gone_on_with():
    said = campaign("scored", "--trials", 1, "--seed", 3)
    assert "| `compare` | 1 | 1 | 0 |" in said and "| `search` | 1 | 1 | 0 |" in said
