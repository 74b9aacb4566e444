"""Pipes, devices and impossible names wherever a file is read: an error that names them, no waiting."""

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.regular_file import open_regular
from covmerge.plan.recipe import load_recipe
from covmerge.plan.statistics.examples import Reading, read_texts
from covmerge.plan.statistics.file import StatisticsFile
from covmerge.run.export.markdown import read_front_matter


def adapter_whose(name: str, path: Path) -> Path:
    """A folder of an adapter, one of whose files is another."""
    folder = path.parent / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"base_model.model.q.lora_{x}.weight": torch.ones(1, 1) for x in "AB"}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / name).unlink(missing_ok=True)
    path.rename(folder / name)
    return folder


def model_whose(name: str, path: Path) -> Path:
    folder = path.parent / "model"
    folder.mkdir()
    if not name.startswith("model."):
        save_file({"w": torch.ones(1, 1)}, folder / "model.safetensors")
    path.rename(folder / name)
    return folder


READERS: dict[str, Callable[[Path], object]] = {
    "recipe": load_recipe,
    "statistics": StatisticsFile.open,
    "examples": lambda path: read_texts(path, Reading()),
    "card": lambda path: read_front_matter(path, ("license",)),
    "safetensors": open_checkpoint,
    "adapter_config.json": lambda path: open_checkpoint(adapter_whose("adapter_config.json", path)),
    "adapter's config.json": lambda path: open_checkpoint(adapter_whose("config.json", path)),
    "adapter's weights": lambda path: open_checkpoint(
        adapter_whose("adapter_model.safetensors", path)
    ),
    "config.json": lambda path: open_checkpoint(model_whose("config.json", path)),
    "weights": lambda path: open_checkpoint(model_whose("model.safetensors", path)),
    "index": lambda path: open_checkpoint(model_whose("model.safetensors.index.json", path)),
}


def ends(action: Callable[[], object]) -> BaseException | None:
    """What it raises; a wait for a pipe would not end."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert raised, "it waits"
    return raised[0]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str, kind: str):
    suffix = {"statistics": ".covstats.safetensors", "examples": ".txt"}.get(reader, ".safetensors")
    path = tmp_path / f"a{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(os.path.relpath(path))  # short enough for a socket
        server.close()
    error = ends(lambda: READERS[reader](path))
    assert isinstance(error, InputError), repr(error)
    assert len(str(error)) < 600


@pytest.mark.parametrize("reader", ["recipe", "statistics", "card", "safetensors"])
@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_has(reader: str, name: str):
    with pytest.raises(InputError):
        READERS[reader](Path(name))


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
@pytest.mark.parametrize("place", ["base", "expert", "out", "statistics"])
def test_such_names_in_a_merge(tmp_path: Path, place: str, name: str):
    state = {"w": torch.ones(2, 2)}
    given = {"base": state, "experts": {"a": state, "b": state}, "out": tmp_path / "out"}
    if place == "expert":
        given["experts"] = {"a": name, "b": state}
    elif place == "statistics":
        given |= {"statistics": {"a": name, "b": name}, "method": "regmean"}
    else:
        given[place] = name
    with pytest.raises(InputError):
        covmerge.merge(**given)
    assert not list(tmp_path.iterdir())


def test_a_regular_file_and_a_link_to_one(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").symlink_to("a")
    for name in "ab":
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"1"
