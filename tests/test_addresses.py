"""Addresses: what is read elsewhere, what is refused by name, and that no secret is part of one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.staging import Staging, destination_of
from covmerge.files.stores.address import address_of, hub_address, local_path
from covmerge.plan.recipe import load_recipe
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.cli.runs import words

STATE = {"w": torch.ones(2, 2)}


def copied(folder: Path) -> None:
    """What messages advise: a copy in a folder of this machine is read."""
    save_file(STATE, folder / "model.safetensors")
    assert list(open_checkpoint(folder).headers) == ["w"]


@pytest.mark.parametrize("kind", [str, Path])
def test_an_address_is_known_however_it_is_given(kind: type) -> None:
    assert str(address_of(kind("S3://bucket/a/b/"))) == "s3://bucket/a/b"
    assert str(address_of(kind("https://host:80/a%20b"))) == "https://host:80/a%20b"
    assert hub_address(kind("hf://org/name@main")) == ("org/name", "main")
    assert address_of(kind("hf://org/name")) is None and address_of(kind("org/name")) is None


def test_one_may_lie_in_another() -> None:
    one, inner, other = (address_of(f"s3://b/{name}") for name in ("base", "base/x", "base2"))
    assert one and inner and other
    assert one.overlaps(inner) and inner.overlaps(one) and one.overlaps(one)
    assert not one.overlaps(other)


@pytest.mark.parametrize("address", ["ftp://host/base", "file:///etc/passwd", "memory://base"])
def test_others_are_refused_by_name(address: str, tmp_path: Path) -> None:
    said = advice(
        "{} is an address ({}), and covmerge reads s3://, gs://, https:// and files of this"
    )
    with pytest.raises(InputError, match=said):
        open_checkpoint(address)
    copied(tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "https://me:hunter2@host/base",
        " https://me:hunter2@host/base",  # as it was pasted
        "s3://hunter2@bucket/base",
        "https://host/base/model.safetensors?X-Amz-Signature=hunter2",
        "https://host/base#hunter2",
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_may_be_secret_is_refused_and_not_told(
    tmp_path: Path, address: str, kind: type
) -> None:
    said = advice("write it without, and give credentials in the environment")
    with pytest.raises(InputError, match=said) as error:
        open_checkpoint(kind(address))
    assert "hunter2" not in str(error.value)
    recipe = tmp_path / "merge.yml"
    recipe.write_text(f"base: '{address}'\nexperts: {{a: org/a}}\n")
    with pytest.raises(
        InputError, match=r"merge\.yml.*base: the address .* may be secret"
    ) as error:
        load_recipe(recipe)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("address", ["s3://b/../c", "s3://", "https://host/a//b", "s3://b/\x1b[2J"])
def test_none_that_could_mean_another(address: str) -> None:
    with pytest.raises(InputError, match=advice("is no address of a file or folder: correct it")):
        open_checkpoint(address)
    said = advice(
        "write hf://org/name or hf://org/name@revision, or without the hf://. Credentials"
    )
    with pytest.raises(InputError, match=said):
        open_checkpoint("hf://org/name/file.safetensors")
    for right in ("hf://org/name", "hf://org/name@revision"):
        assert hub_address(right)
    assert hub_address("org/name") is None


def test_where_only_files_of_this_machine_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = "s3://bucket/statistics"
    given = {"base": STATE, "experts": {n: {"w": torch.eye(2)} for n in "ab"}}
    with pytest.raises(InputError, match=r"s3://bucket/statistics is an address, and a path"):
        covmerge.merge(**given, statistics={"a": address, "b": address}, method="regmean")
    said = advice("path of this machine is needed here: copy what lies there to a folder, and name")
    with pytest.raises(InputError, match=said):
        covmerge.compare(**given, out=address)
    assert list(tmp_path.iterdir()) == []
    covmerge.compare(**given, methods="average", out="statistics")


def test_a_recipe_has_them_as_they_are(tmp_path: Path) -> None:
    recipe = tmp_path / "merge.yml"
    recipe.write_text(
        "base: s3://bucket/base/\nexperts: {a: 'hf://org/a@main', b: https://host/b}\n"
    )
    found = load_recipe(recipe)
    assert found.base == "s3://bucket/base"
    assert [e.source for e in found.experts.values()] == ["hf://org/a@main", "https://host/b"]
    recipe.write_text("base: ftp://bucket/base\nexperts: {a: org/a}\n")
    with pytest.raises(InputError, match=r"merge\.yml.*base: ftp://bucket/base is an address"):
        load_recipe(recipe)


def test_a_drive_of_windows_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an address"):
        Staging(Path("ftp://bucket/merged"))
    drive = tmp_path / "c:"
    drive.mkdir()
    assert local_path("c:/models") == Path("c:/models")
    with pytest.raises(InputError, match="no such file or folder"):
        open_checkpoint(f"c:/{tmp_path.name}")


@pytest.mark.parametrize(
    "address",
    [
        "https:me:hunter2@host",
        "s3:hunter2@bucket",
        "hf:me:hunter2@host",
        "hf://me:hunter2@host",
        "hf://hunter2@host/org/name",
        "hf://org/name?token=hunter2",
    ],
)
def test_what_is_no_address_does_not_repeat_a_secret(tmp_path: Path, address: str) -> None:
    said = advice(
        "as addresses are recorded: correct it. A file of that name on this machine is ./NAME"
    )
    with pytest.raises(InputError, match=f"{said}|write hf://org/name") as error:
        open_checkpoint(address)
    with pytest.raises(InputError, match=r"\w+://") as other:
        destination_of(Path(address))
    assert "hunter2" not in f"{error.value} {other.value}"


@pytest.mark.parametrize(
    "message, shown",
    [
        (
            "--expert 'https://u:t0ken@h/x' is not NAME=VALUE",
            "--expert 'https://...@h/x' is not NAME=VALUE",
        ),
        ("https:/u:t0ken@h/r.yml: it cannot be read", "https:/...@h/r.yml: it cannot be read"),
        ("'x/y?token=t0ken&a=b' is no name", "'x/y?token=...&a=...' is no name"),
        ("hf://org/name@main is not there", "hf://org/name@main is not there"),
        ("org/name@main: 'w' is (2, 3)", "org/name@main: 'w' is (2, 3)"),
    ],
)
def test_no_error_repeats_what_may_be_secret(message, shown):
    assert str(InputError(message)) == shown


@pytest.mark.parametrize("key", ["model", "base_model"])
def test_a_recipe_of_mergekit_has_no_secret_in_it(tmp_path, key):
    named = {"model": "m", "base_model": "b", key: "https://u:t0ken@h/c+https://u:t0ken@h/lora"}
    file = tmp_path / "their.yml"
    file.write_text(
        f"merge_method: task_arithmetic\nbase_model: {named['base_model']}\n"
        f"models:\n  - model: {named['model']}\n    parameters: {{weight: 1.0}}\n"
    )
    done = command("import-mergekit", file, code=2)
    assert "may be secret" in words(done.stderr) and "t0ken" not in done.stdout + done.stderr
