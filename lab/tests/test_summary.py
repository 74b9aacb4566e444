from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import covmerge
from covmerge_lab import figures, report
from covmerge_lab.bench import BASE, EXPERTS, Outcome, Scored, load_outcome, save_outcome
from covmerge_lab.merging import TUNED, catalogue, passes, statistics_of
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.suite import Variant
from covmerge_lab.summary import summarise

TASKS = ("a", "b")
RIGHT = {  # of ten examples a task
    EXPERTS: (Section.BOUNDS, None, (10, 8)),
    BASE: (Section.BOUNDS, None, (1, 2)),
    "ace": (Section.DATA_FREE, Merge("ace"), (9, 4)),
    "auto": (Section.DATA_FREE, Merge("auto"), (9, 5)),
    "average": (Section.DATA_FREE, Merge("average"), (5, 4)),
    TUNED: (Section.TUNED, Merge("task_arithmetic", {"scale": 0.4}), (5, 4)),
}


def outcome(seed):
    def scores(right):
        return [1.0] * right + [0.0] * (10 - right)

    models = [
        Scored(
            Model(section, title, {}, merge, 1.5 if merge else None),
            {t: scores(max(0, n - seed)) for t, n in zip(TASKS, right, strict=True)},
            {} if title == EXPERTS else {"perplexity": 10.0 + seed},
        )
        for title, (section, merge, right) in RIGHT.items()
    ]
    return Outcome(Variant("full", seed), TASKS, tuple(models))


@pytest.fixture
def group():
    return summarise([outcome(0), outcome(1)])


def test_means_spread_and_shares_over_seeds(group):
    ace = group.row("ace")
    assert ace.accuracy == pytest.approx({"a": 0.85, "b": 0.35})
    assert ace.seeds == pytest.approx([0.65, 0.55]) and ace.mean.mean == pytest.approx(0.6)
    assert ace.spread == pytest.approx(0.0707, abs=1e-4)
    assert ace.of_experts == pytest.approx([(9 / 10 + 4 / 8) / 2, (8 / 9 + 3 / 7) / 2])
    assert ace.beyond_tuned.mean == pytest.approx(0.2)
    assert group.row("average").beyond_tuned.mean == 0
    assert group.row(TUNED).beyond_tuned is None
    assert ace.measures == {"perplexity": 10.5}


@pytest.mark.parametrize(("known", "share"), [((0, 8), 4 / 8), ((0, 0), 0.0)])
def test_a_task_that_its_expert_does_not_know_is_no_share(monkeypatch, known, share):
    monkeypatch.setitem(RIGHT, EXPERTS, (Section.BOUNDS, None, known))
    group = summarise([outcome(0)])
    assert group.row("ace").of_experts == [share]
    shown = figures.tasks(group).axes[0].texts
    assert len(shown) == 5 * sum(own > 0 for own in known)  # rows beside the experts'


def test_what_the_own_methods_are_above_every_other(group):
    below = {row.title: row.below for row in group.rows}
    assert below.pop("auto") == {}
    assert all(list(own) == ["auto"] for own in below.values())
    assert below["average"]["auto"].mean == pytest.approx(0.25)
    assert below[TUNED]["auto"].clear and not below["ace"]["auto"].clear


def test_rows_stand_by_section_and_the_best_first(group):
    assert [row.title for row in group.rows] == [EXPERTS, BASE, "auto", "ace", "average", TUNED]


def test_an_outcome_is_kept_for_the_same_code_only(tmp_path):
    path = tmp_path / "runs" / "full-0.json"
    assert load_outcome(path, "key", Variant("full", 0)) is None
    save_outcome(outcome(0), path, "key")
    kept = load_outcome(path, "key", Variant("full", 0))
    assert summarise([kept]).rows == summarise([outcome(0)]).rows
    assert load_outcome(path, "other", Variant("full", 0)) is None


def test_results_are_written_with_every_number(tmp_path, group):
    pictures = {"accuracy": figures.accuracy(group), "tasks": figures.tasks(group)}
    shown = figures.save(pictures, tmp_path)
    report.save(
        {"suite": "text", "command": "covmerge bench text", "accuracy": "of answers"},
        [group],
        shown,
        tmp_path,
    )
    text = (tmp_path / "README.md").read_text()
    made = f"Made by `covmerge bench text` with covmerge {covmerge.__version__}."
    assert f"{made} Accuracy is of answers.\n" in text
    assert "| ace | 85.0 | 35.0 | 60.0 ± 7.1 [" in text and "](accuracy.png)" in text
    assert "| less | auto |\n" in text and "\n| average | +25.0 [" in text
    assert (tmp_path / "results.json").read_text().count('"title"') == 6
    assert (tmp_path / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_figure_is_the_same_file(tmp_path, group):
    figures.save({name: figures.accuracy(group) for name in ("one", "two")}, tmp_path)
    assert Path(tmp_path / "one.png").read_bytes() == Path(tmp_path / "two.png").read_bytes()


def test_pictures_of_an_earlier_run_go_and_others_stay(tmp_path, group):
    (tmp_path / "README.md").write_text("![before](before.png)\n![kept](kept.png)\n")
    for name in ("before", "kept", "mine"):
        (tmp_path / f"{name}.png").write_bytes(b"another")
    shown = figures.save({name: figures.tasks(group) for name in ("kept", "new")}, tmp_path)
    assert shown == "![kept](kept.png)\n![new](new.png)"
    assert {path.name for path in tmp_path.glob("*.png")} == {"kept.png", "new.png", "mine.png"}
    assert (
        (tmp_path / "mine.png").read_bytes() == b"another" != (tmp_path / "kept.png").read_bytes()
    )


def test_a_run_of_many_tables_has_many_pictures():
    drawn = [plt.figure() for _ in range(21)]  # warnings are errors
    for figure in drawn:
        plt.close(figure)


def test_every_method_stands_in_the_table():
    from covmerge.methods import registry

    full, lora = catalogue("full"), catalogue("lora")
    names = {method.name for method in registry if method.sees == "updates"}
    assert {merge.method for merge in lora} == names
    assert {merge.method for merge in full} == names - {"knots", "core_space", "ctm", "ssr"}
    assert {merge.title for merge in full} >= {"ace", "ace eps=0.01"}


def test_a_pass_has_one_kind_of_statistics():
    merges = catalogue("lora")
    parts = passes(merges)
    assert sorted(m.title for part in parts for m in part) == sorted(m.title for m in merges)
    assert all(len({statistics_of(merge) for merge in part}) == 1 for part in parts)
    assert max(len(part) for part in parts) == 4
