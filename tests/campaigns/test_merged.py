"""Short runs of the campaigns of merges whose results are known, the same every time."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from covmerge.errors import TensorError
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import parse_recipe
from tests.campaigns import foreign, loras, outcomes, packed, stages, unions
from tests.cli.runs import save_plain, statistics_for


@pytest.mark.parametrize("campaign", [packed, loras, unions, stages, foreign])
def test_files_are_merged_right_or_refused_by_name(campaign):
    tallies = outcomes.run(campaign.KINDS, 7, first=0, count=2, seconds=600.0)
    assert not any(own.failures for own in tallies.values()), outcomes.table(tallies)
    assert all(own.counts.total() == 2 for own in tallies.values())


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_fisher_information_of_fewer_rows_than_its_tensor_is_refused(tmp_path, rows):
    """What was missing was taken as 0, and the merge was said to be verified."""
    save_plain(tmp_path)
    files = statistics_for("fisher", tmp_path)
    with safe_open(files["b"], "pt") as file:
        metadata = file.metadata()
    held = load_file(files["b"])
    name = "fisher/layers.1.mlp.up_proj.weight"
    save_file({**held, name: held[name][:rows].clone()}, files["b"], metadata=metadata)
    recipe = {
        "base": str(tmp_path / "base.safetensors"),
        "experts": {
            name: {"source": str(tmp_path / f"{name}.safetensors"), "statistics": str(files[name])}
            for name in "ab"
        },
        "method": "fisher",
    }
    with pytest.raises(TensorError, match=rf"has statistics \[{rows}, 8\] of 'layers.1"):
        run_recipe(parse_recipe(recipe), tmp_path / "out")
