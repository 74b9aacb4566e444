"""adapter_config.json of a merged adapter, as PEFT reads it, and the program that loads an output."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.files.adapters.checkpoint import ADAPTER_CONFIG, AdapterCheckpoint
from covmerge.files.adapters.layout import LORA_NAME, AdaptedTensor, WholeTensor
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.json_file import dumps, read_object
from covmerge.files.checkpoints.modules import MODULES
from covmerge.files.quantised.writing.gguf import GGUF_NAME
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store, StoredFile
from covmerge.plan.planning.adapter import left_out
from covmerge.plan.planning.types import Plan

# The library that loads an output, and the program that does it.

PEFT, TRANSFORMERS, OPEN_CLIP = "peft", "transformers", "open_clip"
SENTENCES, DIFFUSERS = "sentence-transformers", "diffusers"

_CLASS = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FOLDER = 'folder = "."  # this folder, or the name of this repository'
_SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder")
_MOST_VALUES = 100_000  # prompts may be many
# Keys of a config whose model takes more than text, or has its own code: its class does not tell its task.
_MORE_THAN_TEXT = ("vision_config", "audio_config", "auto_map")


def library_of(output: Store, config: Mapping[str, Any], *, adapter: bool) -> str | None:
    """Return the Hub's name of the library that loads an output; None if it is not certain."""
    if adapter:
        return DIFFUSERS if output.is_file(LORA_NAME) else PEFT
    if output.is_file(MODULES):
        return SENTENCES
    if architecture(config):
        return TRANSFORMERS
    if part_class(config):
        return DIFFUSERS
    return OPEN_CLIP if output.is_file("open_clip_config.json") else None


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first class of transformers that a config names, or None."""
    named: object = config.get("architectures")
    first = next(iter(cast("list[object]", named)), None) if isinstance(named, list) else None
    return first if isinstance(first, str) and _CLASS.fullmatch(first) else None


def part_class(config: Mapping[str, Any]) -> str | None:
    """Return the class of diffusers that the config of a pipeline's part names, or None."""
    named: object = config.get("_class_name")
    return named if isinstance(named, str) and _CLASS.fullmatch(named) else None


def sentence_class(output: Store) -> str:
    """Return the class of sentence-transformers that loads an output; by default SentenceTransformer."""
    file = StoredFile(output, "config_sentence_transformers.json")
    if output.is_file(file.name):
        named = read_object(file, _MOST_VALUES).get("model_type")
        if named in _SENTENCE_CLASSES:
            return str(named)
    return _SENTENCE_CLASSES[0]


def pipeline_of(config: Mapping[str, Any]) -> str | None:
    """Return the Hub's name of the model's task; None if it is not certain.

    Example:
        >>> pipeline_of({"architectures": ["LlamaForCausalLM"]})
        'text-generation'
        >>> pipeline_of({"architectures": ["BertModel"]})
    """
    causal = (architecture(config) or "").endswith("ForCausalLM")
    return "text-generation" if causal and not any(map(config.get, _MORE_THAN_TEXT)) else None


def how_to_load(
    output: Store, library: str | None, config: Mapping[str, Any], base: HubModel | None
) -> Iterator[str]:
    """Yield the lines of a program that loads an output."""
    loader, family = architecture(config) or "AutoModel", config.get("model_type")
    if library == PEFT:
        source = '"BASE"'
        if base is not None:
            source = f"{json.dumps(base.name)}, revision={json.dumps(base.commit)}"
        yield from ("from peft import PeftModel", f"from transformers import {loader}", "", _FOLDER)
        yield f"base = {loader}.from_pretrained({source})"
        yield "model = PeftModel.from_pretrained(base, folder)"
    elif library == SENTENCES:
        name = sentence_class(output)
        yield from (f"from sentence_transformers import {name}", "", _FOLDER)
        yield f"model = {name}(folder)"
    elif library == DIFFUSERS:
        if output.is_file(LORA_NAME):
            source = json.dumps("PIPELINE" if base is None else base.name)
            yield from ("from diffusers import DiffusionPipeline", "", _FOLDER)
            yield f"pipe = DiffusionPipeline.from_pretrained({source})"
            yield "pipe.load_lora_weights(folder)"
            return
        part = part_class(config)
        yield from (f"from diffusers import {part}", "", _FOLDER)
        yield f"model = {part}.from_pretrained(folder)"
    elif library == TRANSFORMERS and output.is_file(GGUF_NAME) and family == "mixtral":
        # Only llama.cpp loads it: transformers takes a Mixtral's file for a Llama's.
        yield from ("from llama_cpp import Llama", "", f'model = Llama("{GGUF_NAME}")')
    elif library == TRANSFORMERS:
        packed, tokenizer = (output.is_file(n) for n in (GGUF_NAME, "tokenizer_config.json"))
        names = (*["AutoConfig"] * packed, *["AutoTokenizer"] * tokenizer, loader)
        yield from (f"from transformers import {', '.join(names)}", "", _FOLDER)
        if packed:  # the config that transformers makes from a GGUF file lacks the sizes of experts
            yield "config = AutoConfig.from_pretrained(folder)"
        more = f', config=config, gguf_file="{GGUF_NAME}"' if packed else ""
        yield f"model = {loader}.from_pretrained(folder{more})"
        if tokenizer:
            yield "tokenizer = AutoTokenizer.from_pretrained(folder)"
    else:
        yield from ("from pathlib import Path", "", "from safetensors.torch import load_file", "")
        yield "weights = {}"
        yield 'for file in sorted(Path(".").glob("*.safetensors")):'
        yield "    weights |= load_file(file)"


# Where transformers packs experts, PEFT 0.21 takes targets of their layers' names for the packed weights.
# So it never adapts a dense or shared layer of such a name, unless it is a target parameter.
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj$|\d+\.gate_proj\.)")
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")

_WITHOUT_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")


def write_adapter_config(
    store: LocalFolder,
    tensors: Sequence[AdaptedTensor],
    whole: Sequence[WholeTensor],
    parameters: Sequence[str],
    parents: Sequence[Mapping[str, Any]],
    base: Checkpoint,
) -> str:
    """Write adapter_config.json and return its name.

    The adapter updates `tensors` and replaces those in `whole`; `parameters` are the names of all tensors
    of the model. Base, revision and task are those that all parents (the configurations of the merged
    adapters) agree on; without parents, they are the base's.
    """
    ranks = {tensor.module: tensor.rank for tensor in tensors}
    largest = max(ranks.values())  # servers compare this rank with their limit
    named = [name for parent in parents for name in parent.get("target_parameters") or ()]
    # PEFT does not see the parents' target parameters as layers.
    wrapped = {m for m in ranks if any(f".{m}.weight".endswith(f".{name}") for name in named)}
    if any(map(_EXPERTS.search, parameters)):
        wrapped |= {module for module in ranks if module.endswith(_TAKEN_FOR_EXPERTS)}
    # Each pattern matches only one module; PEFT looks a router up by the name of its weight.
    special: dict[str, Json] = {
        rf"^{re.escape(module)}(\.weight)?": rank
        for module, rank in ranks.items()
        if rank != largest
    }
    name, revision = _named(base) if not parents else (None, None)
    config: dict[str, Json] = {
        "peft_type": "LORA",
        "base_model_name_or_path": _agreed(parents, "base_model_name_or_path") or name,
        "revision": _agreed(parents, "revision") or revision,
        "task_type": _task_type(parents, base),
        "inference_mode": True,
        # The factors include the scale, so alpha / r is 1 in every layer.
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": special,
        "alpha_pattern": special,
        "target_modules": _targets(sorted(ranks.keys() - wrapped), parameters),
        **(
            {"target_parameters": [f"{name}.weight" for name in sorted(wrapped)]} if wrapped else {}
        ),
        "fan_in_fan_out": any(t.transposed and not t.embedding for t in tensors),
        "bias": "none" if all(len(t.modules) == len(t.names) for t in whole) else "all",
        "modules_to_save": sorted({module for t in whole for module in t.modules}) or None,
        "lora_dropout": 0.0,
    }
    content = dumps(config, what="adapter_config", indent=2).encode() + b"\n"
    store.put(ADAPTER_CONFIG, content)
    return ADAPTER_CONFIG


def bases_that_differ(adapters: Sequence[AdapterCheckpoint]) -> Iterator[str]:
    """Say that the adapters name different bases, so that the merged adapter names none."""
    named = sorted({adapter.base_model or "none" for adapter in adapters})
    if len(named) > 1:
        yield (
            f"the adapters name different bases ({', '.join(named)}), so the merged one names none: "
            "load it over a base of your choice"
        )


def changed_and_left_out(plan: Plan, changed: Collection[str]) -> Iterator[str]:
    """Say which tensors with a merged update that is not zero the adapter leaves out."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.name in changed and not tensor.form.places(tensor.output, None):
            why = f"they are no layers with factors ({Hint('whole')} holds them where PEFT can)"
            if tensor.ties:
                whole = Hint("whole")
                why = f"PEFT would add factors of tied weights twice, so they are only held whole ({whole})"
            reasons[why].append(tensor.name)
    for why, names in reasons.items():
        yield left_out(names, why)


def _targets(modules: Sequence[str], parameters: Sequence[str]) -> Json:
    """Return the layers as a list, or as one expression if a name also ends that of another layer."""
    others = {name.rpartition(".")[0] for name in parameters} - set(modules)
    if any(other.endswith(f".{module}") for other in others for module in modules):
        return "|".join(map(re.escape, modules))
    return list(modules)


def _named(base: Checkpoint) -> tuple[str | None, str | None]:
    """Return the name and revision that load a base; no name if the base was in memory."""
    if base.hub is not None:
        return base.hub.name, base.hub.commit
    return (None if base.identity()["kind"] == "memory" else base.source), None


def _task_type(parents: Sequence[Mapping[str, Any]], base: Checkpoint) -> Json:
    """Return PEFT's task if PEFT adds no head for it, else None: the adapter has no head."""
    if parents:
        task = _agreed(parents, "task_type")
        return task if task in _WITHOUT_HEAD else None
    architectures = (base.config or {}).get("architectures") or [""]
    return "CAUSAL_LM" if str(architectures[0]).endswith("ForCausalLM") else None


def _agreed(parents: Sequence[Mapping[str, Any]], key: str) -> Json:
    values = [parent.get(key) for parent in parents]
    return values[0] if values and all(value == values[0] for value in values) else None
