"""Which library loads an output, and how."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from covmerge.files.adapters.layout import LORA_NAME
from covmerge.files.checkpoints.json_file import read_object
from covmerge.files.checkpoints.modules import MODULES
from covmerge.files.quantised.writing.gguf import GGUF_NAME
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.store import Store, StoredFile

PEFT, TRANSFORMERS, OPEN_CLIP = "peft", "transformers", "open_clip"
SENTENCES, DIFFUSERS = "sentence-transformers", "diffusers"

_CLASS = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FOLDER = 'folder = "."  # this folder, or the name of this repository'
_SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder")
_MOST_VALUES = 100_000  # prompts may be many
# Of a model that takes more than text its class alone does not say what it is for.
_MORE_THAN_TEXT = ("vision_config", "audio_config", "auto_map")


def library_of(output: Store, config: Mapping[str, Any], *, adapter: bool) -> str | None:
    """Return what the Hub calls the library of an output, where it is certain.

    Args:
        output: the output.
        config: config.json of the base; empty if it has none.
        adapter: whether the output is an adapter.
    """
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
    """Return the class of transformers that a config names first, if it names any."""
    named: object = config.get("architectures")
    first = next(iter(cast("list[object]", named)), None) if isinstance(named, list) else None
    return first if isinstance(first, str) and _CLASS.fullmatch(first) else None


def part_class(config: Mapping[str, Any]) -> str | None:
    """Return the class of diffusers that the config of a pipeline's part names, if it names one."""
    named: object = config.get("_class_name")
    return named if isinstance(named, str) and _CLASS.fullmatch(named) else None


def sentence_class(output: Store) -> str:
    """Return the class of sentence-transformers that an output is loaded by, as its config says."""
    file = StoredFile(output, "config_sentence_transformers.json")
    if output.is_file(file.name):
        named = read_object(file, _MOST_VALUES).get("model_type")
        if named in _SENTENCE_CLASSES:
            return str(named)
    return _SENTENCE_CLASSES[0]


def pipeline_of(config: Mapping[str, Any]) -> str | None:
    """Return the Hub's name of what the model does, where it is certain.

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
    """The lines of a program that loads an output.

    Args:
        output: the output.
        library: what `library_of` returns for it.
        config: config.json of the base; empty if it has none.
        base: the base, if it is known on the Hub.
    """
    loader = architecture(config) or "AutoModel"
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
    elif library == TRANSFORMERS and output.is_file(GGUF_NAME) and _only_llama_cpp(config):
        yield from ("from llama_cpp import Llama", "", f'model = Llama("{GGUF_NAME}")')
    elif library == TRANSFORMERS:
        packed, tokenizer = (output.is_file(n) for n in (GGUF_NAME, "tokenizer_config.json"))
        names = (*["AutoConfig"] * packed, *["AutoTokenizer"] * tokenizer, loader)
        yield from (f"from transformers import {', '.join(names)}", "", _FOLDER)
        if packed:  # of the file alone it makes a config without the sizes of experts
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


def _only_llama_cpp(config: Mapping[str, Any]) -> bool:
    """Whether transformers takes a GGUF file of this model for another's: Mixtral's for a Llama's."""
    return config.get("model_type") == "mixtral"
