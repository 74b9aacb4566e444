"""Repositories of the Hugging Face Hub into a folder of the user's, whole or not at all."""

from __future__ import annotations

import glob
import importlib
import json
from pathlib import Path
from typing import Any, cast

from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.folder import choose_weights
from covmerge.files.stores.disk import replace_file
from covmerge.files.stores.hub import HubStore, is_offline
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
        store = HubStore.find(label, name, revision or None).inside(source.folder)
        sizes = _wanted(store)
        folder = _download(store, sizes, cache)
        _write_receipt(receipt, folder, sizes)
    return folder


def _wanted(store: HubStore) -> dict[str, int]:
    """Return the files of a checkpoint with their sizes."""
    names = store.names()
    chosen = choose_weights(names, str(store))
    stem, kind = chosen.split(".")[:2]
    weights = [
        file
        for file in names
        if file == chosen
        or (chosen.endswith(".index.json") and file.startswith(stem) and file.endswith(f".{kind}"))
    ]
    beside = [file for file in store.companions() if "/" not in file]
    return {file: store.sizes[file] for file in dict.fromkeys([*beside, *weights])}


def _download(store: HubStore, sizes: dict[str, int], cache: Path) -> Path:
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        snapshot = hub.snapshot_download(
            store.name,
            revision=store.commit,
            allow_patterns=[glob.escape(f"{store.prefix}{file}") for file in sizes],
            cache_dir=cache / "hub",
        )
    except Exception as error:  # the client's transport, and with it its errors, changes by version
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{store.source} could not be fetched ({type(error).__name__}: {reason}): check the "
            "connection and start again, what is complete is kept"
        ) from error
    folder = Path(snapshot) / store.prefix
    # Where the Hub refuses or is gone, the client returns what its cache has without a word.
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(
                f"{store.source}: the Hub did not give all of {file}: check the connection and "
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
