"""The published numbers agree with each other, and every row can be run."""

from statistics import fmean

import pytest

from covmerge.errors import InputError
from covmerge.methods import registry
from covmerge.plan.recipe import parse_recipe
from covmerge_lab.reproduce.published import MEAN
from covmerge_lab.reproduce.tables import TABLES, choose_settings, find_table

SETTINGS = [
    pytest.param(setting, id=f"{table.name}-{setting.name}")
    for table in TABLES.values()
    for setting in table.settings
]


WRONG_MEANS = {("roberta-base", "Pre-trained")}  # as printed: 41.7, of columns whose mean is 42.7


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_has_the_mean_of_its_columns(setting):
    titles = [column.title for column in setting.columns]
    for row in setting.rows:
        assert set(row.published) <= {*titles, MEAN}
        if MEAN in row.published and set(titles) <= set(row.published):
            mean = fmean(row.published[title] for title in titles)
            wrong = (setting.name, row.title) in WRONG_MEANS
            assert (row.published[MEAN] != pytest.approx(mean, abs=0.25)) == wrong, row.title


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_row_is_a_recipe(setting):
    assert len({row.key for row in setting.rows}) == len(setting.rows)
    assert {column.expert for column in setting.columns} == set(setting.experts)
    for row in setting.rows:
        assert (row.kind == "merge") == bool(row.method)
        if row.method:
            registry.get(row.method).resolve(dict(row.parameters), None)
    parse_recipe(
        {
            "base": "base",
            "experts": dict.fromkeys(setting.experts, "expert"),
            "tensors": dict(setting.tensors),
            "rules": list(setting.rules),
        },
        origin=setting.name,
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_checkpoint_has_a_place_or_says_what_to_do(setting):
    for source in (setting.base, *setting.experts.values()):
        assert source.hub or "--expert NAME=" in source.where


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_the_default_is_predicted_to_score(setting):
    *published, ours = setting.rows
    assert (ours.method, ours.published) == ("auto", {})
    assert all(not row.predicted for row in published)
    experts = next(_mean(row) for row in published if row.kind == "experts")
    best = max(
        _mean(row)
        for row in published
        if row.kind == "merge" and registry.get(row.method).data == "none"
    )
    assert best - 0.5 * (experts - best) <= ours.predicted[MEAN] <= experts
    # The vision suites' files are no models that transformers runs.
    assert ours.base_inputs == (setting.family != "clip")
    assert ours.base_inputs <= (ours.predicted[MEAN] >= best)


def _mean(row):
    return row.published.get(MEAN, fmean(row.published.values()))


def test_nearest_names():
    with pytest.raises(InputError, match="Did you mean 'ace/table2'"):
        find_table("ace/tabel2")
    with pytest.raises(InputError, match="Did you mean 'roberta-base'"):
        choose_settings(find_table("ace/table3"), "roberta-bas")
