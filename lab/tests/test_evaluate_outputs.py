"""What covmerge wrote, evaluated: the card has the results, and all else stays as it was."""

import pytest
from huggingface_hub import ModelCard

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge_lab.card import BEGIN
from covmerge_lab.harness import evaluate
from tests.export.test_card import merge, save

LICENCE = "license: mit"


@pytest.mark.parametrize("name", ["e", BEGIN])
def test_results_are_added_to_the_card(tmp_path, name):
    expert = save(tmp_path / name, 1, LICENCE)
    card, _ = merge(tmp_path, save(tmp_path / "base", 0, LICENCE), {"e": expert})
    folder = tmp_path / "out"
    (folder / "config.json").write_text("{}")
    for value in (0.5, 0.75):
        evaluate(folder, tasks=["reading"], callback=lambda _, v=value: {"accuracy": v})
    after = ModelCard.load(folder / "README.md")
    assert after.text.startswith(card.text.rstrip())
    assert after.text.count("| reading | accuracy |") == 1
    (entry,) = after.data.eval_results
    assert entry.metric_value == 0.75
    before = card.data.to_dict()
    assert {key: after.data.to_dict()[key] for key in before} == before


@pytest.fixture
def output(tmp_path):
    """A merged model; transformers is not asked for it."""
    base = save(tmp_path / "base", 0)
    (base / "config.json").write_text("{}")
    covmerge.merge(base, {"e": save(tmp_path / "e", 1)}, "average", tmp_path / "out")
    return tmp_path / "out"


def test_evaluating_changes_nothing_that_is_verified(output):
    for _ in range(2):
        evaluate(output, tasks=["count"], callback=lambda path: {"one": 1.0})
    assert covmerge.verify(output).ok


def test_a_manifest_that_cannot_be_read_is_an_error(output):
    (output / MANIFEST_NAME).unlink()
    (output / MANIFEST_NAME).mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        evaluate(output, tasks=["count"], callback=lambda path: {"one": 1.0})
