"""Every family of models through the command line, on stand-ins in the real ones' formats."""

import json

import pytest

from covmerge_lab.reproduce.report import STAND_INS
from tests.cli.runs import covmerge, words


def run(cache, table, *options):
    """Do a table again on stand-ins; its JSON, and the settings' rows by key."""
    offline = ("--cache", cache, "--stand-ins", "--threads", "1")
    ran = covmerge("reproduce", table, *offline, "--json", *options)
    (setting,) = ran.json["settings"]
    return ran.json, {row["row"]: row for row in setting["rows"]}


def check(rows, columns):
    """Every row has a value for each column, and differences where the paper has one too."""
    for row in rows.values():
        assert len(row["own"]) == columns + 1
        assert set(row["difference"]) == set(row["paper"])
        for column, difference in row["difference"].items():
            assert difference == pytest.approx(row["own"][column] - row["paper"][column])


def test_gpt2(tmp_path):
    result, rows = run(tmp_path, "ace/table2", "--methods", "ace", "--limit", "2")
    assert result["stand_ins"] and STAND_INS in result["notes"]
    check(rows, columns=7)
    assert rows["ace"]["paper"]["mean"] == 74.1
    folder = tmp_path / "stand-ins" / "ace-table2"
    assert json.loads((folder / "results.json").read_text()) == result
    assert STAND_INS in (folder / "results.md").read_text()
    assert len(list((folder / "gpt2" / "pass-1").glob("ace*/covmerge.json"))) == 1


@pytest.mark.slow
def test_roberta_and_its_terminal(tmp_path, monkeypatch):
    rows = "base,experts,average"
    options = ("--setting", "roberta-base", "--methods", rows, "--limit", "4")
    _, found = run(tmp_path, "ace/table3", *options)
    check(found, columns=8)
    # The experts' own share of their own score.
    own = found["experts"]["own"]
    assert {round(share, 9) for share in own.values()} <= {0.0, 100.0, round(own["mean"], 9)}
    offline = ("--cache", tmp_path, "--stand-ins", "--threads", "1")
    terminal = ("reproduce", "ace/table3", *offline, *options)
    monkeypatch.setenv("COLUMNS", "120")
    wide = covmerge(*terminal).stdout
    assert STAND_INS in wide.splitlines()[0]
    assert "0.0 59.2 85.8 47.0 45.4 63.9 48.0 71.2 52.6" in words(wide)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = words(covmerge(*terminal).stdout)
    assert "59.2" not in narrow and "52.6" in narrow and "too narrow" in narrow


@pytest.mark.slow
def test_statistics_are_collected_from_training_examples(tmp_path):
    _, rows = run(tmp_path, "ace/table2", "--methods", "fisher,regmean", "--limit", "2")
    check(rows, columns=7)
    assert len(list((tmp_path / "statistics" / "gpt2").iterdir())) == 7


@pytest.mark.slow
def test_t5(tmp_path):
    options = ("--setting", "t5-base", "--methods", "regmean,average,actmat")
    _, rows = run(tmp_path, "actmat/full", *options)
    assert "covmerge collect" in rows.pop("regmean")["note"]
    check(rows, columns=7)


@pytest.mark.slow
def test_one_method_twice(tmp_path):
    options = ("--setting", "t5-base", "--methods", "knots-iso_c,knots-tsv_m", "--limit", "1")
    _, rows = run(tmp_path, "actmat/lora", *options)
    assert list(rows) == ["knots-iso_c", "knots-tsv_m"]
    (reading,) = (tmp_path / "stand-ins" / "actmat-lora" / "t5-base").glob("pass-*")
    assert len([path for path in reading.iterdir() if path.is_dir()]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness and of its datasets
@pytest.mark.parametrize(("table", "columns"), [("ace/table8", 5), ("actmat/olmo", 5)])
@pytest.mark.usefixtures("prepared")
def test_language_models(tmp_path, table, columns):
    check(run(tmp_path, table, "--methods", "average", "--limit", "3")[1], columns=columns)


def open_clip_is_here():
    try:
        import open_clip  # noqa: F401
    except (ImportError, RuntimeError):  # torchvision of another torch is a RuntimeError
        return False
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of open_clip and what it imports
def test_clip_from_the_suites_pickled_modules(tmp_path):
    if not open_clip_is_here():
        pytest.skip("open_clip, or a torchvision that fits torch, is not installed")
    options = ("--setting", "ViT-B-32-8", "--methods", "base,experts,ace")
    _, rows = run(tmp_path, "ace/table1", *options)
    check(rows, columns=8)
    assert rows["ace"]["paper"]["MNIST"] == 99.46
    suite = tmp_path / "stand-ins" / "ViT-B-32-8" / "checkpoints" / "ViT-B-32"
    assert b"src.models.modeling" in (suite / "CarsVal" / "nonlinear_finetuned.pt").read_bytes()


def test_the_list():
    listed = covmerge("reproduce")
    for name in ("ace/table1", "ViT-L-14-20", "actmat/olmo", "58 GB", "--checkpoints, --data"):
        assert name in words(listed.stdout)
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert [entry["table"] for entry in covmerge("reproduce", "--json").json][:2] == [
        "ace/table1",
        "ace/table2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ace/table22"], "Did you mean 'ace/table2'"),
        (["ace/table2"], "--cache DIR"),
        (["ace/table2", "--cache", "c", "--methods", "acee"], "Did you mean 'ace'"),
        (["ace/table3", "--cache", "c", "--setting", "gpt2"], "no setting 'gpt2'"),
    ],
)
def test_what_is_wrong_is_named(arguments, message):
    assert message in covmerge("reproduce", *arguments, code=2).stderr
