"""Pushing a finished output to the Hugging Face Hub, after verification and in one commit."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from covmerge.files.stores.hub import TIMEOUT
from covmerge.run.export.markdown import read_front_matter
from covmerge.run.verification import verify

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@contextmanager
def _named_refusals(repository: str) -> Generator[None, None, None]:
    """Turn errors of the Hub's client on a push into errors that say what to do next."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    hub = constants.ENDPOINT
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # see `hub.py`
        # If a file did not arrive, the client gives the reason as the cause.
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if status == 401:
            raise InputError(
                f"{repository}: {hub} does not know you: log in with `hf auth login`, by a token that "
                "may write"
            ) from error
        if status in (403, 404):
            raise InputError(
                f"{hub} does not let you write to {repository} ({reason}): see `hf auth whoami` for "
                "who you are and which organisations you are in, and correct the name, or log in "
                "with `hf auth login` by a token that may write"
            ) from error
        if status == 400 or isinstance(error, ValueError):
            raise InputError(
                f"{hub} refuses what is pushed to {repository} ({reason}): mend it and push again"
            ) from error
        raise InputError(
            f"{repository} could not be pushed to {hub}, or its answer was lost ({reason}): {hub}/"
            f"{repository} has all of the files or none of them; check the connection and push again, "
            "which replaces them by the same"
        ) from error


@dataclass(frozen=True)
class Published:
    """A pushed output on the Hub.

    Attributes:
        url: address of the commit.
        repository: `org/name`.
        files: the committed files, as paths in the folder.
        notes: notes to the user about what others can now see.
    """

    url: str
    repository: str
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> dict[str, Json]:
        """Return the publication as plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Publication:
    """A verified output that can be pushed; `prepare` makes it."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]
    repository: str
    message: str

    def send(self, *, private: bool = False, revision: str | None = None) -> Published:
        """Commit the files; see `push`. Other files in the repository stay."""
        try:
            from huggingface_hub import CommitOperationAdd, HfApi
            from huggingface_hub.errors import RevisionNotFoundError
        except ImportError as error:
            raise InputError(
                "pushing takes the client of the Hugging Face Hub: pip install covmerge[hub]"
            ) from error
        api, name = HfApi(), self.repository
        with _named_refusals(name):
            api.create_repo(name, private=private or None, exist_ok=True)
            try:
                there = api.model_info(name, revision=revision, timeout=TIMEOUT)
            except RevisionNotFoundError:
                if revision is None:
                    raise
                api.create_branch(name, branch=revision)
                there = api.model_info(name, revision=revision, timeout=TIMEOUT)
            if private and not there.private:
                raise InputError(
                    f"{name} is public already: make it private in its settings, push to another "
                    f"name, or leave out {Hint('private')}"
                )
            self._refuse_other_weights([file.rfilename for file in there.siblings or ()])
            files = [CommitOperationAdd(file, self.folder / file) for file in self.files]
            # upload_folder may make several commits. With one commit, nobody downloads half a model.
            done = api.create_commit(name, files, commit_message=self.message, revision=revision)
        return Published(done.commit_url, name, self.files, self.notes)

    def _refuse_other_weights(self, there: Sequence[str]) -> None:
        """Raise an error for other weights in the repository, which might be loaded in place of these."""
        other = [file for file in there if file.endswith(_WEIGHTS) and file not in self.files]
        if other:
            raise InputError(
                f"{self.repository} holds other weights ({', '.join(other[:3])}), which might be loaded in "
                "place of these, and a new branch begins with them: delete them there, or push to another "
                "name"
            )


def push(
    out: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Published:
    """Push a finished output to the Hugging Face Hub, in one commit, after verifying it.

    The repository and the branch are created if they do not exist. Hidden files are not pushed.

    Args:
        out: folder that a merge wrote.
        repository: `org/name`.
        private: whether a new repository is private; an existing public one is refused.
        revision: branch; None is the default branch.
        message: message of the commit.

    Raises:
        CheckFailed: the output fails its verification.
        InputError: the folder is not a finished output, or the Hub cannot be reached or refuses it.
    """
    return prepare(out, repository, message=message).send(private=private, revision=revision)


def prepare(out: str | Path, repository: str, *, message: str | None = None) -> Publication:
    """Verify an output and collect notes on what others would see of it; nothing is sent."""
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
            continue  # of editors or of the system, or unfinished
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
