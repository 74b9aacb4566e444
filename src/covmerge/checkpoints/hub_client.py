"""What covmerge asks of the Hugging Face Hub, and the errors that come of it.

The only file that imports huggingface_hub, an optional dependency.
"""

# The client's signatures hold bare dicts, which strict checking reports at each import.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import glob
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from covmerge.checkpoints.folder import CONFIG
from covmerge.checkpoints.header import LENGTH_BYTES, data_start, parse_header
from covmerge.checkpoints.json_file import MAX_JSON_BYTES
from covmerge.errors import CheckpointError, InputError
from covmerge.types import TensorHeader

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_FIRST_BYTES = 100_000  # enough for the headers of most files in one request
_TIMEOUT = 30.0  # seconds without a byte
_CONNECTIONS = 8


def is_offline(source: str) -> bool:
    """Whether the client was told (`HF_HUB_OFFLINE`) to use its cache only.

    Raises:
        CheckpointError: the client is not installed.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(
            f"no such file or folder: {source}. If it is a model of the Hugging Face Hub: "
            "pip install covmerge[hub]"
        ) from error
    return constants.HF_HUB_OFFLINE


def cached_snapshot(source: str, name: str, revision: str | None) -> Path:
    """Return the folder of a repository in the cache; its name is the commit."""
    from huggingface_hub import snapshot_download

    with _named_errors(source, name, revision):
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=[CONFIG], local_files_only=True
            )
        )


@dataclass(frozen=True)
class Repository:
    """The files of one commit. Names are resolved once, so that a push in between cannot mix two.

    Attributes:
        source: as the user wrote it, for errors.
        name: `org/name`.
        commit: the full hash.
        sizes: bytes by file name.
    """

    source: str
    name: str
    commit: str
    sizes: Mapping[str, int]

    @classmethod
    def find(cls, source: str, name: str, revision: str | None) -> Repository:
        """Ask the Hub what it has at a branch, tag or commit (None: the default branch)."""
        from huggingface_hub import HfApi

        with _named_errors(source, name, revision):
            info = HfApi().model_info(
                name, revision=revision, files_metadata=True, timeout=_TIMEOUT
            )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        if info.sha is None or None in sizes.values():
            raise CheckpointError(
                f"{source}: the Hub did not say which commit or which sizes its files have: "
                "download the model and pass its folder"
            )
        known = {file: size for file, size in sizes.items() if size is not None}
        return cls(source, name, info.sha, known)

    def top_level(self) -> tuple[str, ...]:
        """Names of the files that are in no folder."""
        return tuple(name for name in self.sizes if "/" not in name)

    def companions(self) -> tuple[str, ...]:
        """Names of the files to have beside the weights: config, tokenizer, index."""
        return tuple(name for name in self.sizes if name.endswith(_COMPANIONS))

    def file(self, name: str) -> Path:
        """Download one small file."""
        from huggingface_hub import hf_hub_download

        if self.sizes[name] > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self.source}: {name} has {self.sizes[name]} bytes, which no such file needs to "
                "have: is it the right repository?"
            )
        with _named_errors(self.source, self.name, self.commit):
            return Path(hf_hub_download(self.name, name, revision=self.commit))

    def download(self, names: tuple[str, ...]) -> Path:
        """Download files, but for those in the cache, and return their folder."""
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in names]
        with _named_errors(self.source, self.name, self.commit):
            folder = Path(
                snapshot_download(self.name, revision=self.commit, allow_patterns=patterns)
            )
        # Where the Hub refuses or is gone, the client returns what the cache has without a word.
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.source}: the Hub did not give {len(missing)} of {len(names)} files, "
                f"{missing[0]} among them: check the connection and `hf auth whoami`, and start "
                "again"
            )
        return folder

    def headers(self, names: list[str]) -> dict[str, dict[str, TensorHeader]]:
        """Fetch the headers of safetensors files, and nothing else of them, by file name."""
        missing = [name for name in names if name not in self.top_level()]
        if missing:
            raise CheckpointError(
                f"{self.source} has no file '{missing[0]}', which its index names: the repository "
                "is incomplete"
            )
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return dict(zip(names, pool.map(self._headers_of, names), strict=True))

    def _headers_of(self, name: str) -> dict[str, TensorHeader]:
        where, size = f"{self.source}: {name}", self.sizes[name]
        first = self._start_of(name, min(size, _FIRST_BYTES)) if size else b""
        end = data_start(first, size, where)
        if end > len(first):
            first = self._start_of(name, end)
        slots = parse_header(first[LENGTH_BYTES:end], size, where)
        return {name: slot.header for name, slot in slots.items()}

    def _start_of(self, name: str, count: int) -> bytes:
        """Fetch the first bytes of a file, and no more even where the server ignores ranges."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        # An encoding would make the range one of compressed bytes.
        wanted = {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        start = bytearray()
        with (
            _named_errors(self.source, self.name, self.commit),
            http_stream_backoff(
                "GET",
                hf_hub_url(self.name, name, revision=self.commit),
                headers={**build_hf_headers(), **wanted},
                timeout=_TIMEOUT,
            ) as response,
        ):
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                start += chunk
                if len(start) >= count:
                    break
        if len(start) < count:
            raise CheckpointError(
                f"{self.source}: the Hub sent {len(start)} bytes of {name} where {count} were "
                "asked for: try again"
            )
        return bytes(start[:count])


@contextmanager
def _named_errors(source: str, name: str, revision: str | None) -> Generator[None, None, None]:
    """Turn what the Hub's client raises into an error that names the repository and the way on."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"{source} is gated: accept its terms at {hub}/{name}, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{source} is no file or folder here, and {hub} has no model {name}, or not for you: "
            "correct the name, or log in with `hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{source}: {name} on {hub} has no revision '{revision}': correct it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{source} is not in the cache {constants.HF_HUB_CACHE}, and {hub} was not or could "
            f"not be asked: run `hf download {name}` where there is a connection, or name the "
            f"commit that is in the cache, {name}@<commit>"
        ) from error
    except Exception as error:  # the client's transport, and with it its errors, changes by version
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{source} could not be read from {hub} ({type(error).__name__}: {reason}): check the "
            "connection, or set HF_HUB_OFFLINE=1 to use the copy in the cache"
        ) from error


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
            there = api.model_info(repository, revision=branch, timeout=_TIMEOUT)
        except RevisionNotFoundError:
            if branch is None:
                raise
            api.create_branch(repository, branch=branch)
            there = api.model_info(repository, revision=branch, timeout=_TIMEOUT)
        if private and not there.private:
            raise InputError(
                f"{repository} is public already: make it private in its settings, push to another "
                "name, or leave out --private"
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
            "place of these: delete them there, or push to another name or --revision"
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
    except Exception as error:  # see `_named_errors`
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
            f"{repository} could not be pushed to {hub} ({reason}): check the connection and push "
            "again; nothing is there before all of it is"
        ) from error
