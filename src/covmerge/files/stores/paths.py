"""Conversion of file names in a checkpoint to paths that cannot leave its folder."""

from __future__ import annotations

import re
from pathlib import Path

from covmerge.base.errors import CheckpointError
from covmerge.files.stores.hub_cache import snapshot_around

_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def safe_child(folder: Path, name: str) -> Path:
    """Return `folder / name`, after checking that it lies in `folder`; it need not exist.

    Links are followed before the check. The Hugging Face cache is allowed: its snapshots consist of links
    to a store of blobs beside them.

    Raises:
        CheckpointError: `name` is not a bare file name, or a link leads out of the folder.

    Example:
        >>> safe_child(Path("model"), "config.json").as_posix()
        'model/config.json'
        >>> safe_child(Path("model"), "../secret")
        Traceback (most recent call last):
        covmerge.base.errors.CheckpointError: model names the file '../secret': only bare names of files \
inside the folder are read, correct the name
    """
    check_bare(name, str(folder))
    child = folder / name
    try:
        if not child.is_symlink():  # as nearly always; to follow both takes 20 times as long
            return child
        home, target = folder.resolve(), child.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"{child} cannot be followed ({error}): replace the link") from error
    if not (target.is_relative_to(home) or _is_cached_blob(home, target)):
        raise CheckpointError(
            f"{child} is a link to {target}, outside its folder, and is not followed: put the file "
            "itself there, or pass the folder that holds it"
        )
    return child


def safe_path(folder: Path, name: str) -> Path:
    """Return a path inside a folder, whose parts have `/` between them; see `safe_child`."""
    path = folder
    for part in name.split("/"):
        path = safe_child(path, part)
    return path


def check_bare(name: str, where: str) -> None:
    """Check that a name is that of a file, without a folder."""
    if name in {"", ".", ".."} or "\\" in name or "\0" in name or Path(name).name != name:
        raise CheckpointError(
            f"{where} names the file {name!r}: only bare names of files inside the folder are "
            "read, correct the name"
        )


def _is_cached_blob(folder: Path, target: Path) -> bool:
    """Return whether `folder` lies in a snapshot of the Hugging Face cache and `target` in its blobs.

    `models--org--name/snapshots/<commit>/<file>` is a link to `models--org--name/blobs/<hash>`. Newer
    versions of the cache link that on to a store of all repositories, `blobs/<2 digits>/<hash>` beside
    `models--org--name`.
    """
    snapshot = snapshot_around(folder)
    if snapshot is None:
        return False
    repository = snapshot.parent.parent
    if target.parent == repository / "blobs":
        return True
    store = repository.parent / "blobs"
    return target.is_relative_to(store) and bool(
        _SHARED_BLOB.fullmatch(target.relative_to(store).as_posix())
    )
