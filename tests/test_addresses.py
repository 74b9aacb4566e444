"""Addresses of what is not on this machine are refused by name, wherever a user may write one."""

from pathlib import Path

import pytest
import torch

import covmerge
from covmerge.checkpoints import Staging, open_checkpoint
from covmerge.errors import InputError
from covmerge.recipe import load_recipe

STATE = {"w": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "address", ["s3://bucket/base", "gs://b/c", "hf://org/name", "https://host/model.safetensors"]
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_source(address: str, kind: type) -> None:
    scheme = address.partition(":")[0]
    with pytest.raises(InputError, match=rf"{scheme}:.* is an address \({scheme}\).* copy what"):
        open_checkpoint(kind(address))


@pytest.mark.parametrize("place", ["base", "expert", "out", "statistics"])
def test_in_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"base": STATE, "experts": {"a": STATE, "b": STATE}, "out": "out"}
    address = "s3://bucket/base"
    if place == "expert":
        given["experts"] = {"a": address, "b": STATE}
    elif place == "statistics":
        given |= {"statistics": {"a": address, "b": address}, "method": "regmean"}
    else:
        given[place] = address
    with pytest.raises(InputError, match=r"s3:/+bucket/base is an address \(s3\)"):
        covmerge.merge(**given)
    assert list(tmp_path.iterdir()) == []


def test_in_a_recipe_by_file_and_key(tmp_path: Path) -> None:
    recipe = tmp_path / "merge.yaml"
    recipe.write_text("base: s3://bucket/base\nexperts: {a: org/a}\n")
    with pytest.raises(InputError, match=r"merge\.yaml.*base: s3://bucket/base is an address"):
        load_recipe(recipe)


def test_as_a_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an address"):
        Staging(Path("s3://bucket/merged"))
    drive = tmp_path / "c:"  # a drive of Windows is one letter
    drive.mkdir()
    with pytest.raises(InputError, match="no such file or folder"):
        open_checkpoint(f"c:/{tmp_path.name}")
