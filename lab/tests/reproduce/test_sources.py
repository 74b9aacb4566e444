"""Checkpoints are fetched whole or not at all, found where they were downloaded, or named as missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import save_file
from torch import nn

from covmerge.errors import CheckpointError, InputError
from covmerge_lab.module_file import read_weights
from covmerge_lab.reproduce.fetch import fetch
from covmerge_lab.reproduce.published import Source
from covmerge_lab.reproduce.sources import Given, resolve
from covmerge_lab.reproduce.tables import find_table
from tests.checkpoints.hub_server import Hub, serve
from tests.cli.runs import covmerge

REPOSITORY = "org/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    upload = tmp_path / "upload"
    (upload / "cola" / "run").mkdir(parents=True)
    for folder in (upload, upload / "cola" / "run"):
        (folder / "config.json").write_text('{"model_type": "bert"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "README.md").write_text("not wanted")
        save_file({"w": torch.randn(500)}, folder / "model.safetensors")
        torch.save({"w": torch.ones(500)}, folder / "pytorch_model.bin")
    with serve(upload) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield hub
        close_session()


@pytest.mark.parametrize("folder", ["", "cola/run"])
def test_one_format_of_weights_and_what_belongs_to_it(hub, tmp_path, folder):
    found = fetch(Source(REPOSITORY, folder), tmp_path / "cache")
    names = {path.name for path in found.iterdir() if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    sent = dict(hub.sent)
    assert fetch(Source(REPOSITORY, folder), tmp_path / "cache") == found
    assert hub.sent == sent  # nothing was asked for twice


def test_what_is_not_whole_is_fetched_again_or_refused(hub, tmp_path):
    found = fetch(Source(REPOSITORY), tmp_path / "cache")
    (found / "model.safetensors").resolve().write_bytes(b"cut")
    hub.gated = True
    with pytest.raises(CheckpointError, match="gated"):
        fetch(Source(REPOSITORY), tmp_path / "cache")
    hub.gated = False
    with pytest.raises(CheckpointError, match="did not give all of"):
        fetch(Source(REPOSITORY), tmp_path / "cache")


def test_a_hub_that_is_gone_is_exit_code_2_and_leaves_nothing(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    cache = tmp_path / "cache"
    ran = covmerge("reproduce", "ace/table2", "--cache", cache, code=2)
    assert "openai-community/gpt2" in ran.stderr and "connection" in ran.stderr
    assert not cache.exists()


def test_missing_checkpoints_are_named_with_what_to_pass(tmp_path):
    setting = find_table("ace/table1").settings[0]
    with pytest.raises(InputError, match=r"base, MNIST, Cars.*--checkpoints DIR.*--expert NAME="):
        resolve(setting, Given(tmp_path))
    with pytest.raises(InputError, match="Did you mean 'MNIST'"):
        resolve(setting, Given(tmp_path, experts={"MNISTT": "x"}))
    with pytest.raises(InputError, match="no such file or folder"):
        resolve(setting, Given(tmp_path, experts={"MNIST": "./nowhere.pt"}))


def test_downloads_are_found_by_their_authors_layout(tmp_path):
    setting = find_table("ace/table1").settings[0]
    for source in (setting.base, *setting.experts.values()):
        file = tmp_path / "suite" / source.file
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(nn.Linear(2, 2), file)
    models = resolve(setting, Given(tmp_path / "cache", checkpoints=tmp_path / "suite"))
    assert list(models.experts) == list(setting.experts)
    for path in (models.base, *models.experts.values()):
        assert set(read_weights(path)) == {"weight", "bias"}
    assert not (tmp_path / "cache").exists()
