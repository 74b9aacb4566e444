"""Companion files of a model's weights, copied from the base: config, tokenizer, processors."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from covmerge.base.errors import CheckpointError
from covmerge.base.text import matches_any
from covmerge.files.checkpoints.base import check_unchanged
from covmerge.files.checkpoints.folder import CONFIG
from covmerge.files.checkpoints.json_file import parse_object
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.files.checkpoints.modules import Folder, module_folders
from covmerge.files.stores.hub import COMPANIONS
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.paths import safe_path
from covmerge.files.stores.regular_file import open_regular, pieces
from covmerge.plan.vocabulary.tokens import TOKENIZER_FILES
from covmerge.run.export.config import NO_CHANGES, ConfigChanges

MAX_FILE_BYTES = 512 << 20
_MAX_CONFIG_BYTES = 16 << 20  # parsing a config takes several times its size in memory

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    # processors
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "open_clip_config.json",
    # sentence-transformers
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "router_config.json",
    *("wordembedding_config.json", "whitespacetokenizer_config.json"),
    *("phrasetokenizer_config.json", "stopwordtokenizer_config.json"),
)
_COMPANION_FOLDERS = (
    "[0-9]_*",  # sentence-transformers: 1_Pooling; modules.json names others
    "additional_chat_templates",
)
_IN_COMPANION_FOLDERS = (*_COMPANIONS, "*.jinja")
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json"),
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt"),
    *("*.h5", "*.msgpack", "*.onnx", "*.gguf"),
)
_LOADED = "for transformers pass the model's folder as the base, or copy them into the output"
_NO_CONFIG = f"the base has no folder: the output has no config; {_LOADED}"
_NOTHING = f"the base has no folder: the output has no config or tokenizer; {_LOADED}"
_NOT_THE_OUTPUTS = (*_WEIGHTS, "README*", ".*", MANIFEST_NAME)  # weights, and files about the base


@dataclass(frozen=True)
class Companions:
    """The files that were copied, as paths inside the output, and notes for the user."""

    copied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def with_config(self, *, held: bool) -> Companions:
        """Return these companions with a config that was written although the base has no file of it.

        The base is held in memory; otherwise the config is made from its GGUF file.
        """
        said = (
            f"{CONFIG} is made of what the base's GGUF file says; its tokenizer, if it is not here, is "
            "made by transformers (AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE))"
        )
        if held:
            said = (
                "the base was in memory: the output has its config and no tokenizer; put one beside it, "
                "`tokenizer.save_pretrained(FOLDER)`"
            )
        notes = [note for note in self.notes if note not in (_NOTHING, _NO_CONFIG)]
        if not (held and self.copied):  # the only file copied for a base in memory is a tokenizer
            notes.append(said)
        return Companions((*self.copied, CONFIG), tuple(notes))


def hash_companions(source: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the base's companion files, by their paths in its folder.

    Raises:
        CheckpointError: a companion file leaves the folder, is too large, or cannot be read.
    """
    if source is None:
        return {}
    return {name: _hashed(safe_path(source, name)) for name in _companion_names(source)}


def copy_companions(
    source: Path | None,
    output: LocalFolder,
    changes: ConfigChanges = NO_CHANGES,
    known: Mapping[str, str] | None = None,
) -> Companions:
    """Copy the base's companion files into the output.

    Files are copied byte for byte, with two exceptions: configs change as `changes` says (dtype, layers,
    ties, quantisation, tokens), and the files of a new tokenizer replace the base's. Code is never
    copied: the user should read it before it lies where `trust_remote_code` finds it. `known` has the
    hashes of the files when the merge was planned (`hash_companions`); None accepts the files as they are.

    Raises:
        CheckpointError: a companion file leaves the folder, is too large, cannot be read, or has
            changed since the plan.
        ResourceError: the disk is full.
    """
    tokens = changes.tokens
    written: tuple[str, ...] = ()
    for name, content in () if tokens is None else tokens.write():
        output.put(name, content)
        written += (name,)
    if source is None:
        return Companions(written, (_NO_CONFIG if written else _NOTHING,))
    of_base = _companion_names(source)
    copied = [name for name in of_base if tokens is None or not tokens.replaces(name)]
    notes: list[str] = []
    hashes: dict[str, str] = {}
    for name in copied:
        folder, _, file = name.rpartition("/")
        to = output.inside(folder)
        if name == "config.json":
            hashes[name], content = _copy_config(safe_path(source, name), to, changes)
            notes += _notes_on_code(source, content)
        elif name == "generation_config.json":
            of_tokens = ConfigChanges(tokens=tokens)
            hashes[name], _ = _copy_config(safe_path(source, name), to, of_tokens)
        elif file == "config.json":  # the config of a module
            of_dtype = ConfigChanges(changes.dtype)
            hashes[name], _ = _copy_config(safe_path(source, name), to, of_dtype)
        else:
            hashes[name] = _hashed(safe_path(source, name), to)
    planned = hashes if known is None else known
    for name in sorted({*planned, *hashes} - {*of_base} | {*copied}):
        check_unchanged(source / name, planned.get(name), hashes.get(name))
    with _listing(source):
        notes += _notes_on_the_rest(source, of_base)
    return Companions(tuple(sorted({*copied, *written})), tuple(notes))


def is_weights(name: str) -> bool:
    """Return whether a file of this name is taken for weights, or for an index of weights."""
    return matches_any(name, _WEIGHTS)


@contextmanager
def _listing(source: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read the folder {error.filename or source}: {error.strerror}"
        ) from error


def _companion_names(source: Path) -> list[str]:
    """Return the companions' paths relative to `source`, sorted, with `/` between the parts."""
    found: set[str] = set()
    with _listing(source):
        for folder in _modules(source):
            beside = [name for name in folder.names if name.endswith(COMPANIONS)]
            found |= {f"{folder.path}/{n}" for n in beside if not is_weights(n.rpartition("/")[2])}
        for child in source.iterdir():
            if child.is_file() and matches_any(child.name, _COMPANIONS):
                found.add(child.name)
            elif child.is_dir() and matches_any(child.name, _COMPANION_FOLDERS):
                inside = [f.name for f in safe_path(source, child.name).iterdir() if f.is_file()]
                names = (n for n in inside if matches_any(n, _IN_COMPANION_FOLDERS))
                found.update(f"{child.name}/{name}" for name in names)
    return sorted(found)


def _modules(source: Path) -> list[Folder]:
    """Return the folders of a sentence-transformers model's modules; none for other models."""
    store = LocalFolder(source)
    return module_folders(store, store.names())


def _copy_config(source: Path, to: LocalFolder, changes: ConfigChanges) -> tuple[str, bytes]:
    """Copy a config with changes; return the hash and the content of the original."""
    with _opened(source, _MAX_CONFIG_BYTES) as file:
        content = file.read()
    to.put(source.name, changes.made_to(content, str(source)))
    return hashlib.sha256(content).hexdigest(), content


def _hashed(source: Path, to: LocalFolder | None = None) -> str:
    """Return the hash of a file, and copy it if a copy is wanted."""
    digest, done = hashlib.sha256(), 0
    with _opened(source, MAX_FILE_BYTES) as file:
        if to is not None:
            size = source.stat().st_size
            to.create(source.name, size, b"", needed=size)
        for chunk in pieces(file):
            if to is not None:
                to.write(source.name, memoryview(chunk), done)
            digest.update(chunk)
            done += len(chunk)
    return digest.hexdigest()


def _opened(path: Path, limit: int) -> BinaryIO:
    try:
        size = path.stat().st_size
        file = open_regular(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size > limit:
        file.close()
        raise CheckpointError(
            f"{path} has {size} bytes, and a companion file of a model has at most {limit}: "
            "remove it from the base if it is none"
        )
    return file


def _notes_on_code(source: Path, content: bytes) -> Iterator[str]:
    auto_map = parse_object(content, str(source / "config.json")).get("auto_map")
    if auto_map:
        yield (
            f"config.json needs custom code (auto_map: {auto_map}), which is not copied: read it in "
            f"{source}, then copy it into the output yourself"
        )


def _notes_on_the_rest(source: Path, copied: Sequence[str]) -> Iterator[str]:
    names = [f"{path.name}/" if path.is_dir() else path.name for path in sorted(source.iterdir())]
    folders = {name.partition("/")[0] + "/" for name in copied if "/" in name}
    rest = [
        name
        for name in names
        if name not in copied and name not in folders and not matches_any(name, _NOT_THE_OUTPUTS)
    ]
    code = [name for name in rest if name.endswith(".py")]
    other = [name for name in rest if not name.endswith(".py")]
    if code:
        yield (
            f"custom code of the base is not copied: {', '.join(code)}; read it, then copy it from "
            f"{source} if the output needs it"
        )
    if other:
        yield f"not copied from {source}: {', '.join(other)}"
    for folder in _modules(source):
        paths = (f"{folder.path}/{name}" for name in sorted(folder.names))
        left = [n for n in paths if n not in copied and not matches_any(n, _NOT_THE_OUTPUTS)]
        if left:
            yield f"not copied from {source}: {', '.join(left)}"
