"""The content of covmerge.json: all keys that its readers use, with their types."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from covmerge.base.errors import CheckpointError, InputError, RecipeError
from covmerge.files.checkpoints.json_file import read_object, shorten
from covmerge.files.stores.disk import finished_name
from covmerge.files.stores.local import local_store
from covmerge.files.stores.store import Store, StoredFile, tree

MANIFEST_NAME = "covmerge.json"  # identifies an output of covmerge
NOT_KNOWN = "not known"  # stands for a hash of what may have changed before it was hashed

# Files that covmerge adds to an output later: reports, pages of weights and evaluations.
ADDED_LATER = frozenset({"report.html", "view.html", "evaluation.json"})
# Files that covmerge adds beside the models of a comparison.
SCORES = frozenset({"scores.json", "scores.csv", "scores.tex"})

MAX_BYTES = 2**29

_Size = Annotated[int, Field(ge=0)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Method = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$")]
_Name = Annotated[str, Field(pattern=r"^[^/\\\x00]+(/[^/\\\x00]+){0,5}$")]


class _Part(BaseModel):
    """A part of covmerge.json; unknown keys are ignored, as they are for people or from a later version."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Output(_Part):
    format: Literal["model", "adapter"] = "model"
    quantise: str = "none"


class _Expert(_Part):
    source: str
    weight: float | dict[str, Any]


class _Recipe(_Part):
    base: str | None
    experts: dict[str, _Expert]
    method: str
    parameters: dict[str, Any]
    output: _Output


class _Source(_Part):
    source: str
    content: dict[str, Any]


class _Rule(_Part):
    role: str
    rule: str
    tensors: _Size


class _Loss(_Part):
    layer: str = ""
    tensors: _Size
    error: float
    lost: float | None = None
    kept: float | None = None


class _Quantised(_Loss):
    layers: list[_Loss]


class _Packed(_Part):
    format: str
    error: float
    kept: float | None = None


class _Totals(_Part):
    by_rule: list[_Rule]
    merged_norm: float
    rounding_loss: float
    arithmetic: list[str] = []
    arithmetic_loss: float | None = None
    arithmetic_tensors: Annotated[list[_Size], Field(min_length=2, max_length=2)] = [0, 0]
    left_out_energy: float = 0.0
    discarded_energy: float = 0.0
    quantised: _Quantised | None = None


class _Place(_Part):
    tensor: str
    rank: _Size | None = None
    ties: list[str] = []


class _Tensor(_Part):
    role: str
    why: str
    rule: str
    dtype: str
    shape: list[_Size]
    update_norm: dict[str, float] = {}
    merged_norm: float | None = None
    rounding_loss: float = 0.0
    arithmetic: str | None = None
    arithmetic_loss: float = 0.0
    unrounded_norm: float | None = None
    matrices: list[dict[str, Any]] = []
    adapter: _Place | None = None
    left_out: bool = False
    quantised: _Packed | None = None


class _File(_Part):
    sha256: _Hash
    tensors: dict[str, _Hash] = {}


class _Vocabulary(_Part):
    rows: _Size


class _Model(_Part):
    """covmerge.json of one merged model or adapter; older versions of covmerge wrote no `files`."""

    covmerge: str
    torch: str
    recipe: _Recipe
    family: str | None
    sources: dict[str, _Source]
    notes: list[str]
    totals: _Totals
    heads: dict[str, list[str]]
    rescalers: dict[str, float] = {}
    base_probe: str | None = None
    vocabulary: _Vocabulary | None = None
    untied: dict[str, str] | None = None
    tensors: dict[str, _Tensor]
    files: dict[_Name, _File] = {}


class _Row(_Part):
    method: _Method
    label: _Method | None = None


class _Rows(_Part):
    methods: Annotated[list[_Row], Field(min_length=1)]


class _Comparison(_Part):
    """covmerge.json of the folder around the models of a comparison."""

    comparison: _Rows


def read_manifest(folder: Path | Store) -> dict[str, Any]:
    """Read covmerge.json of a merged model or adapter, and check the keys that readers use.

    Raises:
        InputError: there is no such file, or it describes something else, such as a comparison.
    """
    manifest = _read(local_store(folder))
    if "comparison" in manifest:
        first = _folders(manifest)[0]
        raise InputError(
            f"{folder} holds a comparison: verify one of its models, such as {folder}/{first}"
        )
    return manifest


@contextmanager
def recorded_in(manifest: str | Path) -> Generator[None]:
    """Name the manifest in errors about the recipe that it records or about the sources in it.

    Raises:
        RecipeError: an error in the recipe.
        CheckpointError: an error in a file.
    """
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"the recipe in {manifest}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"a source in {manifest}: {error}") from error


def unknown_files(store: Store) -> list[str]:
    """Return the paths of files in an output that covmerge did not write, not even in part.

    Raises:
        InputError: it is no output of covmerge, or one whose manifest does not list its files.
    """
    manifest = _read(store)
    if "comparison" in manifest:
        models = _folders(manifest)
        known = {*models, *SCORES, MANIFEST_NAME}
        strange = [name for name in _finished(store) if name.partition("/")[0] not in known]
        for model in sorted({*models} & {*store.folders()}):
            strange += [f"{model}/{name}" for name in unknown_files(store.inside(model))]
        return strange
    if "files" not in manifest:
        raise InputError(
            f"{store.where(MANIFEST_NAME)} does not list the files of the output, as an older covmerge "
            "wrote it"
        )
    known = {*manifest["files"], *ADDED_LATER, MANIFEST_NAME}
    return [name for name in _finished(store) if name not in known]


def _finished(store: Store) -> list[str]:
    """Return the paths of an output's files, without what a kill left of those that are added later."""
    return [name for name in tree(store) if finished_name(name) not in ADDED_LATER | SCORES]


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read covmerge.json of a comparison.

    Raises:
        InputError: there is no such file, or it describes one model.
    """
    manifest = _read(local_store(folder))
    if "comparison" not in manifest:
        raise InputError(f"{folder} holds one model, and no comparison: name another folder")
    return manifest


def _folders(manifest: dict[str, Any]) -> list[str]:
    """Return the names of the folders of a comparison's models."""
    return [row.get("label") or row["method"] for row in manifest["comparison"]["methods"]]


def _read(store: Store) -> dict[str, Any]:
    file = StoredFile(store, MANIFEST_NAME)
    try:
        file.stamp()
        manifest = read_object(file, size=MAX_BYTES)
        (_Comparison if "comparison" in manifest else _Model).model_validate(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{store} has no {MANIFEST_NAME}: it is not a finished output of covmerge. Name the "
            "folder that `covmerge merge` wrote."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = shorten(".".join(map(str, first["loc"])))
        raise InputError(
            f"{file} cannot be read as a covmerge manifest: {where}: {first['msg']}; merge again, or "
            "take the file from where the output came from"
        ) from error
    except CheckpointError as error:
        raise InputError(f"{file} cannot be read as a covmerge manifest: {error}") from error
    except OSError as error:  # such as a loop of links
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    return manifest


def pinned_source(manifest: Mapping[str, Any], key: str, source: str) -> str:
    """Return a source; on the Hub, where a branch moves on, at the commit that was merged."""
    commit = manifest.get("sources", {}).get(key, {}).get("content", {}).get("revision")
    return source if commit is None else f"{source.partition('@')[0]}@{commit}"
