"""Repositories of the Hugging Face Hub into a folder of the user's, whole or not at all."""

from __future__ import annotations

import glob
import importlib
import json
from pathlib import Path
from typing import Any, cast

from covmerge.checkpoints.folder import choose_weights
from covmerge.checkpoints.hub_client import Repository, is_offline
from covmerge.errors import CheckpointError
from covmerge.stores.disk import replace_file
from covmerge_lab.reproduce.published import Source


def fetch(source: Source, cache: Path) -> Path:
    """Return the folder of a checkpoint of the Hub; what an earlier call fetched is not asked for again.

    Only what a checkpoint is made of is fetched: one format of weights, config and tokenizer.

    Raises:
        CheckpointError: the Hub cannot be reached, has no such repository, or did not give all of it.
    """
    label = source.hub or ""
    name, _, revision = label.partition("@")
    receipt = cache / "fetched" / f"{label}/{source.folder}".replace("/", "--")
    folder = _fetched_before(receipt)
    if folder is None:
        is_offline(label)  # says how to install the client where it is missing
        prefix = f"{source.folder}/" if source.folder else ""
        repository = Repository.find(label, name, revision or None)
        sizes = {prefix + file: size for file, size in _wanted(repository, prefix, label).items()}
        folder = _download(repository, sizes, cache) / source.folder
        _write_receipt(receipt, folder, {file.removeprefix(prefix): n for file, n in sizes.items()})
    return folder


def _wanted(repository: Repository, prefix: str, label: str) -> dict[str, int]:
    """Return the files of a checkpoint, by their names in its folder."""
    inside = {
        file.removeprefix(prefix): size
        for file, size in repository.sizes.items()
        if file.startswith(prefix)
    }
    part = Repository(label, repository.name, repository.commit, inside)
    where = f"{label}/{prefix}" if prefix else label
    chosen = choose_weights(part.top_level(), where)
    stem, kind = chosen.name.split(".")[:2]
    weights = [
        file
        for file in part.top_level()
        if file == chosen.name
        or (chosen.is_index and file.startswith(stem) and file.endswith(f".{kind}"))
    ]
    beside = [file for file in part.companions() if "/" not in file]
    return {file: inside[file] for file in dict.fromkeys([*beside, *weights])}


def _download(repository: Repository, sizes: dict[str, int], cache: Path) -> Path:
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        folder = Path(
            hub.snapshot_download(
                repository.name,
                revision=repository.commit,
                allow_patterns=[glob.escape(file) for file in sizes],
                cache_dir=cache / "hub",
            )
        )
    except Exception as error:  # the client's transport, and with it its errors, changes by version
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{repository.source} could not be fetched ({type(error).__name__}: {reason}): check the "
            "connection and start again, what is complete is kept"
        ) from error
    # Where the Hub refuses or is gone, the client returns what its cache has without a word.
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(
                f"{repository.source}: the Hub did not give all of {file}: check the connection and "
                "start again, what is complete is kept"
            )
    return folder


def _fetched_before(receipt: Path) -> Path | None:
    """Return the folder that a receipt stands for, if all of its files are there."""
    if not receipt.is_file():
        return None
    content = cast("dict[str, Any]", json.loads(receipt.read_text(encoding="utf-8")))
    folder = Path(content["folder"])
    files = cast("dict[str, int]", content["files"])
    whole = all(
        (folder / file).is_file() and (folder / file).stat().st_size == size
        for file, size in files.items()
    )
    return folder if whole else None


def _write_receipt(receipt: Path, folder: Path, files: dict[str, int]) -> None:
    receipt.parent.mkdir(parents=True, exist_ok=True)
    replace_file(receipt, json.dumps({"folder": str(folder), "files": files}))
