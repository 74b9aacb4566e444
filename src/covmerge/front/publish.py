"""A finished output put on the Hugging Face Hub: verified, checked, and committed at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.identifiers import hub_id
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import CARD_NAME
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.checkpoints.staging import find_unfinished
from covmerge.files.stores.hub_commit import commit_files
from covmerge.run.export.front_matter import read_front_matter
from covmerge.run.verification import verify


@dataclass(frozen=True)
class Published:
    """An output on the Hub.

    Attributes:
        url: of the commit.
        repository: `org/name`.
        files: what was committed, as paths in the folder.
        notes: what a user should know of what others now see.
    """

    url: str
    repository: str
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> dict[str, Json]:
        """Return it as plain JSON."""
        return {
            "url": self.url,
            "repository": self.repository,
            "files": self.files,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Publication:
    """An output that may be pushed; `prepare` makes it.

    Attributes:
        folder: the output.
        files: what is pushed of it, as paths in it.
        notes: what a user should know before others see it.
        repository: `org/name`.
        message: of the commit.
    """

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]
    repository: str
    message: str

    def send(self, *, private: bool = False, revision: str | None = None) -> Published:
        """Commit the files; see `push`."""
        url = commit_files(
            self.folder,
            self.files,
            self.repository,
            private=private,
            branch=revision,
            message=self.message,
        )
        return Published(url, self.repository, self.files, self.notes)


def push(
    out: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Published:
    """Put a finished output on the Hugging Face Hub, in one commit, after verifying it.

    The repository and the branch are made if they are not there. Hidden files are not pushed.

    Args:
        out: folder that a merge wrote.
        repository: `org/name`.
        private: whether nobody else may see it.
        revision: branch; None is the default one.
        message: of the commit.

    Raises:
        CheckFailed: the output fails its verification.
        InputError: it is no finished output, or the Hub cannot be reached or refuses it.
    """
    return prepare(out, repository, message=message).send(private=private, revision=revision)


def prepare(out: str | Path, repository: str, *, message: str | None = None) -> Publication:
    """Verify an output and check what others would see of it; nothing is sent.

    Raises:
        CheckFailed: the output fails its verification.
        InputError: it is no finished output, or the repository's name is none.
    """
    folder = Path(out)
    named = hub_id(repository)
    if named is None or named.revision is not None:
        raise InputError(f"{repository!r} is no name of a repository: write ORG/NAME")
    unfinished = find_unfinished(folder)
    if unfinished is not None:
        raise InputError(
            f"{folder} is not finished: a merge into it is under way, or waits in {unfinished}. Let "
            f"it end, go on with {Hint('resume')}, or remove that folder"
        )
    manifest = read_manifest(folder)
    verify(folder).raise_if_failed()
    return Publication(
        folder,
        tuple(_files(folder)),
        tuple(_notes(folder, manifest)),
        repository,
        message or f"Merge by {manifest['recipe']['method']} (covmerge {__version__})",
    )


def _files(folder: Path, inside: str = "") -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        name = f"{inside}{path.name}"
        if path.name.startswith("."):
            continue  # of editors, of the system, or not finished
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise InputError(f"{path} is neither a file nor a folder: put the file itself there")
        if path.is_dir():
            yield from _files(path, f"{name}/")
        else:
            yield name


def _notes(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    card = folder / CARD_NAME
    fields = read_front_matter(card, ("license", "base_model")) if card.is_file() else {}
    if not fields.get("license"):
        yield (
            f"{CARD_NAME} names no licence (license: ...), so nobody knows what they may do with the "
            "model; what is known of its parents' is in it"
        )
    if not fields.get("base_model"):
        yield (
            f"{CARD_NAME} names no model of the Hub that this one was made of (base_model: ...): add "
            "them where you know them"
        )
    sources = [str(entry["source"]) for entry in manifest.get("sources", {}).values()]
    local = [source for source in sources if source.startswith(("/", "~"))]
    if local:
        yield (
            f"{MANIFEST_NAME} names folders of this machine, such as {local[0]}, and others will see "
            "them: merge by relative paths to keep them out"
        )
