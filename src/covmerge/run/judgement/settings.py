"""Findings on settings beside an expert's weights that differ from those of the output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isclose, isnan
from pathlib import Path, PureWindowsPath
from typing import Any, cast

from covmerge.base.errors import CheckpointError
from covmerge.base.findings import Finding, Severity
from covmerge.base.identifiers import hub_id
from covmerge.base.text import shown, some
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import CONFIG, read_config
from covmerge.files.checkpoints.modules import module_folders
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.paths import safe_path
from covmerge.files.tensors.skeleton import with_defaults
from covmerge.plan.vocabulary.files import is_tokenizer_file, template_of
from covmerge.run.sources import OpenCheckpoints

_GENERATION = "generation_config.json"
_PROCESSORS = (
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
    *("video_preprocessor_config.json", "feature_extractor_config.json"),
    *("config_sentence_transformers.json", "sentence_bert_config.json"),
)
# Keys that are not compared. Most do not change what the weights compute: writer of the file, training,
# heads, generation. The others are decided elsewhere: vocabulary, ties, the stored dtype.
_ASIDE = re.compile(
    r"^_|version|dtype|^architectures$|^auto_map$|^name_or_path$|^model_type$|_implementation$|flash|"
    r"drop|initializer|^init_|_init(_|$)|loss|coef|jitter|gradient|^pretraining_tp$|^apply_spec_augment$|"
    r"^mask_(time|feature)_|^ctc_|token_ids?$|^vocab_size$|^tie_|^output_|return_dict$|^use_cache$|"
    r"^tokenizer_|max_length$|^chunk_size_|^(id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params)$|^quantization|"
    r"^unsloth|^max_window_layers$|"  # `layer_types` is made from it
    # Only a limit: the rope settings that depend on it say more, and position tables have a shape.
    r"^max_position_embeddings$|"
    r"^min_length$|_penalty$|suppress_tokens$|^forced_|no_repeat_ngram_size$|^num_(beam|return_seq)|"
    r"^(early_stopping|do_sample|temperature|top_k|top_p|typical_p|bad_words_ids|remove_invalid_values)$"
)
_ASIDE_OF_FILES = re.compile(r"^_|version|_class$|_type$")
_SHOWN, _LENGTH = 6, 60
_CACHED = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/")  # in the cache of the Hub's client
_QUANTISED = re.compile(
    r"([-_.](unsloth|bnb|hf|[48]-?bits?|int[48]|w4a16|nf4|fp8|gptq|awq|gguf))+$"
)
_LOOK = "look which of the two the merged model should have"


def other_settings(checkpoints: OpenCheckpoints, *, as_model: bool = True) -> Iterator[Finding]:
    """Say which settings of each expert differ from the output's, which are the base's.

    `as_model` says whether the output is a model, with companion files; an adapter has none.
    """
    base, views = checkpoints.base, checkpoints.views
    for name, adapter in checkpoints.adapters.items():
        if base.decides and not (base.is_held or adapter.under):  # else the weights tell the base
            yield from _of_another_base(name, adapter, base)
    for name, expert in checkpoints.experts.items():
        if base.config and expert.config and not expert.is_adapter:
            yield from _of_config(name, base.config, expert.config)
        if not as_model or base.folder is None or expert.folder is None:
            continue
        if expert.folder == base.folder:  # without a base, the first expert's folder stands for it
            continue
        try:
            yield from _of_files(name, base.folder, expert.folder)
            if views.chat_template is None:
                tokens = checkpoints.text.files
                place = tokens.folder if tokens else base.folder
                yield from _of_template(name, place, expert.folder)
        except (CheckpointError, OSError) as error:
            text = f"settings beside its weights were not compared: {error}"
            yield Finding(Severity.NOTE, text, name)


def _of_another_base(name: str, adapter: AdapterCheckpoint, base: Checkpoint) -> Iterator[Finding]:
    """Warn if an adapter names another base: its tensors do not tell which base is right."""
    named = adapter.base_model
    place = Path(base.source).expanduser().resolve()
    known = [base.source, str(place), str(place.parent) if place.is_file() else ""]
    known += [
        one for one in (base.hub and base.hub.name, (base.config or {}).get("_name_or_path")) if one
    ]
    if named is None or _bare(named) in ("", *map(_bare, known)):
        return
    # A folder may have any name, so a path beside a name of the Hub says little.
    severity = Severity.WARNING if _is_path(named) == _is_path(base.source) else Severity.NOTE
    text = (
        f"its adapter_config.json names the base {shown(named)}, and the base here is {base.source}. No "
        "number of an adapter tells whether these are one model. If they are two, the merge is worthless: "
        f"pass the base that it names. If they are one, write {base.source} there as "
        "base_model_name_or_path"
    )
    yield Finding(severity, text, name)


def _is_path(source: str) -> bool:
    return hub_id(source) is None or Path(source).exists()


def _bare(source: str) -> str:
    """Return the last part of a path or name, in lower case, without revision and quantisation suffix."""
    cached = _CACHED.search(source)
    last = PureWindowsPath(source).name if "\\" in source else Path(source).name
    name = cached[1] if cached else last.partition("@")[0]
    # The Hub renamed Meta-Llama-3.1-8B and its like to Llama-3.1-8B.
    return _QUANTISED.sub("", name.lower()).removeprefix("meta-")


def _of_config(name: str, base: Mapping[str, Any], expert: Mapping[str, Any]) -> Iterator[Finding]:
    if dict(_flat(base, _ASIDE)) == dict(_flat(expert, _ASIDE)):
        return  # avoids importing transformers, which takes longer than a small merge
    ours, theirs = (dict(_flat(with_defaults(config), _ASIDE)) for config in (base, expert))
    # transformers reads no key that only one config has: its defaults fill in every key that it reads.
    keys = [
        key
        for key in {**theirs, **ours}
        if _is_known(key, ours)
        and _is_known(key, theirs)
        and _differ(ours.get(key), theirs.get(key))
    ]
    if keys:
        said = [
            f"{key} {_short(theirs.get(key))} (the output: {_short(ours.get(key))})" for key in keys
        ]
        text = (
            f"its {CONFIG} differs from the base's, which the output has: {some(said, _SHOWN)}. Its "
            f"weights were trained to be used so: {_LOOK}"
        )
        yield Finding(Severity.WARNING, text, name)


def _of_files(name: str, base: Path, expert: Path) -> Iterator[Finding]:
    store = LocalFolder(base)
    modules = [f"{folder.path}/{CONFIG}" for folder in module_folders(store, store.names())]
    for file in (_GENERATION, *_PROCESSORS, *modules):
        ours, theirs = (_settings(folder, file) for folder in (base, expert))
        if not theirs:
            continue
        if ours is None:
            text = f"has {file}, and the output has none: copy it into the output if it is wanted"
            yield Finding(Severity.NOTE, text, name)
            continue
        keys = [k for k in sorted({*ours, *theirs}) if _differ(ours.get(k), theirs.get(k))]
        if keys:
            text = (
                f"its {file} differs from the base's, which the output has, in {some(keys, _SHOWN)}"
            )
            yield Finding(Severity.NOTE, f"{text}: {_LOOK}", name)


def _of_template(name: str, output: Path, expert: Path) -> Iterator[Finding]:
    if not _has_tokenizer(output):  # and so the recipe could choose no chat template
        if _has_tokenizer(expert):
            text = "has a tokenizer, and the output has none: copy the tokenizer's files into the output"
            yield Finding(Severity.NOTE, text, name)
        return
    ours, theirs = template_of(output), template_of(expert)
    if theirs is not None and theirs.strip() != (ours or "").strip():
        text = (
            f"its chat template is not the output's, which has {'none' if ours is None else 'another'}: a "
            f"recipe's `chat_template: {name}` takes it"
        )
        yield Finding(Severity.NOTE, text, name)


def _has_tokenizer(folder: Path) -> bool:
    return any(is_tokenizer_file(path.name) and path.is_file() for path in folder.iterdir())


def _settings(folder: Path, name: str) -> dict[str, Any] | None:
    path = safe_path(folder, name)
    return dict(_flat(read_config(path), _ASIDE_OF_FILES)) if path.is_file() else None


def _flat(
    config: Mapping[str, Any], aside: re.Pattern[str], before: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield keys with their values; the keys of an inner object as `outer.inner`."""
    for key, value in ((str(key), value) for key, value in config.items()):  # some keys are numbers
        if aside.search(key):
            continue
        if key == "type" and before.startswith("rope_"):
            key = "rope_type"  # the older name of the key
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), aside, f"{before}{key}.")
        else:
            yield before + key, value


def _is_known(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether a config has a key, or a value such as null for an object that would hold it."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in config for count in range(1, len(parts) + 1))


def _differ(one: object, other: object) -> bool:
    """Return whether two values differ; floats within rounding to float32 do not, nor do two NaN."""
    if isinstance(one, float) and isinstance(other, float):
        return not isclose(one, other, rel_tol=1e-6) and not (isnan(one) and isnan(other))
    return one != other


def _short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
