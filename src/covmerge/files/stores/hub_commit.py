"""One commit to a repository of the Hugging Face Hub, and what the Hub may have against it."""

# The client's signatures hold bare dicts, which strict checking reports at each import.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.files.stores.hub import TIMEOUT

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def commit_files(
    folder: Path,
    names: Sequence[str],
    repository: str,
    *,
    private: bool,
    branch: str | None,
    message: str,
) -> str:
    """Commit files of a folder to a model's repository, all at once; return the commit's address.

    The repository and the branch are made if they are not there. Other files there stay.

    Args:
        folder: where the files lie.
        names: their paths in it, `/` between the parts.
        repository: `org/name`.
        private: whether nobody else may see it.
        branch: None is the default branch.
        message: of the commit.

    Raises:
        InputError: the client is not installed, the Hub cannot be reached or refuses, or what is
            there already does not go with these files.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import RevisionNotFoundError
    except ImportError as error:
        raise InputError(
            "pushing takes the client of the Hugging Face Hub: pip install covmerge[hub]"
        ) from error
    api = HfApi()
    with _named_refusals(repository):
        api.create_repo(repository, private=private or None, exist_ok=True)
        try:
            there = api.model_info(repository, revision=branch, timeout=TIMEOUT)
        except RevisionNotFoundError:
            if branch is None:
                raise
            api.create_branch(repository, branch=branch)
            there = api.model_info(repository, revision=branch, timeout=TIMEOUT)
        if private and not there.private:
            raise InputError(
                f"{repository} is public already: make it private in its settings, push to another "
                f"name, or leave out {Hint('private')}"
            )
        _refuse_other_weights(repository, [file.rfilename for file in there.siblings or ()], names)
        files = [CommitOperationAdd(name, folder / name) for name in names]
        # One commit, where upload_folder may make several: nobody meets half a model.
        done = api.create_commit(repository, files, commit_message=message, revision=branch)
    return done.commit_url


def _refuse_other_weights(repository: str, there: Sequence[str], names: Sequence[str]) -> None:
    """Refuse weights that would stand beside these, or be loaded in their place."""
    other = [file for file in there if file.endswith(_WEIGHTS) and file not in names]
    if other:
        raise InputError(
            f"{repository} holds other weights ({', '.join(other[:3])}), which might be loaded in "
            "place of these, and a new branch begins with them: delete them there, or push to another "
            "name"
        )


@contextmanager
def _named_refusals(repository: str) -> Generator[None, None, None]:
    """Turn what the Hub's client raises on a push into an error that says what to do next."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    hub = constants.ENDPOINT
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # see `hub.py`
        # Of a file that did not arrive the client tells the reason as the cause.
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
