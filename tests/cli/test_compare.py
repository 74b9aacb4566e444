import json
from collections import Counter

import pytest
from rich.cells import cell_len

from covmerge.methods import registry
from covmerge.run.engine.inputs import read_inputs
from tests.cli.runs import covmerge, flags, save_plain, statistics_for, words, write_recipe


def test_all_methods_without_data(models):
    ran = covmerge("compare", *flags(models), "--out", models / "out")
    for name in registry.names():
        assert name in ran.stdout
    folders = {path.name for path in (models / "out").iterdir() if path.is_dir()}
    own = [m for m in registry if m.sees == "updates" and not m.writes_masks]
    without = {m.name for m in own if m.data == "none"}
    assert folders == without
    for folder in folders:
        covmerge("verify", models / "out" / folder)
    assert max(map(cell_len, ran.stdout.splitlines())) <= 80


def test_the_table_as_json(models):
    ran = covmerge(
        *("compare", *flags(models), "--methods", "average,ace"),
        *("--set", "ace.eps=0.01", "--json", "--out", models / "out"),
    )
    average, ace = ran.json["methods"]
    assert (average["method"], ace["method"]) == ("average", "ace")
    assert ace["parameters"]["eps"] == 0.01
    assert set(ace["cosines"]) == {"a", "b"}
    assert ace["folder"] == str(models / "out" / "ace")
    manifest = json.loads((models / "out" / "covmerge.json").read_text("utf-8"))
    assert manifest["comparison"]["methods"] == ran.json["methods"]


def test_one_method_several_times(models):
    wanted = ",".join(f"task_arithmetic(scale={tenth / 10})" for tenth in range(1, 11))
    given = ["compare", *flags(models), "--methods", f"{wanted},average", "--out", models / "out"]
    rows = covmerge(*given, "--json").json["methods"]
    assert [row["label"] for row in rows[:2]] == [
        "task_arithmetic-scale=0.1",
        "task_arithmetic-scale=0.2",
    ]
    norms = [row["norm"] for row in rows[:10]]
    assert norms == pytest.approx([norms[0] * tenth for tenth in range(1, 11)], rel=1e-5)
    for row in rows:
        assert row["folder"] == str(models / "out" / row["label"])
        covmerge("verify", row["folder"])
    assert f"such as {models / 'out'}/task_arithmetic-scale=0.1" in words(
        covmerge("verify", models / "out", code=2).stderr
    )
    covmerge(*given, "--overwrite")  # its folders are covmerge's own
    table = covmerge("compare", *flags(models), "--methods", f"{wanted},average").stdout
    assert "task_arithmetic-scale=0.7" in table
    assert max(map(cell_len, table.splitlines())) <= 80


def test_a_row_names_the_parameters_beside_its_method(models):
    """A list of numbers cannot be in the name of a folder: only its method is named."""
    wanted = "task_arithmetic(scale=0.5),linear(weight=[0.5, 0.5])"
    rows = covmerge("compare", *flags(models), "--methods", wanted, "--json").json["methods"]
    assert [row["label"] for row in rows] == ["task_arithmetic-scale=0.5", "linear"]


def test_a_sweep_reads_every_tensor_once(models, monkeypatch):
    read = Counter()

    def counted(items, sources):
        read[items[0].key] += 1
        return read_inputs(items, sources)

    monkeypatch.setattr("covmerge.run.engine.threads.read_inputs", counted)
    wanted = ",".join(f"task_arithmetic(scale={tenth / 10})" for tenth in range(1, 11))
    covmerge("compare", *flags(models), "--methods", wanted)
    assert set(read.values()) == {1}


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ("ties,ties", "named twice"),
        ("ties(density=0.2),ties(density=0.20)", "'ties-density=0.2' is named twice"),
        ("ties(density", "is not NAME(KEY=VALUE,...)"),
        ("ties()", "'ties()' is not NAME(KEY=VALUE,...)"),
        ("ties,,average", "a name is missing"),
        ("all,ties", "`all` stands alone"),
        ("ties(density)", "is not NAME(KEY=VALUE,...)"),
        ("ties(densty=1)", "has no parameter 'densty'"),
        ("tiies", "Did you mean 'ties'"),
        ("", "a name is missing"),
    ],
)
def test_what_cannot_be_compared(models, wanted, word):
    assert word in covmerge("compare", *flags(models), "--methods", wanted, code=2).stderr


def test_without_an_output_only_the_table(models):
    before = sorted(models.iterdir())
    covmerge("compare", *flags(models), "--methods", "average,ties")
    assert sorted(models.iterdir()) == before


def test_with_data(models):
    files = statistics_for("regmean", models)
    stats = [f"--stats={expert}={file}" for expert, file in files.items()]
    ran = covmerge("compare", *flags(models), *stats, "--json")
    compared = {row["method"] for row in ran.json["methods"]}
    assert {"regmean", "lot"} <= compared
    own = {method.name for method in registry if method.sees == "weights"}
    assert set(ran.json["left_out"]) == {"emr", "fisher", *own}


def test_a_recipe(models):
    recipe = write_recipe(models, "rules:\n  - {match: 'embed*', use: base}")
    ran = covmerge("compare", recipe, "--methods", "average,actmat", "--json")
    assert [row["method"] for row in ran.json["methods"]] == ["average", "actmat"]


def test_many_experts_still_fit_in_80_columns(tmp_path):
    names = [f"an-expert-with-a-long-name-{number}" for number in range(6)]
    save_plain(tmp_path, experts=names, growth=1.5)
    ran = covmerge("compare", *flags(tmp_path, names), "--methods", "average,dare_task_arithmetic")
    assert max(map(cell_len, ran.stdout.splitlines())) <= 80
    assert all(ran.stdout.count(name) == 2 for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "acee"], "there is no method 'acee'. Did you mean 'ace'?"),
        (["--methods", "ace,ace"], "method 'ace' is named twice"),
        (["--methods", "ace", "--set", "eps=1"], "whose parameter? Write --set METHOD.eps=VALUE"),
        (["--methods", "ace", "--set", "ties.density=0.1"], "'ties', which is not compared"),
        (["--methods", "ace", "--set", "ace.epss=1"], "Did you mean 'eps'"),
        (["--methods", "regmean"], "needs the statistics of expert 'a'"),
        (["--methods", "adamerging"], "no merge without training"),
    ],
)
def test_bad_requests(models, arguments, message):
    before = sorted(models.iterdir())
    ran = covmerge("compare", *flags(models), *arguments, "--out", models / "out", code=2)
    assert message in words(ran.stderr)
    assert sorted(models.iterdir()) == before
